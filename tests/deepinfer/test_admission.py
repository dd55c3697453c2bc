"""From the queue to a row: in order of arrival, whole or not at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer.block_manager import Verdict
from deepinfer.config import EngineConfig
from tests.deepinfer.host_world import World

CONFIG = EngineConfig(
    block_size=4, num_blocks=17, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=48
)


def world(**changes):
    return World(replace(CONFIG, **changes))


def scheduled(w):
    """Tokens that the step in flight computes, by request."""
    return dict(zip(w.planned_ids, w.plan.num_scheduled.tolist(), strict=True))


def parent_with(num_computed, max_tokens=12, **changes):
    """A world whose request "p" has that many committed rows and one token more."""
    w = world(**changes)
    w.add("p", range(num_computed), max_tokens=max_tokens)
    w.step([1])
    return w


def test_a_prompt_takes_all_its_blocks_at_the_first_chunk():
    """Chunks divide the computation, not the memory claim."""
    w = world(max_num_batched_tokens=5)
    w.add("a", range(9), max_tokens=2)
    w.submit()
    assert scheduled(w) == {"a": 5}
    assert w.table("a") == [1, 2, 3]
    w.collect()
    w.submit()
    assert scheduled(w) == {"a": 4}
    assert w.plan.sample_seq.tolist() == [0]


def test_waiting_requests_start_in_order_of_arrival():
    """A request that does not fit makes the later ones wait, even if they would fit."""
    w = world(num_blocks=5)
    assert w.add("a", range(9), max_tokens=2) is Verdict.OK
    w.step()
    assert w.add("b", range(8), max_tokens=2) is Verdict.LATER
    assert w.add("c", [1], max_tokens=2) is Verdict.OK
    w.step()
    assert "c" not in w.running_ids()
    assert w.scheduler.counters.num_later == 1
    w.drain()
    assert {reason for reason, _ in w.ended.values()} == {"length"}


def test_max_num_seqs_limits_the_rows():
    """The fifth of four rows waits."""
    w = world()
    for index in range(5):
        w.add(f"r{index}", [index], max_tokens=2)
    w.submit()
    assert len(w.running_ids()) == 4
    w.collect()
    w.drain()


def test_lifetime_admission_never_preempts():
    """Whoever starts has the blocks of its longest life, so nobody is ever taken back."""
    pressed, reserved = (world(num_blocks=9, admission=a) for a in ("prompt", "lifetime"))
    for w in (pressed, reserved):
        for index in range(4):
            w.add(f"r{index}", [index, 1, 2], max_tokens=14)
        w.drain()
    assert pressed.scheduler.counters.num_preemptions > 0
    assert reserved.scheduler.counters.num_preemptions == 0


def test_a_fork_to_decode_shares_full_blocks_and_copies_the_tail():
    """The decode path: the child computes one token, on its own copy of the last block."""
    w = parent_with(10)
    assert w.fork("p", "child") is Verdict.OK
    w.submit()
    assert w.table("p") == [1, 2, 3]
    assert w.table("child") == [1, 2, 4]
    assert w.plan.block_copies.tolist() == [[3, 4]]
    assert scheduled(w) == {"p": 1, "child": 1}
    assert w.blocks.ref_counts(np.array([1, 2, 3, 4])).tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize(
    ("tail", "computed", "copies"),
    [
        ("last", 8, [[2, 4]]),
        ("partial", 8, []),
        ("last", 9, [[3, 4]]),
        ("partial", 9, [[3, 4]]),
    ],
)
def test_fork_copy_decides_about_a_full_last_block(tail, computed, copies):
    """A full block is copied only where asked for; a partial one always."""
    w = parent_with(computed, fork_copy=tail)
    w.fork("p", "child")
    w.submit()
    assert w.plan.block_copies.tolist() == copies


def test_the_verdict_on_a_fork_counts_the_copy_of_its_tail():
    """OK means that the blocks it will ask for are free: shared ones not, the tail's copy yes."""
    w = parent_with(10, max_tokens=5, num_blocks=5)
    assert w.fork("p", "one") is Verdict.OK
    w.step()
    assert w.table("one") == [1, 2, 4]
    assert w.fork("p", "two") is Verdict.LATER


def test_a_request_that_lacks_a_state_slot_takes_no_blocks():
    """It is asked for everything before anything is taken, and told what it lacked."""
    w = world(num_state_slots=2)
    w.add("a", [1, 2, 3], max_tokens=3)
    assert w.add("b", [1, 2, 3], max_tokens=3) is Verdict.OK
    w.submit()
    assert w.running_ids() == ["a"]
    assert w.blocks.num_held == 1
    counters = w.scheduler.counters
    assert (counters.num_later_slots, counters.num_later_blocks) == (1, 0)
    w.collect()
    w.drain()


def test_what_can_never_fit_is_not_queued():
    """Too long for the model, or for the pool; one token less waits and runs."""
    w = world(num_blocks=5)
    assert w.add("model", range(40), max_tokens=9) is Verdict.NEVER
    assert w.add("pool", range(14), max_tokens=4) is Verdict.NEVER
    assert (w.scheduler.num_waiting, w.scheduler.counters.num_never) == (0, 2)
    assert w.add("fits", range(14), max_tokens=3) is Verdict.OK
    w.drain()
