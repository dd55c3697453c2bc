"""State slots: taken with a row or at a fork, copied once, given back behind a fence."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.block_manager import Verdict
from deepinfer.config import EngineConfig
from deepinfer.names import RELEASE_POLICIES
from deepinfer.planning import StepCopies
from deepinfer.sequence import SamplingParams, Sequence
from tests.deepinfer.host_world import World

HOST_HOLDS_BACK = ["deferred", "polled", "step"]


def world(num_state_slots=5, **changes):
    """A world whose requests have state, which serves forks that start up to one token earlier."""
    settings = {
        "block_size": 4,
        "num_blocks": 40,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 48,
        "checks": "order+conservation",
        **changes,
    }
    return World(EngineConfig(num_state_slots=num_state_slots, **settings))


def slot_of(w, request_id):
    return w.scheduler.find(request_id).state_id


def parent_with(num_computed, **changes):
    """A world whose request `p` has that many committed rows, and slot 1."""
    w = world(**changes)
    w.add("p", range(num_computed), max_tokens=12)
    w.step([1])
    return w


def test_a_request_gets_a_slot_with_its_row_and_returns_it():
    """Slot 0 is nobody's; the plan names the slot of each sequence."""
    w = world()
    w.add("a", [1, 2, 3], max_tokens=2)
    assert slot_of(w, "a") == 0
    w.add("b", [4], max_tokens=2)
    w.submit()
    assert w.plan.state_ids.tolist() == [1, 2]
    assert w.scheduler.seqs.state_ids[w.plan.rows].tolist() == [1, 2]
    w.collect()
    w.drain()
    assert w.slots.num_free == w.slots.num_usable == 4


def test_a_model_without_state_has_no_pool():
    """No slots, no ids in the plan, no figures."""
    w = world(num_state_slots=0)
    w.add("a", [1, 2, 3], max_tokens=2)
    w.submit()
    assert w.engine.states is None
    assert (len(w.plan.state_ids), len(w.plan.state_copies)) == (0, 0)
    stats = w.collect().stats
    assert (stats.slots_held, stats.slots_withheld) == (None, None)


def test_a_fork_takes_its_slot_and_pins_its_parent_s_at_once():
    """The copy goes with the next plan; then the pin goes back behind it."""
    w = parent_with(6, release="step")
    assert w.fork("p", "child") is Verdict.OK
    assert slot_of(w, "child") == 2
    assert w.slots.ref_counts(np.array([1, 2])).tolist() == [2, 1]
    w.submit()
    assert w.plan.state_copies.tolist() == [[1, 2]]
    assert w.plan.state_owners == ("child",)
    assert w.slots.ref_count(1) == 1
    assert len(w.engine.states.release.fenced()) == 1
    w.collect()
    assert not w.engine.states.release.fenced()
    w.submit()
    assert not len(w.plan.state_copies)
    w.collect()
    w.drain()
    assert w.scheduler.counters.num_state_copies == 1


def test_the_state_of_a_fork_that_gets_no_row_is_copied_all_the_same():
    """Its parent's next step would write over what it starts from."""
    w = world(max_num_seqs=1, num_state_slots=4)
    w.add("p", range(6), max_tokens=6)
    w.step([1])
    w.fork("p", "child")
    w.submit()
    assert w.running_ids() == ["p"]
    assert w.plan.state_copies.tolist() == [[1, 2]]
    w.collect()
    w.drain()
    assert w.scheduler.counters.num_stateless_forks == 0
    assert not w.wrong_rows


def test_a_fork_outlives_its_parent_before_the_copy():
    """The pinned slot is not handed out to a request that arrives in between."""
    w = parent_with(6)
    w.fork("p", "child")
    w.abort("p")
    w.add("other", [7, 8], max_tokens=2)
    w.submit()
    assert w.plan.state_copies.tolist() == [[1, 2]]
    assert w.plan.state_ids.tolist() == [2, 3]
    w.collect()
    w.drain()
    assert not w.wrong_rows


