"""Conservation of state slots: a clean engine is silent, each thing made wrong is found once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer.config import EngineConfig
from deepinfer.testing.world import World

CONFIG = EngineConfig(
    block_size=4,
    num_blocks=20,
    max_num_seqs=4,
    num_state_slots=6,
    max_num_batched_tokens=16,
    max_model_len=32,
    checks="conservation",
)


@pytest.fixture
def w():
    """`p` runs with slot 1 and six committed rows, `other` with slot 2."""
    w = World(CONFIG)
    w.add("p", range(6), max_tokens=6)
    w.add("other", [1], max_tokens=6)
    w.step()
    assert not said(w)
    return w


def said(w):
    return [finding.message for finding in w.engine.findings.first]


def changed(w, **changes):
    """Look at the plan of the next step with something changed in it."""
    plan = replace(w.scheduler.schedule(), **changes)
    w.engine._checks.planned(plan)
    return said(w)


def test_forks_and_aborts_in_flight_are_silent(w):
    """Pins that await their copy count as holders, also of a parent that has ended."""
    w.fork("p", "a")
    w.fork("p", "b")
    w.abort("p")
    w.submit()
    w.abort("a")
    w.collect()
    w.drain()
    assert not said(w)
    assert not w.problems


def test_a_slot_that_nobody_has_is_found_once(w):
    """It is owned and no request's; and it stays one finding."""
    w.slots.allocate(1)
    for _ in range(3):
        w.step()
    assert said(w) == [
        "state slot 3 has 1 owners and is in 0 tables; it was taken by nobody by name; "
        "last never given up"
    ]


def test_two_requests_in_one_slot_are_found(w):
    """By the holders, and by the plan that would write it for both."""
    seqs, seq = w.scheduler.seqs, w.scheduler.find("other")
    seq.state_id = 1
    seqs.state_ids[seq.row] = 1
    found = changed(w, state_ids=np.array([1, 1], np.int32))
    assert "state slot 1 has 1 owners and is in 2 tables" in found[0]


@pytest.mark.parametrize("wrong", [0, 3, 6])
def test_a_plan_with_another_slot_is_found(w, wrong):
    """Slot 0, a free one, or none at all in the place of the request's own."""
    found = changed(w, state_ids=np.array([1, wrong], np.int32))
    assert found == [f"the plan has state slot {wrong} for 'other', which has 2"]


def test_a_plan_of_too_few_slots_is_found(w):
    """Every sequence has one."""
    found = changed(w, state_ids=np.array([1], np.int32))
    assert found == ["a plan of 2 sequences has 1 state slots"]


def test_a_shared_slot_must_not_be_written(w):
    """A pin that no copy of this plan takes away is somebody's."""
    w.slots.pin([1])
    found = changed(w)
    assert found[0] == ("'p' writes state slot 1 of 2 owners, 0 of which only await their copy")


@pytest.mark.parametrize("pair", [(3, 1), (1, 0), (1, 3), (9, 2)])
def test_a_copy_from_or_to_nobody_s_slot_is_found(w, pair):
    """The source must be held, the destination have one owner, and both be slots."""
    found = changed(w, state_copies=np.array([pair], np.int32), state_owners=("x",))
    assert any(f"state slot {pair[0]} is copied to {pair[1]}" in message for message in found)


def test_a_request_that_runs_without_a_slot_is_found(w):
    """It would write slot 0."""
    w.scheduler.find("other").state_id = 0
    w.engine._checks.settled(1)
    assert "'other' runs without a state slot" in said(w)
