"""The covering array itself: all pairs, few rows, no chance."""

from __future__ import annotations

from itertools import combinations

from tests.deepinfer.ahead.covering import pairwise

AXES = {"a": [0, 1, 2], "b": "xy", "c": [True, False], "d": [0, 1, 2, 3], "e": ["off", "on"]}


def test_every_pair_of_values_meets_in_some_row():
    """Of each two axes all combinations, each row with a value of every axis."""
    rows = pairwise(AXES)
    assert all(list(row) == list(AXES) for row in rows)
    for one, other in combinations(AXES, 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == {(x, y) for x in AXES[one] for y in AXES[other]}


def test_it_takes_little_more_than_the_largest_pair():
    """12 pairs of `a` and `d` need 12 rows; the product has 96."""
    assert 12 <= len(pairwise(AXES)) <= 15
    assert pairwise(AXES) == pairwise(AXES)