def test_without_a_free_slot_a_fork_computes_its_prompt_itself():
    """It is queued like any other request, pins nothing, and is counted."""
    w = parent_with(6, num_state_slots=2)
    assert w.fork("p", "child") is Verdict.LATER
    seq = w.scheduler.find("child")
    assert (seq.state_id, seq.num_computed_tokens, len(seq.forked_table)) == (0, 0, 0)
    assert w.scheduler.counters.num_stateless_forks == 1
    assert w.slots.ref_count(1) == 1
    w.drain()
    assert w.scheduler.counters.num_state_copies == 0


@pytest.mark.parametrize(("shared", "shares"), [(7, True), (6, True), (5, True), (4, False)])
def test_a_state_goes_back_by_no_more_than_its_rings_allow(shared, shares):
    """Here by one token: a shorter prefix is not in the rings any more, though in the blocks."""
    w = parent_with(6)
    w.fork("p", "child", num_shared=shared, own=[3, 4])
    assert bool(slot_of(w, "child")) is shares
    assert w.scheduler.counters.num_stateless_forks == (not shares)
    w.drain()
    assert not w.wrong_rows


def test_the_step_in_flight_counts_as_gone_on():
    """A decode in flight is one token more, which is allowed; a chunk in flight is too much."""
    w = parent_with(6)
    w.submit()
    w.fork("p", "child")
    assert slot_of(w, "child") == 2
    w.collect()
    w.add("long", range(30), max_tokens=4)
    w.step([1, 1])
    w.submit()
    w.fork("long", "late")
    assert slot_of(w, "late") == 0
    w.collect()
    w.drain()
    assert not w.wrong_rows


def test_an_aborted_fork_gives_back_its_slot_and_its_pin():
    """And nothing is copied for it."""
    w = parent_with(6)
    w.fork("p", "child")
    w.abort("child")
    assert w.slots.ref_counts(np.array([1, 2])).tolist() == [1, 0]
    w.submit()
    assert not len(w.plan.state_copies)


def test_a_fork_that_never_fits_takes_no_slot():
    """NEVER leaves everything as it was."""
    w = parent_with(6)
    assert w.fork("p", "child", max_tokens=60) is Verdict.NEVER
    assert w.slots.num_free == 3
    assert w.scheduler.counters.num_stateless_forks == 0


def test_later_is_counted_by_its_cause():
    """Blocks no is one figure; blocks yes and slot no is the other."""
    w = world(num_state_slots=2, num_blocks=5)
    w.add("a", range(6), max_tokens=4)
    w.step([1])
    counters = w.scheduler.counters
    assert w.add("large", range(12), max_tokens=1) is Verdict.LATER
    w.step([1])
    assert (counters.num_later_blocks, counters.num_later_slots) == (1, 0)
    w.abort("large")
    assert w.add("small", [1], max_tokens=1) is Verdict.LATER
    w.step([1])
    assert (counters.num_later_blocks, counters.num_later_slots) == (1, 1)
    assert counters.num_later == 2
    w.drain()


def test_waiting_forks_give_way_where_nothing_else_can_run():
    """All slots are theirs and their parent has ended, but who came before them must run first."""
    w = world(num_state_slots=4, max_num_seqs=1)
    w.add("p", range(6), max_tokens=4)
    w.step([1])
    w.add("old", [1, 2], max_tokens=2)
    w.fork("p", "b")
    w.fork("p", "c")
    w.abort("p")
    w.submit()
    assert w.running_ids() == ["old"]
    assert w.scheduler.counters.num_unforked == 1
    assert (bool(slot_of(w, "b")), bool(slot_of(w, "c"))) == (True, False)
    w.collect()
    w.drain()


@pytest.mark.parametrize("release", HOST_HOLDS_BACK)
def test_a_slot_of_a_step_in_flight_is_withheld(release):
    """And comes back with the step, also when no request is left."""
    w = world(release=release)
    w.add("a", range(6), max_tokens=4)
    w.submit()
    w.abort("a")
    assert (w.slots.num_free, w.slots.num_withheld) == (3, 1)
    w.collect()
    assert (w.slots.num_free, w.slots.num_withheld) == (4, 0)


