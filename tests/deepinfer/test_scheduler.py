"""The scheduler: what arrives, what a step computes, and what a result changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer.block_manager import Verdict
from deepinfer.config import EngineConfig
from deepinfer.errors import UnknownRequestError, UserError
from deepinfer.sequence import SamplingParams
from tests.deepinfer.host_world import World

CONFIG = EngineConfig(
    block_size=4, num_blocks=17, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=48
)


def world(**changes):
    return World(replace(CONFIG, **changes))


def state(w):
    """Everything a refused call must leave alone."""
    counters = [array.tolist() for array in w.scheduler.seqs.gather(np.arange(4))]
    refs = w.blocks.ref_counts(np.arange(w.blocks.num_blocks)).tolist()
    return refs, w.blocks.free_ids(), counters, w.scheduler.num_waiting, w.scheduler.num_running


def scheduled(w):
    """Request id -> tokens of the step in flight."""
    plan = w.plan
    ids = {seq.row: seq.request_id for seq in w.scheduler.running}
    rows, counts = plan.rows.tolist(), plan.num_scheduled.tolist()
    return {ids[row]: count for row, count in zip(rows, counts, strict=True)}


# -- arrivals ------------------------------------------------------------------------------------


def test_decodes_go_first_and_a_chunk_takes_what_is_left():
    """A long prompt neither stops the running decodes nor exceeds the budget."""
    w = world(max_num_batched_tokens=6)
    w.add("a", [1, 2], max_tokens=8)
    w.step()
    w.add("b", range(12), max_tokens=2)
    w.submit()
    assert scheduled(w) == {"a": 1, "b": 5}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens: 3 is less than max_num_seqs 4"),
        ({"block_size": 0}, "block_size: 0; at least 1"),
        ({"max_num_seqs": -1}, "max_num_seqs: -1"),
        ({"max_model_len": 0}, "max_model_len: 0"),
        ({"max_model_len": 48.0}, "max_model_len: 48.0; expected an integer"),
        ({"num_blocks": 16.5}, "num_blocks: 16.5; expected an integer"),
        ({"seed": 1.5}, "seed: 1.5; expected an integer"),
        ({"admission": "promt"}, "admission: unknown name 'promt'"),
        ({"preemption": "oldest"}, "preemption"),
        ({"fork_copy": "never"}, "fork_copy"),
    ],
)
def test_bad_settings_are_refused_by_key(changes, match):
    """The key and the value stand in the message."""
    with pytest.raises(UserError, match=match):
        world(**changes)


@pytest.mark.parametrize(
    ("prompt", "sampling", "match"),
    [
        ([], {}, "empty prompt"),
        ([1], {"max_tokens": 0}, "max_tokens 0"),
        ([1], {"temperature": -0.1}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature nan"),
        ([1], {"seed": 2**63}, "seed"),
        ([1], {"stop_token_id": 2**31}, "stop_token_id"),
        ([1], {"stop_token_id": -1}, "stop_token_id"),
        ([1], {"max_tokens": 2.5}, "max_tokens 2.5"),
        ([1], {"max_tokens": True}, "max_tokens True"),
        ([1], {"temperature": "x"}, "temperature 'x'"),
        ([1], {"temperature": True}, "temperature True"),
        ([1], {"temperature": 1e-39}, "temperature 1e-39; expected 0"),
        ([1], {"seed": 1.5}, "seed 1.5"),
        ([1], {"stop_token_id": 2.0}, "stop_token_id 2.0"),
    ],
)
def test_a_bad_request_is_refused_at_once_and_changes_nothing(prompt, sampling, match):
    """Nothing that could fail when the request gets its row is let into the queue."""
    w = world()
    w.add("parent", [1, 2, 3, 4, 5])
    w.step()
    before = state(w)
    with pytest.raises(UserError, match=match):
        w.scheduler.add("a", np.array(prompt, np.int32), SamplingParams(**sampling))
    if prompt:
        with pytest.raises(UserError, match=match):
            w.scheduler.fork("parent", "a", SamplingParams(**sampling))
    assert state(w) == before
    with pytest.raises(UnknownRequestError):
        w.scheduler.find("a")


def test_an_id_in_use_is_refused():
    """A live id cannot be taken twice; one whose request has ended can."""
    w = world()
    w.add("a", [1], max_tokens=1)
    with pytest.raises(UserError, match="'a' is already in use"):
        w.add("a", [2])
    w.drain()
    w.add("a", [2])


# -- forks ---------------------------------------------------------------------------------------


def parent_with(num_computed, max_tokens=12, **changes):
    """A world whose request "p" has that many committed rows and one token more."""
    w = world(**changes)
    w.add("p", range(num_computed), max_tokens=max_tokens)
    w.step([1])
    return w


def test_a_fork_with_tokens_of_its_own_computes_a_prompt():
    """The prompt path: complete blocks shared, only a partial tail copied, own tokens computed."""
    w = parent_with(10)
    w.fork("p", "even", own=[7, 7], num_shared=8)
    w.fork("p", "odd", own=[7, 7], num_shared=6)
    w.submit()
    assert scheduled(w) == {"p": 1, "even": 2, "odd": 2}
    assert w.table("even")[:2] == [1, 2]
    assert w.table("odd")[:1] == [1]
    assert [source for source, _ in w.plan.block_copies.tolist()] == [2]


def test_a_fork_outlives_its_parent():
    """The child's pins keep the prefix when the parent is gone before it starts."""
    w = parent_with(10, max_num_seqs=1)
    w.fork("p", "child")
    w.abort("p")
    w.step()
    assert w.table("child")[:2] == [1, 2]
    w.drain()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_shared": 0}, "num_shared_tokens: 0"),
        ({"num_shared": 99}, "num_shared_tokens: 99 of 11"),
    ],
)
def test_a_bad_fork_changes_nothing(arguments, match):
    """More tokens than the parent has, or none, are refused."""
    w = parent_with(10)
    before = state(w)
    with pytest.raises(UserError, match=match):
        w.fork("p", "child", **arguments)
    assert state(w) == before


