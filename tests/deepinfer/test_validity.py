"""The four conditions of a committed row, and the arithmetic of rings and compressed rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer.errors import UserError
from deepinfer.validity import (
    Row,
    closing_position,
    final_rows,
    ring_position,
    ring_rows,
    why_not_valid,
)

GOOD = Row(position=7, num_committed=8, owned=True, found=7, filled=True)


def test_a_row_that_meets_all_four_conditions_is_valid():
    """The last committed row of a request, in its place, copied or never copied."""
    assert why_not_valid(GOOD) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"owned": False}, "not the request's"),
        ({"num_committed": 7}, "position 7 is not below the 7 processed"),
        ({"num_committed": 0}, "not below the 0 processed"),
        ({"position": -1, "found": -1}, "position -1 is not below"),
        ({"found": 141}, "not there any more, or not yet: position 141 is"),
        ({"found": 6}, "position 6 is"),
        ({"found": None}, "nothing is"),
        ({"filled": False}, "copy that fills it has not completed"),
    ],
)
def test_each_condition_alone_makes_a_row_invalid(change, reason):
    """One thing wrong at a time; the reason names it."""
    assert reason in (why_not_valid(replace(GOOD, **change)) or "")


def test_conditions_are_independent():
    """Of all sixteen combinations exactly one is valid."""
    valid = [
        why_not_valid(
            Row(7, num_committed=8 - late, owned=not alien, found=7 + moved, filled=not pending)
        )
        is None
        for alien in (0, 1)
        for late in (0, 1)
        for moved in (0, 1)
        for pending in (0, 1)
    ]
    assert valid == [True] + [False] * 15


@pytest.mark.parametrize("ring_len", [1, 4, 14, 134])
def test_ring_position_is_what_writing_one_by_one_leaves(ring_len):
    """At every length to two wraps and more, for every row of the ring."""
    ring: list[int | None] = [None] * ring_len
    for num_written in range(2 * ring_len + 3):
        assert [ring_position(row, num_written, ring_len) for row in range(ring_len)] == ring
        ring[num_written % ring_len] = num_written


def keeps_the_window(window: int, num_drafts: int, ring_len: int) -> bool:
    """Whether a step of 1 + drafts rows, cut to any length or none, leaves the window before its
    next token whole, at every length of the request.
    """
    for num_before in range(2 * ring_len + 2):
        num_written = num_before + 1 + num_drafts
        for num_committed in range(num_before, num_written + 1):
            for position in range(max(num_committed - window + 1, 0), num_committed):
                found = ring_position(position % ring_len, num_written, ring_len)
                row = Row(position, num_committed, owned=True, found=found, filled=True)
                if why_not_valid(row) is not None:
                    return False
    return True


@pytest.mark.parametrize("window", [2, 8, 32])
@pytest.mark.parametrize("num_drafts", [0, 1, 5])
def test_a_ring_keeps_a_full_window_whatever_is_rejected(window, num_drafts):
    """With window + 1 + drafts rows; with two less a rejection finds rows overwritten."""
    assert keeps_the_window(window, num_drafts, window + 1 + num_drafts)
    assert not keeps_the_window(window, num_drafts, window + num_drafts - 1)


def test_ring_rows_of_arrays_and_numbers():
    """state_id * ring_len + position % ring_len, at both sides of each wrap."""
    states = np.array([1, 1, 1, 1, 3, 3], np.int64)
    positions = np.array([0, 133, 134, 135, 267, 268], np.int64)
    expected = [134, 134 + 133, 134, 135, 3 * 134 + 133, 3 * 134]
    assert ring_rows(states, positions, 134).tolist() == expected
    assert ring_rows(3, 268, 134) == 402


def test_rows_of_different_slots_never_meet():
    """Every slot has `ring_len` rows of its own."""
    rows = {ring_rows(state, position, 5) for state in range(4) for position in range(12)}
    assert rows == set(range(20))


@pytest.mark.parametrize("ratio", [1, 2, 4, 16, 128])
def test_a_compressed_row_is_final_with_its_last_token(ratio):
    """The count of final rows and the four conditions agree on every row at every length."""
    for num_committed in range(3 * ratio + 2):
        valid = [
            why_not_valid(Row(last, num_committed, owned=True, found=last, filled=True)) is None
            for last in (closing_position(row, ratio) for row in range(5))
        ]
        assert valid == [row < final_rows(num_committed, ratio) for row in range(5)]


def test_the_example_of_the_model():
    """Ratio 2: row 0 is final when position 1 is committed, that is with two tokens."""
    assert [final_rows(length, 2) for length in range(6)] == [0, 0, 1, 1, 2, 2]
    assert closing_position(0, 2) == 1
    assert [final_rows(length, 1) for length in range(3)] == [0, 1, 2]
    with pytest.raises(UserError, match="ratio: 0"):
        final_rows(4, 0)
