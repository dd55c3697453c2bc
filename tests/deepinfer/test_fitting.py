"""Running tables fitted to the free blocks: who grows, who waits, who gives way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepinfer.config import EngineConfig
from tests.deepinfer.host_world import World

CONFIG = EngineConfig(
    block_size=4, num_blocks=17, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=48
)


def world(**changes):
    return World(replace(CONFIG, **changes))


def parent_with(num_computed, max_tokens=12, **changes):
    """A world whose request "p" has that many committed rows and one token more."""
    w = world(**changes)
    w.add("p", range(num_computed), max_tokens=max_tokens)
    w.step([1])
    return w


def test_tables_grow_and_shrink_with_the_lookahead():
    """Slots for guesses are reserved before the step and given back when not wanted."""
    w = world()
    w.add("a", [1, 2, 3], max_tokens=20)
    w.step([1])
    row = w.scheduler.find("a").row
    w.scheduler.seqs.num_lookahead_slots[row] = 5
    w.step([1])
    assert w.table("a") == [1, 2, 3]
    w.scheduler.seqs.num_lookahead_slots[row] = 0
    w.step([1])
    assert w.table("a") == [1, 2]
    assert w.blocks.free_ids()[-1] == 3


def test_lookahead_never_reserves_beyond_the_last_position():
    """A guess behind the request's end needs no slot: accepted requests always fit."""
    w = world(num_blocks=3, max_model_len=8)
    w.add("a", [1, 2, 3], max_tokens=5)
    w.step([1])
    w.scheduler.seqs.num_lookahead_slots[w.scheduler.find("a").row] = 5
    w.drain()
    assert w.scheduler.counters.num_preemptions == 0


def test_the_newest_gives_way_and_starts_over_with_its_tokens():
    """Preemption throws rows away, not tokens: the victim recomputes and ends as it would have."""
    w = world(num_blocks=5)
    w.add("a", [1, 2, 3, 4], max_tokens=9)
    w.add("b", [5, 6, 7, 8], max_tokens=9)
    while not w.scheduler.counters.num_preemptions:
        w.step()
    assert w.running_ids() == ["a"]
    assert w.scheduler.find("b").num_preemptions == 1
    assert w.scheduler.counters.num_recomputed_tokens > 0
    w.drain()
    assert {i: (reason, len(t)) for i, (reason, t) in w.ended.items()} == {
        "a": ("length", 13),
        "b": ("length", 13),
    }


def test_most_blocks_takes_back_the_largest_table():
    """The other plug-in picks the victim by size."""
    w = world(num_blocks=7, preemption="most_blocks")
    w.add("large", range(14), max_tokens=4)
    w.step()
    w.add("small", [1, 2, 3], max_tokens=9)
    while not w.scheduler.counters.num_preemptions:
        w.step()
    assert w.running_ids() == ["small"]
    w.drain()


@pytest.mark.parametrize("release", ["step", "polled", "deferred"])
def test_a_row_waits_for_withheld_blocks_instead_of_preempting(release):
    """Blocks that come back anyway are worth one missed step, not somebody's rows; and nobody
    who waits may take what the held-back row lacks."""
    w = world(num_blocks=7, release=release, max_num_seqs=3, max_num_batched_tokens=20)
    w.add("a", range(8), max_tokens=9)
    w.add("b", range(8), max_tokens=9)
    w.add("gone", [1, 2, 3, 4], max_tokens=4)
    w.step([1, 1, 1])
    w.transfer("gone", num_steps=3)
    w.abort("gone")
    assert (w.blocks.num_free, w.blocks.num_withheld) == (1, 1)
    w.add("late", [1], max_tokens=1)
    w.submit()
    assert w.scheduler.counters.num_held_back == 1
    assert w.scheduler.counters.num_preemptions == 0
    assert w.planned_ids == ["a"]
    assert w.running_ids() == ["a", "b"]
    w.collect()
    w.drain()
    assert w.release.counters.num_refused_while_withheld > 0


def test_a_parent_that_writes_a_pinned_tail_gets_its_own_copy():
    """While the fork waits, nobody writes the block it has pinned."""
    w = parent_with(10, max_num_seqs=1)
    w.fork("p", "child")
    w.submit()
    assert w.plan.block_copies.tolist() == [[3, 4]]
    assert w.table("p") == [1, 2, 4]
    w.collect()
    w.submit()
    assert len(w.plan.block_copies) == 0
    w.collect()
    w.drain()


def test_a_waiting_fork_loses_its_pins_rather_than_stop_its_parent():
    """Pins of requests that wait give way to those that run; the fork then computes it all."""
    w = parent_with(10, max_tokens=5, num_blocks=5, max_num_seqs=1)
    w.fork("p", "child", max_tokens=2)
    w.drain()
    assert w.scheduler.counters.num_unforked == 1
    assert w.ended["child"][0] == "length"


def test_a_copy_waits_for_withheld_blocks_and_the_fork_keeps_its_pins():
    """With nothing else to run the engine waits for the fence, and then both go on."""
    w = parent_with(10, max_tokens=5, num_blocks=6, max_num_seqs=2, release="step")
    w.add("gone", [1, 2, 3, 4, 5], max_tokens=4)
    w.step([1, 1])
    w.fork("p", "child")
    w.transfer("gone", num_steps=3)
    w.abort("gone")
    assert (w.blocks.num_free, w.blocks.num_withheld) == (0, 2)
    w.submit()
    counters = w.scheduler.counters
    assert (counters.num_held_back, counters.num_unforked) == (1, 0)
    assert w.planned_ids == ["p", "child"]
    assert w.plan.block_copies.tolist() == [[3, 5]]
    w.collect()
    w.drain()
