"""Names at the places of a pool."""

from __future__ import annotations

import numpy as np

from deepinfer.testing.oplog.places import Places


def test_a_place_has_the_name_it_was_given_last() -> None:
    """None, which is 0, before that."""
    places = Places("states", 4)
    places.names[[1, 3]] = [7, 8]
    assert places.named([3, 1, 3]) == (8, 7, 8)
    places.names[3] = 9
    assert places.named(np.array([3, 2])) == (9, 0)
