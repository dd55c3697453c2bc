"""What steps hand on: open plans become true, drafts are verified, requests end on the device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from deepinfer.carry import Accepted, Carry, Resolved
from deepinfer.checks.prefix_tags import go_on
from deepinfer.plan import PLACEHOLDER, LookAhead, SlotStart, StepPlan
from tests.deepinfer.step_plans import Run, step_plan

SIZE = 4
NOWHERE = -1


def ids(*values):
    return np.array(values, np.int32)


@dataclass
class Planned:
    """A sequence of a plan as the host sees it; `known` tokens of it, the rest are open."""

    slot: int
    known: int
    computed: int  # where the plan begins
    drafts: int = 0
    sampled: bool = True
    tokens: tuple[int, ...] = ()  # of those that are known
    scheduled: int | None = None  # 1 + drafts
    temperature: float = 0.0
    seed: int = 0
    state: int = 0


def plan_of(
    *sequences: Planned, starts: tuple[SlotStart, ...] = (), tags: bool = False, step: int = 1
) -> StepPlan:
    """A plan over these sequences, each with a table of ten blocks: 10 i + 1, 10 i + 2, ..."""
    runs = []
    for index, seq in enumerate(sequences):
        scheduled = 1 + seq.drafts if seq.scheduled is None else seq.scheduled
        tokens = [*seq.tokens, *[PLACEHOLDER] * (seq.computed + scheduled)]
        table = range(10 * index + 1, 10 * index + 11)
        settings = seq.sampled, seq.temperature, seq.seed, seq.state
        runs.append(Run(tokens, table, seq.computed, scheduled, *settings))
    plan = step_plan(runs, SIZE, step=step)
    known = ids(*(seq.known for seq in sequences))
    drafts = ids(*(seq.drafts for seq in sequences))
    ahead = LookAhead(
        slots=ids(*(seq.slot for seq in sequences)),
        is_open=plan.context_lens > known,
        num_known=known,
        num_drafts=drafts,
        num_unsure=np.zeros_like(known),
        num_pending=np.where([seq.sampled for seq in sequences], 1 + drafts, 0).astype(np.int32),
        starts=starts,
        tag_sums=np.zeros(len(sequences), np.uint64) if tags else None,
    )
    wide = np.zeros((len(sequences), int(plan.context_lens.max())), np.int64)
    return replace(plan, ahead=ahead, tags=wide if tags else None)


def start(slot: int, *tokens: int, prompt: int | None = None, last: int = 30, stop: int = NOWHERE):
    prompt = len(tokens) if prompt is None else prompt
    return SlotStart(slot, f"of slot {slot}", ids(*tokens), prompt, last, stop)


@dataclass
class Scripted:
    """Proposes what it was told, and notes what it was asked."""

    proposals: dict[int, list[int]] = field(default_factory=dict)
    asked: list[tuple[int, list[int], int]] = field(default_factory=list)
    started: list[tuple[int, str, int]] = field(default_factory=list)

    def start(self, row, request_id, num_prompt_tokens):
        self.started.append((row, request_id, num_prompt_tokens))

    def propose(self, row, token_ids, num_drafts):
        self.asked.append((row, token_ids.tolist(), num_drafts))
        return ids(*self.proposals.get(row, []))


def carry_with(drafter: Scripted | None = None, num_drafts: int = 3) -> Carry:
    return Carry(4, 40, SIZE, drafter, num_drafts)


def run(carry: Carry, plan: StepPlan, *sampled: int) -> tuple[Resolved, Accepted]:
    """Resolve a plan, sample these tokens, accept."""
    resolved = carry.resolve(plan)
    accepted = carry.accept(plan, resolved, ids(*sampled))
    return resolved, accepted(np.arange(len(sampled), dtype=np.float32))


def begin(carry: Carry, slot: int, *tokens: int, then: int, **keys: int) -> None:
    """A request computes its prompt and samples `then`."""
    first = Planned(slot, len(tokens), 0, tokens=tokens, scheduled=len(tokens))
    run(carry, plan_of(first, starts=(start(slot, *tokens, **keys),)), then)


# -- before a step ---------------------------------------------------------------------------------


def test_a_plan_that_leaves_nothing_open_runs_as_it_was_made():
    """The same object: a prompt, a chunk, a decode whose token is known."""
    plan = plan_of(Planned(1, 3, 0, tokens=(5, 6, 7), scheduled=3), starts=(start(1, 5, 6, 7),))
    resolved = carry_with().resolve(plan)
    assert resolved.plan is plan
    assert (resolved.kept.tolist(), resolved.num_drafts.tolist()) == ([True], [0])


def test_what_was_sampled_takes_the_place_of_a_placeholder():
    """Token, position, slot and length of a decode planned before its token was known."""
    carry = carry_with()
    begin(carry, 1, 5, 6, 7, then=8)
    plan = plan_of(Planned(1, 3, 3, temperature=0.5, seed=9))
    assert plan.token_ids.tolist() == [PLACEHOLDER]
    run_as = carry.resolve(plan).plan
    assert run_as is not None
    assert (run_as.token_ids.tolist(), run_as.positions.tolist()) == ([8], [3])
    assert (run_as.context_lens.tolist(), run_as.slot_mapping.tolist()) == ([4], [1 * SIZE + 3])
    assert run_as.sample_positions.tolist() == [4]
    assert (run_as.temperature.tolist(), run_as.seeds.tolist()) == ([0.5], [9])


def test_rejected_drafts_move_the_next_plan_back():
    """Planned for 12 to 15 with all drafts accepted; 11 tokens are true, and two drafts wait."""
    drafter = Scripted({1: [20, 21, 22]})
    carry = carry_with(drafter)
    begin(carry, 1, *range(8), then=8)
    drafter.proposals[1] = [7, 9]
    run(carry, plan_of(Planned(1, 9, 8, drafts=3)), 20, 4, 5, 6)  # two of three are wrong
    run_as = carry.resolve(plan_of(Planned(1, 9, 12, drafts=3))).plan
    assert run_as is not None
    assert run_as.positions.tolist() == [10, 11, 12]
    assert run_as.token_ids.tolist() == [4, 7, 9]
    assert run_as.slot_mapping.tolist() == [3 * SIZE + 2, 3 * SIZE + 3, 4 * SIZE]
    assert run_as.context_lens.tolist() == [13]
    assert run_as.query_start.tolist() == [0, 3]
    assert run_as.sample_tokens.tolist() == [0, 1, 2]
    assert run_as.sample_seq.tolist() == [0, 0, 0]
    assert run_as.sample_positions.tolist() == [11, 12, 13]


def test_no_more_drafts_run_than_were_planned_for():
    """The blocks of others may lie behind: what waits on the device is cut."""
    drafter = Scripted({1: [20, 21, 22]})
    carry = carry_with(drafter)
    begin(carry, 1, 5, 6, 7, then=8)
    resolved = carry.resolve(plan_of(Planned(1, 4, 3, drafts=1)))
    assert resolved.plan is not None
    assert resolved.plan.token_ids.tolist() == [8, 20]
    assert resolved.num_drafts.tolist() == [1]


def test_settings_states_and_tables_stay_with_their_sequences():
    """Of three the middle one has ended: the others keep seed, temperature, state and blocks."""
    carry = carry_with()
    for slot, last in ((1, 30), (2, 4), (3, 30)):
        begin(carry, slot, 5, 6, 7, then=10 + slot, last=last)
    planned = [
        Planned(slot, 3, 3, temperature=slot / 4, seed=slot, state=slot + 4) for slot in (1, 2, 3)
    ]
    resolved = carry.resolve(plan_of(*planned))
    run_as = resolved.plan
    assert run_as is not None
    assert resolved.kept.tolist() == [True, False, True]
    assert run_as.rows.tolist() == [0, 2]
    assert run_as.token_ids.tolist() == [11, 13]
    assert (run_as.temperature.tolist(), run_as.seeds.tolist()) == ([0.25, 0.75], [1, 3])
    assert run_as.state_ids.tolist() == [5, 7]
    assert run_as.block_tables[:, 0].tolist() == [1, 21]
    assert run_as.sample_seq.tolist() == [0, 1]


def test_a_chunk_beside_an_open_decode_stays_as_planned():
    """Only the first is moved; the chunk neither samples nor changes its positions."""
    carry = carry_with()
    begin(carry, 1, 5, 6, 7, then=8)
    chunk = Planned(2, 9, 2, sampled=False, tokens=tuple(range(30, 39)), scheduled=4)
    plan = plan_of(Planned(1, 3, 3), chunk, starts=(start(2, *range(30, 39)),))
    run_as = carry.resolve(plan).plan
    assert run_as is not None
    assert run_as.token_ids.tolist() == [8, 32, 33, 34, 35]
    assert run_as.positions.tolist() == [3, 2, 3, 4, 5]
    assert run_as.slot_mapping[1:].tolist() == plan.slot_mapping[1:].tolist()
    assert run_as.sample_seq.tolist() == [0]


def test_a_plan_whose_requests_have_all_ended_does_not_run():
    """There is no plan then, and no sequence gets a token."""
    carry = carry_with()
    begin(carry, 1, 5, 6, 7, then=8, last=4)
    plan = plan_of(Planned(1, 3, 3, drafts=2))
    resolved, accepted = run(carry, plan)
    assert resolved.plan is None
    assert len(accepted.token_ids) == len(accepted.logprobs) == 0
    found = accepted.ahead
    assert [found.num_new.tolist(), found.num_verified.tolist()] == [[0], [0]]


def test_a_slot_that_changes_hands_keeps_nothing():
    """The next request's tokens, limit and end are its own, and it has no draft."""
    drafter = Scripted({1: [20, 21]})
    carry = carry_with(drafter)
    begin(carry, 1, 5, 6, 7, then=8, stop=8)  # ended
    drafter.proposals = {}
    begin(carry, 1, 1, 2, then=3)
    run_as = carry.resolve(plan_of(Planned(1, 2, 2, drafts=3))).plan
    assert run_as is not None
    assert (run_as.token_ids.tolist(), run_as.positions.tolist()) == ([3], [2])
    assert drafter.started == [(1, "of slot 1", 3), (1, "of slot 1", 2)]


