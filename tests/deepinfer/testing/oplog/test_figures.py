"""Figures and the words that ask for them."""

from __future__ import annotations

from collections import Counter
from statistics import median

import pytest

from deepinfer.errors import UserError
from deepinfer.testing.oplog.figures import Figures, Progress


@pytest.mark.parametrize("values", [[3], [1, 2], [5, 1, 1], [1, 9, 3, 3], [2] * 9 + [7] * 9])
def test_reuse_distance_is_the_median(values: list[int]) -> None:
    """Of an even number of distances, the mean of the two in the middle."""
    assert Figures(reuse_distances=Counter(values)).reuse_distance == median(values)


def test_no_reuse_has_no_distance() -> None:
    """None, not 0."""
    assert Figures().reuse_distance is None


def test_progress_is_parsed() -> None:
    """Three kinds; the seed belongs to one of them."""
    assert Progress.parse("late") == Progress("late")
    assert Progress.parse("recorded") == Progress("recorded")
    assert Progress.parse("random:7") == Progress("random", 7)


@pytest.mark.parametrize("text", ["", "soon", "late:3", "random:", "random:x", "random:-1"])
def test_other_progress_is_refused(text: str) -> None:
    """With the words that are valid."""
    with pytest.raises(UserError, match="expected late, recorded or random:SEED"):
        Progress.parse(text)
