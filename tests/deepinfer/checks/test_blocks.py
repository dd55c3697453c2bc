"""A watched block manager does what it does, and tells."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.block_manager import BlockManager
from deepinfer.checks.blocks import ObservedBlocks, observed
from deepinfer.errors import OutOfBlocksError, OwnershipError
from deepinfer.observer import Observer
from deepinfer.prefix_cache import CachingBlockManager


class Log(Observer):
    def __init__(self) -> None:
        self.calls = []

    def allocated(self, ids):
        self.calls.append(("allocated", list(ids)))

    def pinned(self, ids):
        self.calls.append(("pinned", list(ids)))

    def hit(self, ids):
        self.calls.append(("hit", list(ids)))

    def published(self, block_id):
        self.calls.append(("published", block_id))

    def released(self, table, ids, fenced):
        self.calls.append(("released", list(table), list(ids), fenced))

    def lifted(self, ids):
        self.calls.append(("lifted", list(ids)))


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def blocks(log):
    return ObservedBlocks(BlockManager(6), log)


def test_every_change_is_told_once_it_is_made(blocks, log):
    """Releases with the table and the order it was visited in."""
    table = blocks.allocate(2)
    assert blocks.allocate_one() == 3
    blocks.pin([1])
    ids = blocks.release(table, fenced=True)
    blocks.lift(ids)
    assert log.calls == [
        ("allocated", [1, 2]),
        ("allocated", [3]),
        ("pinned", [1]),
        ("released", [1, 2], [2, 1], True),
        ("lifted", [2, 1]),
    ]


def test_a_refused_call_is_not_told(blocks, log):
    """Nothing has changed, so there is nothing to tell."""
    with pytest.raises(OutOfBlocksError):
        blocks.allocate(6)
    for call in (blocks.pin, blocks.release, blocks.lift):
        with pytest.raises(OwnershipError):
            call([1])
    assert not log.calls


def test_what_is_not_watched_is_forwarded(blocks):
    """Counters and verdicts are the manager's, and what it lacks is missing."""
    blocks.allocate(2)
    assert (blocks.num_free, blocks.num_held, blocks.discipline) == (3, 2, "fifo")
    assert blocks.ref_counts(np.array([1, 5])).tolist() == [1, 0]
    assert not hasattr(blocks, "no_such_thing")


def test_hits_and_published_blocks_are_told(log):
    """Of a pool that keeps keys; neither a key that another block has nor a refused hit."""
    blocks = observed(CachingBlockManager(6), log)
    blocks.allocate(2)
    assert blocks.publish(1, "a")
    assert not blocks.publish(2, "a")
    blocks.take_hits(blocks.match("a", 1))
    with pytest.raises(OwnershipError):
        blocks.take_hits([2])
    assert log.calls[1:] == [("published", 1), ("hit", [1])]
