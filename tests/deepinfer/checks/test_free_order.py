"""The expected free list, against the pool's own."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.block_manager import BlockManager
from deepinfer.checks.free_order import ExpectedFreeList, PendingLifts, in_order
from deepinfer.names import DISCIPLINES, FREE_ORDERS


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_it_is_the_list_the_pool_has(discipline):
    """Over a few hundred random allocations and releases of every size."""
    rng = np.random.default_rng(1)
    pool, expected = BlockManager(40, discipline=discipline), ExpectedFreeList(40, discipline)
    tables = []
    for _ in range(400):
        if tables and (rng.random() < 0.5 or pool.num_free < 8):
            ids = pool.release(tables.pop(int(rng.integers(len(tables)))))
            expected.join([int(block_id) for block_id in ids])
        else:
            tables.append(pool.allocate(int(rng.integers(0, 8))).tolist())
            assert expected.leave(tables[-1]) is None
        assert expected.ids == pool.free_ids()


def test_other_ids_than_the_next_are_noticed_and_followed():
    """What should have come is given back; the list goes on without what came."""
    expected = ExpectedFreeList(6, "fifo")
    assert expected.leave([2, 9]) == [1, 2]
    assert expected.ids == [1, 3, 4, 5]


@pytest.mark.parametrize("free_order", FREE_ORDERS)
def test_the_pool_releases_in_order(free_order):
    """Every free order is recognised, and another one is not."""
    pool = BlockManager(9, free_order=free_order)
    pool.allocate(8)
    table = [5, 2, 7, 1]
    assert in_order(free_order, table, [int(i) for i in pool.release(table)])
    assert not in_order(free_order, table, [7, 5, 2, 2])


def test_lifts_come_in_the_order_of_release():
    """Oldest release first, each as it was released; every other way says what was wrong."""
    lifts = PendingLifts()
    for ids in ([1, 2], [3], [5, 4]):
        lifts.add(ids)
    assert "released first" in (lifts.lift([3]) or "")
    assert lifts.lift([1, 2]) is None
    assert "in this order, not in [5, 4]" in (lifts.lift([4, 5]) or "")
    assert "no release put there" in (lifts.lift([4]) or "")