def test_of_two_starts_of_a_slot_in_one_plan_the_later_counts():
    """A request that was aborted before it ran, and the one that got its slot."""
    carry = carry_with()
    first, second = start(1, 5, 6, 7), start(1, 1, 2)
    plan = plan_of(Planned(1, 2, 0, tokens=(1, 2), scheduled=2), starts=(first, second))
    run(carry, plan, 3)
    run_as = carry.resolve(plan_of(Planned(1, 2, 2))).plan
    assert run_as is not None
    assert run_as.token_ids.tolist() == [3]


def test_tags_go_on_behind_the_known_tokens():
    """As the host would have made them had it known the tokens; none behind the true length."""
    drafter = Scripted({1: [20, 21, 22]})
    carry = carry_with(drafter)
    begin(carry, 1, 5, 6, 7, then=8)
    run_as = carry.resolve(plan_of(Planned(1, 3, 3, drafts=3), tags=True)).plan
    assert run_as is not None
    assert run_as.tags is not None
    assert run_as.tags[0, 3:].tolist() == go_on(np.uint64(0), 3, ids(8, 20, 21, 22)).tolist()
    assert run_as.tags.shape == (1, 7)


# -- after it --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "new"),
    [
        ([20, 21, 22, 9], [20, 21, 22, 9]),
        ([20, 21, 9, 9], [20, 21, 9]),
        ([20, 9, 22, 9], [20, 9]),
        ([9, 21, 22, 9], [9]),
        ([9, 20, 21, 22], [9]),
    ],
)
def test_the_longest_prefix_that_agrees_is_accepted_and_one_token_more(sampled, new):
    """Drafts 20, 21, 22: what agrees behind the first difference counts for nothing."""
    drafter = Scripted({1: [20, 21, 22]})
    carry = carry_with(drafter)
    begin(carry, 1, 5, 6, 7, then=8)
    resolved, accepted = run(carry, plan_of(Planned(1, 4, 3, drafts=3)), *sampled)
    assert accepted.token_ids.tolist() == new
    assert accepted.logprobs.tolist() == list(range(len(new)))
    assert accepted.ahead.num_new.tolist() == [len(new)]
    assert accepted.ahead.num_verified.tolist() == resolved.num_drafts.tolist() == [3]
    assert drafter.asked[-1][1] == [5, 6, 7, 8, *new]


