"""Forks: what is shared, what is copied, what is let go."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.block_manager import BlockManager
from deepinfer.errors import OutOfBlocksError
from deepinfer.fork import split_fork, take_fork_blocks

PINNED = np.array([1, 2, 3], np.int32)


@pytest.mark.parametrize(
    ("computed", "copy_full_tail", "shared", "sources", "copies_tail"),
    [
        (9, False, [1, 2], [3], True),
        (11, True, [1, 2], [3], True),
        (12, False, [1, 2, 3], [], False),
        (12, True, [1, 2], [3], True),
        (8, False, [1, 2], [3], False),  # a block without committed rows is let go, not copied
        (8, True, [1], [2, 3], True),
        (3, False, [], [1, 2, 3], True),
        (0, True, [], [1, 2, 3], False),
    ],
)
def test_split_at_the_last_committed_row(computed, copy_full_tail, shared, sources, copies_tail):
    """Complete blocks stay shared, a partial tail is copied, what lies behind is let go."""
    split = split_fork(PINNED, computed, 4, copy_full_tail=copy_full_tail)
    assert split.shared.tolist() == shared
    assert split.sources.tolist() == sources
    assert split.copies_tail == copies_tail


def test_the_copy_goes_to_the_first_block_behind_the_shared_ones():
    """The child's table is the shared blocks, the tail's copy, then new blocks."""
    blocks = BlockManager(9)
    blocks.allocate(3)
    forked = take_fork_blocks(blocks, split_fork(PINNED, 10, 4), 5)
    assert forked.table.tolist() == [1, 2, 4, 5, 6]
    assert forked.copies == [(3, 4)]
    assert forked.sources.tolist() == [3]
    assert blocks.ref_count(3) == 1  # still the pin's: given up behind the copy


def test_without_a_tail_nothing_is_copied():
    """A fork at a block boundary that computes a prompt shares everything."""
    blocks = BlockManager(9)
    blocks.allocate(3)
    forked = take_fork_blocks(blocks, split_fork(PINNED, 12, 4), 4)
    assert forked.table.tolist() == [1, 2, 3, 4]
    assert forked.copies == []


def test_a_fork_that_does_not_fit_changes_nothing():
    """Whole or not at all."""
    blocks = BlockManager(5)
    blocks.allocate(3)
    before = blocks.free_ids()
    with pytest.raises(OutOfBlocksError):
        take_fork_blocks(blocks, split_fork(PINNED, 10, 4), 5)
    assert blocks.free_ids() == before
