"""Reports about drafts and steps planned ahead, as cases with the right value for each.

What a request says follows from its prompt (`right_answer`), so a case knows where it ends, and how
many drafts are right is arranged by the case.
"""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.block_manager import Verdict
from deepinfer.drafters.acceptance import Acceptance, parse_acceptance
from deepinfer.names import RELEASE_POLICIES
from deepinfer.testing.model import right_answer
from deepinfer.testing.tokens import prefixes
from tests.cases.case_worlds import HOST_HOLDS_BACK, case_config
from tests.deepinfer.host_world import World

NONE_RIGHT, ALL_RIGHT = parse_acceptance("all-reject"), parse_acceptance("all-accept")
FIRST_RIGHT = parse_acceptance([1, 0])
CHECKS = "order+conservation"


def world(
    block_size: int, num_blocks: int, acceptance: Acceptance = NONE_RIGHT, **changes: Any
) -> World:
    """A world that checks everything at every moment, with drafts as right as asked for."""
    config = case_config(block_size, num_blocks, **({"checks": CHECKS} | changes))
    return World(config, acceptance)


def computed(w: World, request_id: str) -> int:
    """Committed rows of a running request."""
    return int(w.scheduler.seqs.num_computed_tokens[w.scheduler.find(request_id).row])


# -- B. freed while somebody still uses it -------------------------------------------------------


@pytest.mark.parametrize("release", HOST_HOLDS_BACK)
def test_r12_a_request_that_ends_with_the_next_step_in_flight(release):
    """vllm#45357: its blocks came back with step 2 open. Right: LATER until result 2, then all."""
    prompt = [1, 2, 3, 4, 5]
    w = world(4, 5, overlap="on", release=release)
    w.add("a", prompt, max_tokens=4, stop=right_answer(prompt, 1)[0])
    w.submit()
    w.submit()
    held = w.table("a")
    assert len(held) == 2
    w.collect()  # step 1 says the stop token
    assert w.ended["a"][0] == "stop"
    assert w.in_flight
    assert not set(w.blocks.free_ids()) & set(held)
    assert not w.load("b", 16)
    w.collect()  # step 2, which had a row of a in it
    assert w.load("b", 16)
    assert sorted(w.transfers.held["b"].tolist()) == [1, 2, 3, 4]
    w.drain()


def test_r21_nothing_is_said_behind_the_end():
    """tpu-inference#3449: a window of steps went on behind EOS. Right: its fence is the last step.

    The three steps in flight all had a row of it; the two behind its end still write one each.
    """
    prompt = [1, 2, 3]
    answer = right_answer(prompt, 3)
    assert answer[2] not in answer[:2]
    w = world(2, 10, overlap="2", release="step")
    w.add("a", prompt, max_tokens=8, stop=answer[2])
    w.step()
    w.step()
    w.submit()
    newest = w.plan.step
    held = w.table("a")
    written = [row for row in w.runner.rows if row]
    assert w.collect().finished[0].token_ids.tolist() == answer
    assert not set(w.blocks.free_ids()) & set(held)
    while w.in_flight:
        assert w.blocks.num_withheld == len(held)
        output = w.collect()
        assert output.request_ids == []
    assert output.stats.step == newest
    assert w.blocks.num_free == w.blocks.num_usable
    behind = prefixes([*prompt, *right_answer(prompt, 5)])[-4:-1]
    assert [row for row in w.runner.rows if row] == [*written, *behind]


def test_r17_a_plan_in_flight_beside_the_next_one_is_never_rewritten():
    """TensorRT-LLM#15546: one table buffer for all steps. Right: each keeps its own to its end."""
    w = world(2, 20, overlap="2")
    w.add("a", [1, 2], max_tokens=8)
    while w.can_submit:
        w.submit()
    plans = [flight.plan for flight in w.in_flight]
    kept = [(plan.block_tables.tolist(), plan.slot_mapping.tolist()) for plan in plans]
    assert len({str(entry) for entry in kept}) == 3
    w.drain()
    assert [(plan.block_tables.tolist(), plan.slot_mapping.tolist()) for plan in plans] == kept


# -- D. boundaries and look-ahead ----------------------------------------------------------------