def test_a_fork_that_never_fits_changes_nothing():
    """NEVER leaves no pin behind, and the id is free."""
    w = parent_with(10)
    before = state(w)
    assert w.fork("p", "child", max_tokens=60) is Verdict.NEVER
    assert state(w) == before
    assert w.fork("p", "child") is Verdict.OK


def test_only_a_running_request_can_be_forked():
    """A waiting parent has no blocks to share; an unknown one is unknown."""
    w = world(max_num_seqs=1)
    w.add("a", [1])
    with pytest.raises(UserError, match="'a' is not running"):
        w.fork("a", "child")
    with pytest.raises(UnknownRequestError):
        w.fork("nobody", "child")


def test_a_fork_of_an_uncomputed_parent_shares_nothing():
    """Before its first rows are committed a parent has only tokens to give."""
    w = world()
    w.add("p", range(6), max_tokens=4)
    w.submit()
    w.fork("p", "child")
    w.collect()
    w.submit()
    assert len(w.plan.block_copies) == 0
    assert w.table("child") == [3, 4]
    assert w.scheduler._waiting.num_pinned_forks == 0


# -- results -------------------------------------------------------------------------------------


def test_a_stop_token_ends_a_request_and_frees_its_blocks():
    """The stop token is part of the output; the blocks come back in the free order."""
    w = world()
    w.add("a", range(6), max_tokens=9, stop=7)
    w.step([3])
    commit = w.step([7])
    assert [(seq.request_id, seq.finish_reason) for seq in commit.finished] == [("a", "stop")]
    assert w.ended["a"] == ("stop", [0, 1, 2, 3, 4, 5, 3, 7])
    assert w.blocks.free_ids()[-2:] == [2, 1]


@pytest.mark.parametrize("release", ["deferred", "polled", "step"])
def test_an_abort_in_flight_withholds_until_the_step_is_done(release):
    """The step may still write the blocks; its result for that request is dropped."""
    w = world(release=release, num_blocks=5)
    w.add("a", range(6), max_tokens=9)
    w.add("b", [1], max_tokens=3)
    w.submit()
    w.abort("a")
    assert (w.blocks.num_free, w.blocks.num_withheld) == (1, 2)
    commit = w.collect()
    assert commit.request_ids == ["b"]
    w.drain()


def test_a_result_is_not_credited_to_the_next_owner_of_a_row():
    """A stale epoch changes no counter: the row's new owner starts from its own tokens."""
    w = world(max_num_seqs=1)
    w.add("old", [1, 2, 3], max_tokens=5)
    w.submit()
    row = w.scheduler.find("old").row
    w.abort("old")
    w.add("new", [4, 5], max_tokens=2)
    commit = w.collect()
    assert commit.request_ids == []
    w.submit()
    assert w.scheduler.find("new").row == row
    assert w.plan.token_ids.tolist() == [4, 5]
    w.collect()
    w.drain()


def test_aborting_everything_in_flight_leaves_an_empty_pool():
    """The result of a step nobody wants any more is collected without harm."""
    w = world()
    for index in range(3):
        w.add(f"r{index}", range(5))
    w.submit()
    for index in range(3):
        w.abort(f"r{index}")
    w.collect()
    assert w.blocks.num_free == w.blocks.num_usable


def test_nothing_to_do_is_none():
    """An idle scheduler has no plan."""
    assert world().scheduler.schedule() is None


@pytest.mark.parametrize("request_id", [7, None, ["a"]])
def test_a_request_id_is_a_string(request_id):
    """Another type is refused by `add` and `fork` alike, and changes nothing."""
    w = world()
    w.add("parent", [1, 2, 3], max_tokens=4)
    w.step()
    before = state(w)
    with pytest.raises(UserError, match=r"request id .* expected a string"):
        w.scheduler.add(request_id, np.array([1], np.int32), SamplingParams())
    with pytest.raises(UserError, match=r"request id .* expected a string"):
        w.scheduler.fork("parent", request_id, SamplingParams())
    assert state(w) == before


@pytest.mark.parametrize("count", [2.5, True, "2"])
def test_shared_tokens_are_counted_in_integers(count):
    """Half a token cannot be shared."""
    w = world()
    w.add("parent", [1, 2, 3], max_tokens=4)
    w.step()
    with pytest.raises(UserError, match="num_shared_tokens"):
        w.scheduler.fork("parent", "child", SamplingParams(), num_shared_tokens=count)
