"""What steps hand on: plans are moved, drafts are verified, all of it on the device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from deepinfer.carry import Carry, make_carry
from deepinfer.checks.prefix_tags import go_on
from deepinfer.config import EngineConfig
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.drafters.base import Asked, Drafts
from deepinfer.drafters.ngram import NgramDrafter
from deepinfer.plan import PLACEHOLDER, LookAhead, SlotStart, StepPlan, StepResult
from deepinfer.planning import behind_drafts
from tests.deepinfer.step_plans import Run, step_plan

SIZE = 4


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
    unsure: int = 0  # how much further back it may be


def plan_of(
    *sequences: Planned,
    starts: tuple[SlotStart, ...] = (),
    tags: bool = False,
    step: int = 1,
    most_room: int = 5,
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
        num_unsure=ids(*(seq.unsure for seq in sequences)),
        num_pending=np.where([seq.sampled for seq in sequences], 1 + drafts, 0).astype(np.int32),
        starts=starts,
        most_room=most_room,
        tag_sums=np.zeros(len(sequences), np.uint64) if tags else None,
    )
    behind, sample_seq = behind_drafts(drafts, plan.sample_seq)
    each = np.searchsorted(plan.sample_seq, sample_seq)
    plan = replace(
        plan,
        sample_seq=sample_seq,
        sample_tokens=plan.sample_tokens[each] - behind,
        sample_positions=plan.sample_positions[each] - behind,
        temperature=plan.temperature[each],
        seeds=plan.seeds[each],
    )
    wide = np.zeros((len(sequences), int(plan.context_lens.max())), np.int64)
    return replace(plan, ahead=ahead, tags=wide if tags else None)


def start(slot: int, *tokens: int, prompt: int | None = None, last: int = 30) -> SlotStart:
    prompt = len(tokens) if prompt is None else prompt
    return SlotStart(slot, f"of slot {slot}", ids(*tokens), prompt, last)


@dataclass
class Scripted:
    """Proposes what it was told, and notes what it was asked."""

    proposals: dict[int, list[int]] = field(default_factory=dict)
    asked: list[tuple[int, list[int], int]] = field(default_factory=list)
    started: list[tuple[int, str, int]] = field(default_factory=list)

    def prepare(self, device, num_slots, max_model_len):
        pass

    def start(self, slot, request_id, num_prompt_tokens):
        self.started.append((slot, request_id, num_prompt_tokens))

    def propose(self, asked: Asked) -> Drafts:
        drafts, counts = [], []
        columns = asked.slots.tolist(), asked.lengths.tolist(), asked.room.tolist()
        for slot, length, room in zip(*columns, strict=True):
            assert length <= asked.longest
            if room:
                self.asked.append((slot, asked.tokens[slot, :length].tolist(), room))
            proposal = self.proposals.get(slot, [])
            counts.append(min(room, len(proposal)))
            drafts.append((proposal + [0] * asked.num_drafts)[: asked.num_drafts])
        return Drafts(torch.tensor(drafts), torch.tensor(counts))


def carry_with(drafter: Scripted | None = None, num_drafts: int = 3, **how: bool) -> Carry:
    return Carry(4, 40, SIZE, SteppedCpuDevice(), drafter, num_drafts, **(how or {"told": True}))


def resolve(carry: Carry, plan: StepPlan) -> StepPlan:
    """The plan as it runs."""
    ran = carry.ran(carry.put_in(plan))
    assert ran is not None
    return ran()


def run(carry: Carry, plan: StepPlan, *sampled: int) -> tuple[StepPlan, StepResult]:
    """Put in, sample these tokens, accept: the plan as it ran, and the result."""
    runs = resolve(carry, plan)
    tokens = ids(*sampled)
    accepted = carry.accept(plan, torch.from_numpy(tokens) if len(tokens) else None)
    return runs, accepted(StepResult(plan.step, tokens, np.arange(len(tokens), dtype=np.float32)))


def begin(carry: Carry, slot: int, *tokens: int, then: int, **keys: int) -> None:
    """A request computes its prompt and samples `then`."""
    first = Planned(slot, len(tokens), 0, tokens=tokens, scheduled=len(tokens))
    run(carry, plan_of(first, starts=(start(slot, *tokens, **keys),)), then)


@pytest.fixture(params=[{"told": True}, {"exact": True}], ids=["told", "exact"])
def how(request) -> dict[str, bool]:
    """The host learns of a plan once it has run, or before."""
    return request.param


# -- before a step ---------------------------------------------------------------------------------


def test_a_plan_that_leaves_nothing_open_runs_as_it_was_made():
    """The same object: a prompt, a chunk, a decode whose token is known."""
    plan = plan_of(Planned(1, 3, 0, tokens=(5, 6, 7), scheduled=3), starts=(start(1, 5, 6, 7),))
    inputs = carry_with().put_in(plan)
    assert inputs.plan is plan
    assert inputs.back is None
    assert inputs.token_ids.tolist() == [5, 6, 7]


def test_what_was_sampled_takes_the_place_of_a_placeholder(how):
    """Token, position, slot and length of a decode planned before its token was known."""
    carry = carry_with(**how)
    begin(carry, 1, 5, 6, 7, then=8)
    plan = plan_of(Planned(1, 3, 3, temperature=0.5, seed=9))
    assert plan.token_ids.tolist() == [PLACEHOLDER]
    run_as = resolve(carry, plan)
    assert (run_as.token_ids.tolist(), run_as.positions.tolist()) == ([8], [3])
    assert (run_as.context_lens.tolist(), run_as.slot_mapping.tolist()) == ([4], [1 * SIZE + 3])
    assert run_as.sample_positions.tolist() == [4]
    assert (run_as.temperature.tolist(), run_as.seeds.tolist()) == ([0.5], [9])
    assert plan.token_ids.tolist() == [PLACEHOLDER]  # as it was made


def test_where_nothing_may_have_been_rejected_nothing_moves():
    """Whoever lays out the step needs no device to know where it is."""
    carry = carry_with(Scripted({1: [20, 21]}))
    begin(carry, 1, 5, 6, 7, then=8)
    assert carry.put_in(plan_of(Planned(1, 4, 3, drafts=2))).back is None


def test_rejected_drafts_move_the_next_plan_back(how):
    """Planned for 12 to 15 with all drafts accepted; 11 tokens are true, and two drafts wait.

    The fourth row has no draft of its own: it is computed for nothing.
    """
    drafter = Scripted({1: [20, 21, 22]})
    carry = carry_with(drafter, **how)
    begin(carry, 1, *range(8), then=8)
    drafter.proposals[1] = [7, 9]
    run(carry, plan_of(Planned(1, 9, 8, drafts=3)), 20, 4, 5, 6)  # two of three are wrong
    plan = plan_of(Planned(1, 9, 12, drafts=3, unsure=3))
    run_as = resolve(carry, plan)
    assert run_as.positions.tolist() == [10, 11, 12, 13]
    assert run_as.token_ids[:3].tolist() == [4, 7, 9]
    assert run_as.token_ids[3] >= 0
    assert run_as.slot_mapping.tolist() == [3 * SIZE + 2, 3 * SIZE + 3, 4 * SIZE, 4 * SIZE + 1]
    assert run_as.context_lens.tolist() == [14]
    assert run_as.query_start.tolist() == [0, 4]
    assert run_as.sample_tokens.tolist() == [0, 1, 2, 3]
    assert run_as.sample_positions.tolist() == [11, 12, 13, 14]


def test_the_device_is_told_how_far_back_it_is():
    """Of three sequences the first is two positions back, the second none, the third is known."""
    drafter = Scripted({1: [20, 21, 22], 2: [20, 21, 22]})
    carry = carry_with(drafter)
    begin(carry, 1, 5, 6, 7, then=8)
    begin(carry, 2, 5, 6, 7, then=8)
    both = Planned(1, 4, 3, drafts=3), Planned(2, 4, 3, drafts=3)
    run(carry, plan_of(*both), 20, 9, 9, 9, 20, 21, 22, 9)
    chunk = Planned(3, 9, 2, sampled=False, tokens=tuple(range(30, 39)), scheduled=4)
    planned = Planned(1, 4, 7, drafts=1, unsure=3), Planned(2, 4, 7, unsure=3), chunk
    plan = plan_of(*planned, starts=(start(3, *range(30, 39)),))
    inputs = carry.put_in(plan)
    assert inputs.plan is plan
    assert inputs.back is not None
    assert inputs.back.tolist() == [2, 0, 0]
    assert inputs.token_ids.tolist() == [9, 20, 9, 32, 33, 34, 35]


def test_no_more_drafts_run_than_were_planned_for():
    """The blocks of others may lie behind: what waits on the device is cut."""
    drafter = Scripted({1: [20, 21, 22]})
    carry = carry_with(drafter)
    begin(carry, 1, 5, 6, 7, then=8)
    runs, result = run(carry, plan_of(Planned(1, 4, 3, drafts=1)), 20, 21)
    assert runs.token_ids.tolist() == [8, 20]
    assert result.ahead.num_verified.tolist() == [1]
    assert result.token_ids.tolist() == [20, 21]


def test_a_slot_that_changes_hands_keeps_nothing():
    """The next request's tokens and limit are its own, and it has no draft."""
    drafter = Scripted({1: [20, 21]})
    carry = carry_with(drafter)
    begin(carry, 1, 5, 6, 7, then=8, last=4)  # ended
    drafter.proposals = {}
    begin(carry, 1, 1, 2, then=3)
    runs, result = run(carry, plan_of(Planned(1, 2, 2, drafts=3)), 20, 0, 0, 0)
    assert (runs.token_ids[0], runs.positions.tolist()) == (3, [2, 3, 4, 5])
    assert result.ahead.num_verified.tolist() == [0]
    assert result.token_ids.tolist() == [20]
    assert drafter.started == [(1, "of slot 1", 3), (1, "of slot 1", 2)]


