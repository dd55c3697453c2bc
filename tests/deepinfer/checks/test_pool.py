"""One pool's books where blocks are found by what they hold: right is silent, wrong is found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deepinfer.checks.blocks import observed
from deepinfer.checks.findings import Findings
from deepinfer.checks.pool import PoolChecker
from deepinfer.free_list import LinkedFreeList
from deepinfer.prefix_cache import CachingBlockManager
from deepinfer.release import Fence, ReleaseQueue

SIZE = 12
ORDERS = [order for order in CachingBlockManager.free_orders if order != "shuffled"]


class Watched:
    """A pool, its queue, and the checker of both."""

    def __init__(self, free_order="reverse"):
        self.findings = Findings()
        checker = PoolChecker(self.findings, "block")
        self.pool = CachingBlockManager(SIZE, free_order=free_order)
        self.blocks = observed(self.pool, checker)
        self.queue = ReleaseQueue(self.blocks, "step", observer=checker)
        host = SimpleNamespace(num_steps=0, in_flight=None, running=(), waiting=())
        checker.watch(host, self.pool, self.queue, SIZE)
        self._checker = checker

    def publish(self, table, keys):
        for block_id, key, parent in zip(table, keys, [None, *keys], strict=False):
            self.blocks.publish(int(block_id), key, parent)

    @property
    def said(self):
        """Every finding so far, those of the counters and the free list among them."""
        self._checker._report("counters", 0, self._checker._counters())
        return [finding.message for finding in self.findings.first]


@pytest.mark.parametrize("free_order", ORDERS)
@pytest.mark.parametrize("fence", [None, 1])
def test_hits_of_every_state_are_followed(free_order, fence):
    """Owned, free and withheld blocks are hit, given up and handed out, in every free order."""
    w = Watched(free_order)

    def give_up(table, step):
        w.queue.give_up(table, Fence(step) if fence else None)
        assert w.said == []

    first, second = w.blocks.allocate(4), w.blocks.allocate(3)
    w.publish(first[:3], "abc")
    w.publish(second[:1], "x")
    w.blocks.take_hits(w.blocks.match("ab", 2))
    give_up(first, 1)
    give_up(w.blocks.match("ab", 2), 2)
    w.blocks.take_hits(w.blocks.match("abc", 3))
    give_up(second, 3)
    w.queue.collected(2)
    give_up(first[:3], 4)
    w.queue.collected(4)
    third = w.blocks.allocate(8)
    assert w.said == []
    w.publish(third[:2], "yz")
    give_up(third, 5)
    w.queue.collected(5)
    assert w.said == []
    assert w.pool.num_free == SIZE - 1


def test_a_hit_of_what_holds_nothing_is_found():
    """A key that outlived its block: nano-vllm#163 as the books see it."""
    w = Watched()
    w.publish(w.blocks.allocate(1), "a")
    w.queue.give_up([1])
    w.pool._keys[5] = "stale"
    w.blocks.take_hits([1, 5])
    assert w.said == ["blocks 5 were hit, and hold nothing"]


def test_a_hit_that_stays_in_the_free_list_is_found(monkeypatch):
    """The next request would be handed what this one reads."""
    w = Watched()
    w.publish(w.blocks.allocate(1), "a")
    w.queue.give_up([1])
    monkeypatch.setattr(LinkedFreeList, "remove", lambda self, block_id: None)
    w.blocks.take_hits([1])
    assert "the free list holds 1, which are not free" in w.said


@pytest.mark.parametrize(
    ("free_order", "another"),
    [("reverse_unhashed_first", "reverse"), ("reverse", "reverse_unhashed_first")],
)
def test_a_table_visited_in_another_order_is_found(free_order, another):
    """Keys are looked at by exactly the order that says so."""
    w = Watched(free_order)
    table = w.blocks.allocate(2).tolist()
    w.publish(table[1:], "b")
    w.pool.free_order = another
    w.queue.give_up(table)
    assert w.said[0].endswith(f", not {free_order}")


@pytest.mark.parametrize("free_order", ["reverse_unhashed_head", "never_hit_first"])
def test_a_block_that_joins_at_the_wrong_place_is_found(free_order):
    """The expected list puts it where its key, or the hit, says."""
    w = Watched(free_order)
    table = w.blocks.allocate(3)
    w.publish(table[:1], "a")
    w.blocks.take_hits([1])
    w.queue.give_up([1])
    w.queue.give_up([1])
    w.pool._linked._joins_front = None
    w.queue.give_up(table[1:])
    assert any("in the order in which blocks came free it is" in message for message in w.said)