def test_a_preempted_request_loses_its_slot():
    """It starts again with another one, and says what it would have said."""
    w = world(num_blocks=5)
    w.add("a", [1, 2, 3, 4], max_tokens=9)
    w.add("b", [5, 6, 7, 8], max_tokens=9)
    while not w.scheduler.counters.num_preemptions:
        w.step()
    assert slot_of(w, "b") == 0
    w.drain()
    assert not w.wrong_tokens()


@pytest.mark.parametrize("release", RELEASE_POLICIES)
@pytest.mark.parametrize("num_state_slots", [2, 3, 6])
def test_whatever_happens_states_are_right_and_all_slots_come_back(release, num_state_slots):
    """Forks, aborts and preemptions at random, with checkers on; nothing is wrong or lost."""
    rng = np.random.default_rng(num_state_slots)
    w = world(num_state_slots, release=release, num_blocks=14)
    for index in range(40):
        w.add(f"r{index}", rng.integers(0, 9, rng.integers(1, 9)).tolist(), max_tokens=5)
        if w.running_ids():
            w.fork(str(rng.choice(w.running_ids())), f"fork{index}", max_tokens=3)
        if w.plan is None:
            w.submit()
        if rng.random() < 0.7:
            w.abort(str(rng.choice(list(w.tokens))))
        if w.plan is not None and rng.random() < 0.8:
            w.collect()
        w.check()
    w.drain()
    assert not w.wrong_rows
    assert not w.wrong_tokens()
    assert not w.engine.findings.first


def _nothing(w):
    """Both rows run."""


def _forks_wait(w):
    w.fork("a", "c")
    w.fork("a", "d")


def _parent_ends(w):
    w.fork("a", "c")
    w.abort("a")
    w.add("e", [1, 2])


def _abort_in_flight(w):
    w.add("e", [1, 2])
    w.submit()
    w.abort("a")
    w.collect()


def _finishes(w):
    """The first of the two ends, and `e` takes its row."""
    w.add("e", [1, 2])


@pytest.mark.parametrize(
    ("situation", "at_once", "deferred", "by_look"),
    [
        (_nothing, 2, 2, 2),
        (_forks_wait, 4, 4, 4),
        (_parent_ends, 2, 3, 3),
        (_abort_in_flight, 2, 3, 2),
        (_finishes, 2, 2, 2),
    ],
)
def test_when_more_slots_are_in_use_than_requests_may_run(situation, at_once, deferred, by_look):
    """With two rows, the most held and withheld under each policy; a table of docs/engine.md."""
    most = dict.fromkeys(("early", "blocking", "ordered"), at_once)
    most |= {"deferred": deferred, "polled": by_look, "step": by_look}
    assert most.keys() == set(RELEASE_POLICIES)
    for release, expected in most.items():
        w = world(9, max_num_seqs=2, release=release)
        w.add("a", range(5), max_tokens=9)
        w.add("b", range(6), max_tokens=9)
        w.step([1, 1])
        situation(w)
        in_use = []
        while (output := w.step()) is not None:
            in_use.append(output.stats.slots_held + output.stats.slots_withheld)
        assert (release, max(in_use)) == (release, expected)


def test_copies_are_queued_once():
    """What was handed to one plan is not handed to the next."""
    w = parent_with(6)
    w.fork("p", "child")
    first, second = StepCopies(), StepCopies()
    w.engine.states.queue_copies(first)
    w.engine.states.queue_copies(second)
    assert (first.states, second.states) == ([(1, 2)], [])


def test_a_request_without_a_slot_gives_up_nothing():
    """As a waiting one is."""
    w = world()
    seq = Sequence("a", 0, np.array([1], np.int32), 1, SamplingParams())
    w.engine.states.give_up(seq, None, "abort")
    assert w.slots.num_free == 4