def test_of_two_starts_of_a_slot_in_one_plan_the_later_counts():
    """A request that was aborted before it ran, and the one that got its slot."""
    carry = carry_with()
    first, second = start(1, 5, 6, 7), start(1, 1, 2)
    plan = plan_of(Planned(1, 2, 0, tokens=(1, 2), scheduled=2), starts=(first, second))
    run(carry, plan, 3)
    assert resolve(carry, plan_of(Planned(1, 2, 2))).token_ids.tolist() == [3]


def test_tags_go_on_behind_the_known_tokens():
    """As the host would have made them had it known the tokens; none behind the true length."""
    drafter = Scripted({1: [20, 21, 22]})
    carry = carry_with(drafter, exact=True)
    begin(carry, 1, 5, 6, 7, then=8)
    run_as = resolve(carry, plan_of(Planned(1, 3, 3, drafts=3), tags=True))
    assert run_as.tags is not None
    assert run_as.tags[0, 3:].tolist() == go_on(np.uint64(0), 3, ids(8, 20, 21, 22)).tolist()
    assert run_as.tags.shape == (1, 7)


def test_a_request_that_has_ended_by_its_length_stays_inside_its_plans():
    """It has one token more than any plan counts on: its rows lie where the plan says."""
    drafter = Scripted({1: [20, 21, 22]})
    carry = carry_with(drafter)
    begin(carry, 1, 5, 6, 7, then=8, last=6)
    _, result = run(carry, plan_of(Planned(1, 4, 3, drafts=1)), 20, 9)
    assert result.token_ids.tolist() == [20, 9]  # six tokens
    runs, result = run(carry, plan_of(Planned(1, 4, 4, unsure=1)), 7)
    assert runs.positions.tolist() == [4]
    assert result.ahead.num_new.tolist() == [0]
    assert len(result.token_ids) == len(result.logprobs) == 0


