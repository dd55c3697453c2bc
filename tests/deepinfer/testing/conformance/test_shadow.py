"""The shadow: what is free, and in which order it was promised to come back."""

from __future__ import annotations

import pytest

from deepinfer.testing.conformance.shadow import Shadow


@pytest.mark.parametrize(
    ("free_order", "discipline", "queue"),
    [
        ("reverse", "fifo", [4, 3, 1, 2]),
        ("forward", "fifo", [3, 4, 2, 1]),
        ("by_id", "fifo", [3, 4, 1, 2]),
        ("reverse", "lifo", [2, 1, 3, 4]),
        ("forward", "lifo", [1, 2, 4, 3]),
        ("forward", "by_id", [1, 2, 3, 4]),
    ],
)
def test_the_shadow_knows_the_promised_order(free_order, discipline, queue):
    """Two tables are given back, the second behind a fence."""
    shadow = Shadow(5, free_order, discipline)
    shadow.hand_out([1, 2, 3, 4])
    shadow.give_up([2, 1], fenced=True)
    shadow.give_up([3, 4])
    shadow.lift([2, 1])
    assert shadow.queue == queue


def test_free_is_what_has_neither_owner_nor_fence():
    """A shared block, given up once behind a fence, waits for the other owner and the lift."""
    shadow = Shadow(3, None, None)
    shadow.hand_out([1])
    shadow.owners[1] += 1
    for give_up in (lambda: shadow.give_up([1], fenced=True), lambda: shadow.give_up([1])):
        give_up()
        assert shadow.free_ids() == [2]
    shadow.lift([1])
    assert shadow.free_ids() == [1, 2]
