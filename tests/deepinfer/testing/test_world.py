"""The world notices what an engine does wrong; transfers do what a writer must, and no more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer.block_manager import BlockManager
from deepinfer.config import EngineConfig
from deepinfer.drafters.acceptance import parse_acceptance
from deepinfer.names import OVERLAPS
from deepinfer.testing.faults import FAULTS
from deepinfer.testing.faults.plant import around
from deepinfer.testing.model import right_answer
from deepinfer.testing.world import HALF_RIGHT, World

SMALL = {"block_size": 2, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 32}


def world(num_blocks=8, block_manager=BlockManager, acceptance=HALF_RIGHT, **settings):
    config = EngineConfig(num_blocks=num_blocks, **{**SMALL, **settings})
    return World(config, block_manager=block_manager, acceptance=acceptance)


class Leaky(BlockManager):
    """Forgets the last block of every longer table."""

    def release(self, table, *, fenced=False):
        return super().release(table[:-1] if len(table) > 1 else table, fenced=fenced)


class Hasty(BlockManager):
    """Ignores fences."""

    def release(self, table, *, fenced=False):
        super().release(table)
        return []


def test_a_clean_run_has_no_problems_and_right_answers():
    """Forks, aborts and transfers on a good engine."""
    w = world()
    w.add("a", [1, 2, 3], max_tokens=3)
    w.step()
    w.fork("a", "b", max_tokens=2)
    w.save("s", "a")
    w.load("x", 3)
    w.drain()
    assert (w.problems, w.wrong_rows, w.wrong_tokens()) == ([], 0, 0)
    assert w.ended["a"] == ("length", [1, 2, 3, *right_answer([1, 2, 3], 3)])


def test_a_leak_is_a_problem():
    """Blocks that do not come back are missed at the end."""
    w = world(block_manager=Leaky)
    w.add("a", [1, 2, 3], max_tokens=1)
    w.drain()
    assert w.problems == ["drained, and 6 of 7 blocks are free"]


def test_a_block_handed_out_behind_the_fence_is_a_wrong_row():
    """A save under a safe policy reads the next owner's rows if the pool ignores its fence."""
    wrong = {}
    for manager in (BlockManager, Hasty):
        w = world(3, manager, release="step")
        w.add("a", [1, 2, 3], max_tokens=2)
        w.step()
        w.save("s", "a")
        w.add("b", [4, 5, 6], max_tokens=1)  # so that the abort leaves no idle engine, which waits
        w.abort("a")
        w.step()
        w.device.synchronize()
        wrong[manager] = w.wrong_rows
    assert wrong == {BlockManager: 0, Hasty: 2}  # tables of 3 rows, the other way round


def test_a_load_without_room_changes_nothing():
    """It is refused, and holds nothing."""
    w = world(3)
    assert w.load("x", 3)
    assert not w.load("y", 1)
    assert list(w.transfers.held) == ["x"]
    w.use("x")
    w.drain()
    assert w.problems == []


@pytest.mark.parametrize(("release", "first"), [("ordered", "compute"), ("early", "load")])
def test_a_load_waits_on_its_own_stream_for_the_fences_of_its_blocks(release, first):
    """With `ordered` the load is held until the step that used the block is done."""
    w = world(2, release=release)
    w.add("a", [1, 2], max_tokens=1)
    w.submit()
    w.abort("a")
    assert w.load("x", 2)
    can_run = w.device.runnable()
    assert ("load" in can_run) == (first == "load")
    w.drain()
    assert w.problems == []


@pytest.mark.parametrize("num_state_slots", [0, 5])
@pytest.mark.parametrize("drafts", [0, 3, 5])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_clean_run_that_looks_ahead(overlap, drafts, num_state_slots):
    """Forks, an abort, a save and a load beside steps planned ahead: right answers, and no line."""
    w = world(12, overlap=overlap, drafts=drafts, num_state_slots=num_state_slots)
    w.add("a", [1, 2, 3], max_tokens=9)
    w.add("b", [1, 2], max_tokens=12)
    w.step()
    w.fork("a", "c", max_tokens=4)
    w.submit()
    w.abort("b")
    w.save("s", "a")
    w.load("x", 3)
    w.drain()
    assert (w.problems, w.wrong_rows, w.wrong_tokens()) == ([], 0, 0)
    assert w.ended["a"] == (
        "length",
        [1, 2, 3, *right_answer([1, 2, 3], 9, has_state=num_state_slots > 0)],
    )


def test_drafts_are_right_as_often_as_asked_for():
    """All, and a request is done in fewer steps; none, and it takes one for each token."""
    steps = {}
    for name in ("all-accept", "all-reject"):
        w = world(drafts=3, acceptance=parse_acceptance(name))
        w.add("a", [1, 2, 3], max_tokens=9)
        w.drain()
        steps[name] = w.scheduler.num_steps
    assert steps == {"all-accept": 3, "all-reject": 9}


def broken_carry(w, change):
    """Let the device compute each step that had something open with what `change` makes of it."""
    carry = w.engine.worker._carry

    def put_in(inner, plan):
        inputs = inner(plan)
        return replace(inputs, plan=change(inputs.plan)) if plan.ahead.is_open.any() else inputs

    around(carry, "put_in", put_in)


def another_token(plan):
    """As a placeholder in place of the newest token."""
    return replace(plan, token_ids=np.where(plan.positions == 4, 8, plan.token_ids))


def one_row_too_far(plan):
    """As a count of accepted drafts that is one too high."""
    return replace(plan, slot_mapping=plan.slot_mapping + 1, context_lens=plan.context_lens + 1)


@pytest.mark.parametrize("change", [another_token, one_row_too_far])
def test_what_the_device_puts_in_wrongly_is_a_wrong_row(change):
    """The world knows the tokens that the host did not know when it planned."""
    w = world(20, block_size=8, overlap="on")
    broken_carry(w, change)
    w.add("a", [1, 2, 3], max_tokens=6)
    for _ in range(4):
        w.step()
    assert w.wrong_rows > 0


def test_a_late_result_that_counts_twice_is_a_problem():
    """The world knows which frames are stale."""
    w = world(20, overlap="on")
    FAULTS["stale-frame-applied"].plant(w.engine)
    w.add("a", [1, 2], max_tokens=9)
    w.submit()
    w.submit()
    w.abort("a")
    w.add("b", [3, 4], max_tokens=9)
    w.collect()
    w.submit()
    w.collect()
    assert any("not []" in problem for problem in w.problems)