def test_nothing_is_written_into_the_slot_behind():
    """A request that ended at `max_model_len`, beside one with five drafts: as wide a batch."""
    drafter = Scripted({3: [20, 21, 22, 23, 24]})
    carry = Carry(4, 10, SIZE, SteppedCpuDevice(), drafter, 5, told=True)
    begin(carry, 1, *range(9), then=9, last=10)
    begin(carry, 2, 5, 6, 7, then=8, last=10)
    begin(carry, 3, 1, then=2, last=10)
    ended, drafting = Planned(1, 9, 8), Planned(3, 2, 1, drafts=5)
    run(carry, plan_of(ended, drafting), 50, 20, 21, 22, 23, 24, 25)
    assert carry._tokens[2, :4].tolist() == [5, 6, 7, 8]
    assert resolve(carry, plan_of(Planned(2, 3, 3))).token_ids.tolist() == [8]


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
    _, result = run(carry, plan_of(Planned(1, 4, 3, drafts=3)), *sampled)
    assert result.token_ids.tolist() == new
    assert result.logprobs.tolist() == list(range(len(new)))
    assert result.ahead.num_new.tolist() == [len(new)]
    assert result.ahead.num_verified.tolist() == [3]
    assert drafter.asked[-1][1] == [5, 6, 7, 8, *new]


