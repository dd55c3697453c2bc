"""The yardstick is a correct pool, or a comparison with it would mean nothing."""

from __future__ import annotations

import numpy as np
import pytest

from bench.probes.plain_pool import PlainPool
from deepinfer.block_manager import BlockManager


def test_blocks_leave_at_the_front_and_return_last_first():
    """The free order is the engine's default."""
    pool = PlainPool(6)
    assert pool.allocate(3) == [1, 2, 3]
    pool.release([1, 2, 3])
    assert list(pool.free) == [4, 5, 3, 2, 1]


def test_a_block_is_free_when_its_last_owner_is_gone():
    """A pin keeps it."""
    pool = PlainPool(4)
    table = pool.allocate(2)
    pool.pin(table)
    pool.release(table)
    assert list(pool.free) == [3]
    pool.release(table)
    assert list(pool.free) == [3, 2, 1]


@pytest.mark.parametrize("wrong", [[1, 1], [3], [0], [-1]])
def test_what_would_break_ownership_is_refused(wrong):
    """Released twice, released or pinned while free, or no block at all."""
    pool = PlainPool(4)
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="has no owner"):
        pool.release(wrong)
    with pytest.raises(RuntimeError, match="has no owner"):
        pool.pin([2])
    with pytest.raises(RuntimeError, match="asked for 9 of"):
        pool.allocate(9)


def test_a_lost_block_is_noticed():
    """The check can fail."""
    pool = PlainPool(4)
    pool.check_integrity()
    pool.free.pop()
    with pytest.raises(RuntimeError, match="lost a block"):
        pool.check_integrity()


def test_it_does_what_the_engines_pool_does():
    """2,000 random calls leave the same free list and hand out the same blocks."""
    rng = np.random.default_rng(0)
    plain, ours = PlainPool(64), BlockManager(64)
    tables: list[list[int]] = []
    for _ in range(2000):
        size = int(rng.integers(1, 9))
        if rng.random() < 0.5 and size <= ours.num_free:
            tables.append(plain.allocate(size))
            assert ours.allocate(size).tolist() == tables[-1]
        elif tables:
            table = tables[int(rng.integers(len(tables)))]
            if rng.random() < 0.3:
                plain.pin(table)
                ours.pin(table)
                tables.append(table)
            else:
                tables.remove(table)
                plain.release(table)
                ours.release(table)
        assert list(plain.free) == ours.free_ids()