@pytest.mark.parametrize(("stop", "new"), [(20, [20]), (21, [20, 21]), (22, [20, 21, 22]), (9, 4)])
def test_a_stop_token_cuts_what_is_accepted_behind_it(stop, new):
    """The request has ended then: it is asked for no draft, and its next plan leaves it out."""
    drafter = Scripted({1: [20, 21, 22]})
    carry = carry_with(drafter)
    begin(carry, 1, 5, 6, 7, then=8, stop=stop)
    _, accepted = run(carry, plan_of(Planned(1, 4, 3, drafts=3)), 20, 21, 22, 9)
    assert accepted.token_ids.tolist() == (new if isinstance(new, list) else [20, 21, 22, 9])
    assert accepted.ahead.num_proposed.tolist() == [0]
    assert len(drafter.asked) == 1
    assert carry.resolve(plan_of(Planned(1, 4, 7))).plan is None


def test_a_rejected_stop_token_ends_nobody():
    """It was a draft and not a token."""
    drafter = Scripted({1: [20, 21, 22]})
    carry = carry_with(drafter)
    begin(carry, 1, 5, 6, 7, then=8, stop=22)
    _, accepted = run(carry, plan_of(Planned(1, 4, 3, drafts=3)), 20, 7, 22, 9)
    assert accepted.token_ids.tolist() == [20, 7]
    assert carry.resolve(plan_of(Planned(1, 4, 7))).plan is not None