def test_rows_without_a_draft_are_never_accepted():
    """Two of three drafts are there: what is sampled behind them is not compared with anything."""
    drafter = Scripted({1: [20, 21]})
    carry = carry_with(drafter)
    begin(carry, 1, 5, 6, 7, then=8)
    plan = plan_of(Planned(1, 4, 3, drafts=3))
    stray = int(carry.put_in(plan).token_ids[3])
    _, result = run(carry, plan, 20, 21, stray, stray)
    assert result.token_ids.tolist() == [20, 21, stray]
    assert result.ahead.num_verified.tolist() == [2]


@pytest.mark.parametrize(("last", "room"), [(10, 3), (8, 3), (7, 2), (6, 1), (5, 0), (4, 0)])
def test_no_draft_lies_where_the_last_token_of_a_request_will_be(last, room):
    """Of four tokens: the last one is sampled and never computed, so nothing is drafted for it."""
    drafter = Scripted({1: [20, 21, 22]})
    carry = carry_with(drafter)
    plan = plan_of(
        Planned(1, 3, 0, tokens=(5, 6, 7), scheduled=3), starts=(start(1, 5, 6, 7, last=last),)
    )
    _, result = run(carry, plan, 8)
    asked = [most for _, _, most in drafter.asked]
    assert asked == ([room] if room else [])
    assert result.ahead.num_proposed.tolist() == [room]


class _Careless:
    """Says more than it was asked for, and fills up with what is no token."""

    def __init__(self):
        self.said = torch.tensor([[20, 21, -1]])

    def prepare(self, device, num_slots, max_model_len):
        pass

    def start(self, slot, request_id, num_prompt_tokens):
        pass

    def propose(self, asked: Asked) -> Drafts:
        return Drafts(self.said, torch.tensor([9]))


def test_a_careless_drafter_breaks_nothing():
    """More drafts than there is room for are cut off, and no placeholder reaches a model."""
    drafter = _Careless()
    carry = Carry(4, 40, SIZE, SteppedCpuDevice(), drafter, 3, told=True)
    plan = plan_of(
        Planned(1, 3, 0, tokens=(5, 6, 7), scheduled=3), starts=(start(1, 5, 6, 7, last=7),)
    )
    _, result = run(carry, plan, 8)
    assert result.ahead.num_proposed.tolist() == [2]  # of 4 tokens and room for 2
    assert resolve(carry, plan_of(Planned(1, 4, 3, drafts=3))).token_ids.tolist() == [8, 20, 21, 0]
    assert drafter.said.tolist() == [[20, 21, -1]]