@pytest.mark.parametrize("num_drafts", [1, 4, 5])
@pytest.mark.parametrize("num_computed", [13, 14, 15, 16, 31])
def test_r31_drafts_get_their_slots_before_the_step(num_computed, num_drafts):
    """vllm#16370: B=16, 14 computed, 1 new, 4 drafts need blocks(19) = 2. Right: ceil, always."""
    w = world(16, 20, drafts=num_drafts)
    w.add("a", range(num_computed), max_tokens=30)
    w.step()
    w.submit()
    assert w.plan.num_tokens == 1 + num_drafts
    assert len(w.table("a")) == -(-(num_computed + 1 + num_drafts) // 16)
    w.collect()
    w.drain()
    assert w.wrong_tokens() == 0


@pytest.mark.parametrize(
    ("acceptance", "num_rows", "num_full"), [(FIRST_RIGHT, 8, 2), (NONE_RIGHT, 7, 1)]
)
def test_r39_what_is_committed_behind_a_verify_step(acceptance, num_rows, num_full):
    """vllm#18668: B=4, 6 computed, 7 known, K=3. Right: accept 1: 8 rows, 9 known; 0: 7 rows."""
    w = world(4, 20, acceptance, drafts=3)
    w.add("a", range(6), max_tokens=9)
    w.step()
    assert (computed(w, "a"), len(w.tokens["a"])) == (6, 7)
    w.submit()
    assert computed(w, "a") // 4 == 1  # full blocks before it is verified
    w.collect()
    assert (computed(w, "a"), len(w.tokens["a"])) == (num_rows, num_rows + 1)
    assert computed(w, "a") // 4 == num_full
    w.drain()


# -- G. state ------------------------------------------------------------------------------------


def test_r49_state_is_that_of_what_was_accepted():
    """mlx-lm#1109: a rollback that did nothing. Right: 10 fed, 3 drafted, 1 accepted: that of 12.

    11 are known when the drafts come; the state of 14 is written, and the next step goes on from
    that of the 12 that are committed.
    """
    prompt = list(range(10))
    w = world(4, 20, FIRST_RIGHT, drafts=3, num_state_slots=3)
    w.add("a", prompt, max_tokens=9)
    w.step()
    w.step()
    assert (computed(w, "a"), len(w.tokens["a"])) == (12, 13)
    ring = w.runner.states[w.scheduler.find("a").state_id]
    right = prefixes(w.tokens["a"])
    assert ring[11 % len(ring)] == right[11]
    assert ring[13 % len(ring)] not in (0, *right)  # what the drafts left behind
    w.drain()
    assert w.wrong_rows == w.wrong_tokens() == 0


# -- J. preemption -------------------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASE_POLICIES)
def test_r63_a_step_in_flight_is_no_reason_to_preempt_more(release):
    """vllm#49674: 4 running, all in flight, 1 block short: all went. Right: at most 1 victim."""
    w = world(4, 8, release=release, overlap="on")
    for name in "abcd":
        w.add(name, [ord(name), 1, 2], max_tokens=6)
    w.step()
    w.step()  # each wants a second block now; there are 3
    while w.in_flight:
        w.collect()
    assert w.scheduler.counters.num_preemptions <= 1
    w.drain()
    assert {w.ended[name][0] for name in "abcd"} == {"length"}
    assert w.wrong_tokens() == 0


def test_r65_drafts_of_the_last_running_request():
    """sglang#19881: K=3, each step wants 1 + K. Right: what was accepted always gets through."""
    w = world(4, 3, drafts=3)
    assert w.add("a", range(4), max_tokens=9) is Verdict.NEVER
    assert w.add("b", range(4), max_tokens=5) is Verdict.OK
    w.step()
    w.submit()
    assert (w.plan.num_tokens, len(w.table("b"))) == (4, 2)  # no draft behind its last row
    w.collect()
    w.drain()
    assert w.ended["b"][0] == "length"
    assert w.scheduler.counters.num_preemptions == 0


def test_r65_drafts_give_way_before_a_request_does():
    """sglang#19881: the size of a step ignored the multiplier. Right: no drafts, no preemption."""
    w = world(4, 5, drafts=3)
    for name in "ab":
        w.add(name, [ord(name), 1, 2], max_tokens=6)
    w.step()
    w.load("beside", 4)  # 1 block left, and each request would like one for its drafts
    w.submit()
    assert w.plan.ahead.num_drafts.tolist() == [0, 0]
    w.collect()
    assert w.scheduler.counters.num_preemptions == 0
    w.use("beside")
    w.drain()


# -- K. asynchronous planning --------------------------------------------------------------------


def test_r67_frames_of_before_a_preemption_change_no_counter():
    """vllm#46066: depth 2, K=1, 2 + 2 pending, preempted. Right: 0 stay 0, tokens counted once."""
    w = world(8, 4, overlap="2", drafts=1)
    w.add("old", range(4), max_tokens=20)
    w.add("new", range(10, 14), max_tokens=12)
    seqs, counters = w.scheduler.seqs, w.scheduler.counters
    while not counters.num_preemptions:
        if not w.can_submit:
            w.collect()
        row = w.scheduler.find("new").row
        w.submit()
    frames = [flight for flight in w.in_flight if "new" in flight.names]
    assert [int(flight.plan.ahead.num_pending[-1]) for flight in frames] == [2, 2]
    told = len(w.tokens["new"])
    while w.in_flight:
        assert seqs.num_pending_tokens[row] == 0
        assert "new" not in w.collect().request_ids
    assert len(w.tokens["new"]) == told
    w.drain()
    assert {reason for reason, _ in w.ended.values()} == {"length"}
    assert w.wrong_tokens() == 0


@pytest.mark.parametrize("overlap", ["on", "2"])
def test_r67_chunks_beside_decodes(overlap):
    """vllm#57562: the same with chunks alone. Right: 3 chunks and 2 decodes, each token once."""
    w = world(4, 30, ALL_RIGHT, max_num_batched_tokens=6, overlap=overlap)
    w.add("decode1", [1], max_tokens=9)
    w.add("decode2", [2], max_tokens=9)
    w.step()
    w.add("chunks", range(12), max_tokens=3)
    w.step()
    w.abort("decode1")
    w.abort("chunks")
    w.add("again", range(12), max_tokens=3)
    w.drain()
    assert {w.ended[name][0] for name in ("decode2", "again")} == {"length"}
    assert w.wrong_tokens() == 0


def test_r70_chained_steps_move_rows_and_lengths():
    """sglang#30093: 3 chained steps from 5 moved the rows only. Right: 8 committed, 5..7 owned."""
    w = world(2, 20, overlap="2")
    w.add("a", range(5), max_tokens=9)
    w.step()
    w.submit()
    slots = [int(flight.plan.slot_mapping[0]) for flight in w.in_flight]
    assert computed(w, "a") == 5
    assert len(set(slots)) == 3
    owned = w.table("a")
    for slot, position in zip(slots, (5, 6, 7), strict=True):
        assert slot == owned[position // 2] * 2 + position % 2 != 0
    for _ in range(3):
        w.collect()
    assert (computed(w, "a"), len(w.tokens["a"])) == (8, 9)
    w.drain()