@pytest.mark.parametrize(("last", "room"), [(10, 3), (8, 3), (7, 2), (6, 1), (5, 0), (4, None)])
def test_no_draft_lies_where_the_last_token_of_a_request_will_be(last, room):
    """Of four tokens: the last one is sampled and never computed, so nothing is drafted for it."""
    drafter = Scripted({1: [20, 21, 22]})
    carry = carry_with(drafter)
    plan = plan_of(
        Planned(1, 3, 0, tokens=(5, 6, 7), scheduled=3), starts=(start(1, 5, 6, 7, last=last),)
    )
    _, accepted = run(carry, plan, 8)
    asked = [most for _, _, most in drafter.asked]
    assert asked == ([room] if room else [])
    assert accepted.ahead.num_proposed.tolist() == [room or 0]


def test_several_sequences_get_their_own_tokens():
    """One that samples with two drafts, one whose chunk does not, one that has ended, a decode."""
    drafter = Scripted({1: [20, 21], 3: []})
    carry = carry_with(drafter)
    begin(carry, 1, 5, 6, 7, then=8)
    begin(carry, 2, 5, 6, 7, then=8, last=4)
    begin(carry, 3, 1, 2, then=3)
    chunk = Planned(0, 9, 0, sampled=False, tokens=tuple(range(9)), scheduled=4)
    plan = plan_of(Planned(1, 4, 3, drafts=2), chunk, Planned(2, 3, 3), Planned(3, 2, 2))
    resolved, accepted = run(carry, plan, 20, 30, 31, 40)
    assert resolved.kept.tolist() == [True, True, False, True]
    assert accepted.token_ids.tolist() == [20, 30, 40]
    assert accepted.logprobs.tolist() == [0, 1, 3]
    assert accepted.ahead.num_new.tolist() == [2, 0, 0, 1]
    assert accepted.ahead.num_verified.tolist() == [2, 0, 0, 0]