def test_nobody_is_asked_where_the_host_knows_that_nobody_has_room():
    """And for no more drafts than any request has room for."""
    drafter = Scripted({1: [20, 21, 22]})
    carry = carry_with(drafter)
    begin(carry, 1, 5, 6, 7, then=8)
    for most, proposed in ((2, 2), (0, 0)):
        drafter.asked = []
        plan = plan_of(Planned(1, 4, 3), most_room=most)
        _, result = run(carry, plan, 20)
        assert [room for *_, room in drafter.asked] == ([most] if most else [])
        assert result.ahead.num_proposed.tolist() == [proposed]


def test_several_sequences_get_their_own_tokens(how):
    """One that samples with two drafts, one whose chunk does not, one that has ended, a decode."""
    drafter = Scripted({1: [20, 21], 3: []})
    carry = carry_with(drafter, **how)
    begin(carry, 1, 5, 6, 7, then=8)
    begin(carry, 2, 5, 6, 7, then=8, last=4)
    begin(carry, 3, 1, 2, then=3)
    chunk = Planned(0, 9, 0, sampled=False, tokens=tuple(range(9)), scheduled=4)
    plan = plan_of(Planned(1, 4, 3, drafts=2), chunk, Planned(2, 3, 3), Planned(3, 2, 2))
    _, result = run(carry, plan, 20, 30, 31, 50, 40)
    assert result.token_ids.tolist() == [20, 30, 40]
    assert result.logprobs.tolist() == [0, 1, 4]
    assert result.ahead.num_new.tolist() == [2, 0, 0, 1]
    assert result.ahead.num_verified.tolist() == [2, 0, 0, 0]
    assert resolve(carry, plan_of(Planned(1, 6, 5), Planned(3, 3, 3))).token_ids.tolist() == [
        30,
        40,
    ]


def test_without_a_drafter_each_sequence_that_samples_gets_one_token():
    """Known without asking: the next step goes on from it."""
    carry = carry_with()
    begin(carry, 1, 5, 6, 7, then=8)
    for number in range(3):
        runs, result = run(carry, plan_of(Planned(1, 3, 3 + number)), 20 + number)
        assert result.ahead.num_new.tolist() == [1]
        assert runs.token_ids.tolist() == [8 if not number else 19 + number]


def test_a_plan_that_samples_nothing_brings_nothing():
    """A chunk of a prompt."""
    chunk = Planned(1, 9, 0, sampled=False, tokens=tuple(range(9)), scheduled=4)
    _, result = run(carry_with(Scripted()), plan_of(chunk, starts=(start(1, *range(9)),)))
    assert result.ahead.num_new.tolist() == [0]


# -- who has one -----------------------------------------------------------------------------------

CONFIG = EngineConfig(block_size=4, num_blocks=9, max_num_seqs=2, max_model_len=32)


def test_nobody_hands_on_what_complete_plans_do_not_need():
    """Without draft slots there is no carry; without drafts nobody proposes."""
    device = SteppedCpuDevice()
    assert make_carry(CONFIG, 0, device, None, exact=False, told=False) is None
    carry = make_carry(
        replace(CONFIG, overlap="on"), 5, device, Scripted(), exact=False, told=False
    )
    assert carry is not None
    assert carry._drafter is None
    drafts = replace(CONFIG, drafts=2, drafter="ngram")
    carry = make_carry(drafts, 5, device, None, exact=False, told=False)
    assert carry is not None
    assert isinstance(carry._drafter, NgramDrafter)


def test_what_nobody_asks_for_is_not_read():
    """Neither told nor exact: there is no plan as it ran."""
    carry = Carry(4, 40, SIZE, SteppedCpuDevice())
    plan = plan_of(Planned(1, 3, 0, tokens=(5, 6, 7), scheduled=3), starts=(start(1, 5, 6, 7),))
    assert carry.ran(carry.put_in(plan)) is None
