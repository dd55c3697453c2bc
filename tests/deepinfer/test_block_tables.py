"""Blocks enter and leave tables, with their copies, fences and observers."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.block_manager import BlockManager
from deepinfer.block_tables import BlockTables
from deepinfer.errors import OutOfBlocksError
from deepinfer.fork import split_fork
from deepinfer.observer import Observer
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.sequence import SamplingParams, Sequence, SequenceTable

NONE = np.empty(0, np.int32)


class Taken(Observer):
    """Who put which blocks into a table, and how."""

    def __init__(self):
        self.told = []

    def took(self, owner, ids, path):
        self.told.append((owner, list(map(int, ids)), path))


class Pool:
    def __init__(self, num_blocks=9, release="ordered"):
        self.taken = Taken()
        self.blocks = BlockManager(num_blocks)
        self.queue = ReleaseQueue(self.blocks, release, observer=self.taken)
        self.seqs = SequenceTable(4, 24, 4)
        self.tables = BlockTables(self.seqs, self.blocks, self.queue)

    def start(self, name, num_blocks, pinned=NONE, num_computed=0):
        tokens = np.arange(4 * num_blocks, dtype=np.int32)
        seq = Sequence(name, 0, tokens, len(tokens), SamplingParams())
        split = split_fork(pinned, num_computed, 4)
        return self.tables.start(seq, split, num_blocks, 0)


def test_a_request_starts_grows_and_shrinks():
    """What it gets is told, what it loses goes through the queue."""
    pool = Pool()
    row = pool.start("a", 2)
    pool.tables.grow(np.array([row]), np.array([2], np.int32))
    assert pool.seqs.table(row).tolist() == [1, 2, 3, 4]
    pool.tables.shrink(row, 1, None)
    assert pool.seqs.table(row).tolist() == [1]
    assert pool.blocks.num_free == 7
    assert pool.taken.told == [("a", [1, 2], "admit"), ("a", [3, 4], "append")]


def test_a_fork_copies_its_tail_and_lets_the_source_go():
    """The copy and the source stand in the step's copies, until the next step begins."""
    pool = Pool()
    parent = pool.start("p", 2)
    pinned = pool.seqs.table(parent)
    pool.blocks.pin(pinned)
    row = pool.start("f", 3, pinned, 6)
    assert pool.seqs.table(row).tolist() == [1, 3, 4]
    assert pool.tables.copies.blocks == [(2, 3)]
    assert [ids.tolist() for ids in pool.tables.copies.sources] == [[2]]
    assert pool.tables.copies.owners == ["f"]
    assert not pool.tables.is_shared(2)
    assert pool.tables.is_shared(1)
    pool.tables.begin_step()
    assert pool.tables.copies.blocks == []
    assert pool.taken.told[-1] == ("f", [3, 4], "fork")


def test_a_block_of_one_s_own_takes_the_shared_one_s_place():
    """It is filled from it; the shared one is let go."""
    pool = Pool()
    row = pool.start("a", 2)
    pool.blocks.pin([2])
    assert pool.tables.is_shared(2)
    pool.tables.replace(row, 1)
    assert pool.seqs.table(row).tolist() == [1, 3]
    assert pool.tables.copies.blocks == [(2, 3)]
    assert not pool.tables.is_shared(2)


def test_new_blocks_bring_the_fences_they_are_tagged_with():
    """Under `ordered`, whoever writes them must wait."""
    pool = Pool(num_blocks=3)
    fence = Fence(1, _Open())
    pool.queue.give_up(pool.blocks.allocate(2), fence)
    pool.start("a", 2)
    assert pool.tables.waits == [fence]


def test_a_start_without_room_changes_nothing():
    """No row, no block."""
    pool = Pool(num_blocks=3)
    with pytest.raises(OutOfBlocksError):
        pool.start("a", 3)
    assert (pool.blocks.num_free, pool.seqs.num_free_rows) == (2, 4)


class _Open:
    def query(self):
        return False

    def synchronize(self, timeout_s=None):
        raise AssertionError("nobody waits")
