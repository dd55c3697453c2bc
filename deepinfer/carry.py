"""What a step hands to the next one, on the device: tokens, lengths and drafts, by draft slot.

A plan made ahead lacks the newest tokens of its sequences, and says where these are if all drafts
in flight are accepted. Before the step what is true is put in, behind it each draft is compared
with what was sampled in its place:

    tokens of a slot   ... t8 t9 t10 | d11 d12          drafts lie behind the tokens
    planned            positions 12 13 14 15            two drafts fewer were accepted than could be
    runs               positions 10 11 12 13            back 2; the last row is computed for nothing
    sampled                      d11  x  y  z           one draft is right: d11 and x are accepted

The longest prefix that agrees is accepted, with one token more: what was sampled behind it. Noise
depends on seed and position alone, so these are the tokens of a run without drafts. For a drafter
that proposes one token per position this is rejection sampling (Y. Leviathan and others,
arXiv:2211.17192): the draft is kept with the probability that the model gives it, and replaced by
a draw from all others if not.

Nothing here waits for the device, and no shape depends on what it finds. A request that ends by a
stop token runs on for as many steps as were planned; their results are stale.

`exact` plans are the exception: where rows are tagged, or a runner knows plans alone, the host
reads what was found before the step runs. On the CPU that costs nothing.

Knows no stream, pool or request order. Invariants: no placeholder runs; what a step touches lies
inside what was planned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deepinfer.checks.prefix_tags import go_on
from deepinfer.config import MAX_DRAFTS, EngineConfig
from deepinfer.device.base import Device, Readback
from deepinfer.drafters.base import Asked, Drafter
from deepinfer.drafters.registry import make_drafter
from deepinfer.plan import AheadResult, Int32, Ints, SlotStart, StepPlan, StepResult, firsts_of
from deepinfer.step_inputs import StepInputs


class Carry:
    """Tokens, lengths and drafts of all draft slots.

    Args:
        num_slots: draft slots, slot 0 included.
        max_model_len, block_size: of the engine.
        drafter, num_drafts: who proposes, and how many at most; None = nobody.
        exact: let the host know each plan as it runs, before it does.
        told: let the host know it once it has run.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        device: Device,
        drafter: Drafter | None = None,
        num_drafts: int = 0,
        *,
        exact: bool = False,
        told: bool = False,
    ) -> None:
        self._device, self._block_size = device, block_size
        self._drafter, self._max_drafts = drafter, num_drafts
        self._exact, self._told = exact, told
        # All tokens, and behind them what a step may sample at most, though nobody gets it.
        self._width = max_model_len + 1 + MAX_DRAFTS
        device.run(lambda: self._prepare(num_slots, max_model_len), label="draft slots")

    @torch.inference_mode()
    def _prepare(self, num_slots: int, max_model_len: int) -> None:
        on = self._device.torch_device
        self._tokens = torch.zeros((num_slots, self._width), dtype=torch.int32, device=on)
        # One row each: tokens, drafts behind them, and where the request ends by its length.
        self._counts = torch.zeros((3, num_slots), dtype=torch.int64, device=on)
        self._num_tokens, self._num_drafts, self._max_total = self._counts
        self._columns = torch.arange(1 + MAX_DRAFTS, device=on)
        if self._drafter is not None:
            self._drafter.prepare(self._device, num_slots, max_model_len)

    # -- before a step ---------------------------------------------------------------------------

    @torch.inference_mode()
    def put_in(self, plan: StepPlan) -> StepInputs:
        """Inside submitted work, before the step: what the steps before have found."""
        ahead = plan.ahead
        assert ahead is not None, "the plan was made by a builder that looks ahead"
        self._start(ahead.starts)
        is_open = ahead.is_open
        if not np.count_nonzero(is_open):
            return StepInputs(plan, self._device.upload(plan.token_ids))
        back, slots = None, self._upload(ahead.slots)
        seqs = plan.token_seqs
        places = ahead.slots[seqs] * np.int64(self._width) + plan.positions
        found = self._upload(places)
        if np.count_nonzero(ahead.num_unsure):
            first = np.where(is_open, plan.context_lens - plan.num_scheduled, -1)
            newest = self._num_tokens[slots] - 1
            # Who has ended by its length may be a token further than any plan: it runs there.
            back = (self._upload(first) - newest).clamp_(min=0)
            found = found - back[self._upload(seqs)]
        token_ids = self._tokens.view(-1).index_select(0, found)
        inputs = StepInputs(plan, token_ids, back)
        return self._known(inputs, slots) if self._exact else inputs

    def _start(self, starts: tuple[SlotStart, ...]) -> None:
        """Draft slots have new requests; of two of one slot the later counts."""
        for start in starts:
            # A copy: it may be a view of what the host goes on to write.
            token_ids = self._device.upload(start.token_ids.copy())
            self._tokens[start.slot, : len(start.token_ids)] = token_ids
            if self._drafter is not None:
                self._drafter.start(start.slot, start.request_id, start.num_prompt_tokens)
        if starts:
            newest = {start.slot: start for start in starts}
            counts = [(len(s.token_ids), 0, s.max_total_tokens) for s in newest.values()]
            slots = self._upload(np.array(list(newest)))
            self._counts.index_copy_(1, slots, self._upload(np.array(counts).T))

    def _known(self, inputs: StepInputs, slots: Tensor) -> StepInputs:
        """The same with a plan that says where its sequences are, and what they are made of."""
        device, plan, histories = self._device, inputs.plan, None
        if plan.tags is not None:
            histories = device.read(device.download(self._tokens.index_select(0, slots)))
        plan = as_it_runs(
            plan,
            device.read(device.download(inputs.token_ids)),
            None if inputs.back is None else device.read(device.download(inputs.back)),
            self._block_size,
            histories,
        )
        return StepInputs(plan, inputs.token_ids)

    # -- after it --------------------------------------------------------------------------------

    def ran(self, inputs: StepInputs) -> Callable[[], StepPlan] | None:
        """Inside submitted work: what gives the plan as it runs, once the step is done; None if
        nobody asks."""
        if self._exact:
            return lambda: inputs.plan
        if not self._told:
            return None
        token_ids = self._device.download(inputs.token_ids)
        back = None if inputs.back is None else self._device.download(inputs.back)

        def plan() -> StepPlan:
            moved = None if back is None else back.numpy()
            return as_it_runs(inputs.plan, token_ids.numpy(), moved, self._block_size)

        return plan

    @torch.inference_mode()
    def accept(self, plan: StepPlan, sampled: Tensor | None) -> Callable[[StepResult], StepResult]:
        """Inside submitted work, after the step: verify drafts, keep tokens, propose new drafts.

        Args:
            plan: as it was made.
            sampled: int32 [M], of its `sample_tokens`; None if nothing samples.

        Returns:
            What makes the step's result, once it is done, of one with all tokens sampled.
        """
        ahead = plan.ahead
        assert ahead is not None, "something was put in"
        each = AheadResult.without_drafts(ahead)
        if sampled is None:
            return lambda result: replace(result, ahead=each)
        seqs = np.unique(plan.sample_seq)
        slots = self._upload(ahead.slots[seqs])
        lengths = self._num_tokens[slots]
        if self._drafter is None:
            self._tokens.view(-1).index_copy_(0, slots * self._width + lengths, sampled)
            self._num_tokens.index_copy_(0, slots, lengths + 1)
            return lambda result: replace(result, ahead=each)
        planned = ahead.num_drafts[seqs]
        num_new, verified = self._verify(planned, slots, lengths, sampled)
        most = min(self._max_drafts, ahead.most_room)
        asked = Asked(
            slots=slots,
            tokens=self._tokens,
            lengths=lengths + num_new,
            # The last token of a request is never written, so no draft lies there or behind.
            room=(self._max_total[slots] - 1 - lengths - num_new).clamp_(0, most),
            state_ids=self._upload(plan.state_ids[seqs] if len(plan.state_ids) else plan.state_ids),
            num_drafts=most,
            longest=min(int(plan.context_lens.max()) + 1, self._width),
        )
        proposed = self._propose(self._drafter, asked)
        found = self._device.download(torch.stack((num_new, verified, proposed)).int())
        return _Accepted(plan.num_seqs, seqs, 1 + planned, found)

    def _verify(
        self, planned: Int32, slots: Tensor, lengths: Tensor, sampled: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keep what is accepted of n sampling sequences with `planned` rows for drafts, int32 [n]:
        how many tokens each gets, and how many drafts it had, int64 [n] each."""
        most = int(planned.max())
        if most * len(planned) == int(planned.sum()):
            rows = sampled.view(-1, 1 + most)
        else:
            behind = np.minimum(np.arange(1 + most), planned[:, None])
            starts = np.cumsum(1 + planned) - (1 + planned)
            rows = sampled[self._upload(starts[:, None] + behind)]
        places = (slots * self._width + lengths)[:, None] + self._columns[: 1 + most]
        tokens = self._tokens.view(-1)
        verified = torch.minimum(self._upload(planned), self._num_drafts[slots])
        is_right = rows[:, :most] == tokens[places[:, :most]]
        is_right &= self._columns[:most] < verified[:, None]
        num_new = 1 + is_right.long().cumprod(1).sum(1)
        # Who has ended by its length gets nothing more.
        num_new = torch.minimum(num_new, self._max_total[slots] - lengths)
        tokens.index_copy_(0, places.flatten(), rows.flatten())
        self._num_tokens.index_copy_(0, slots, lengths + num_new)
        return num_new, verified

    def _propose(self, drafter: Drafter, asked: Asked) -> Tensor:
        """Put drafts behind the tokens of who is asked; how many there are, int64 [n]."""
        if not asked.num_drafts:  # as the host knows
            counts = torch.zeros_like(asked.room)
            self._num_drafts.index_copy_(0, asked.slots, counts)
            return counts
        drafts, counts = drafter.propose(asked)
        counts = torch.minimum(counts, asked.room).clamp_(max=drafts.shape[1])
        places = (asked.slots * self._width + asked.lengths)[:, None]
        places = places + self._columns[: drafts.shape[1]]
        # Those behind the counts are computed too, if they were planned for.
        token_ids = drafts.flatten().int().clamp(min=0)
        self._tokens.view(-1).index_copy_(0, places.flatten(), token_ids)
        self._num_drafts.index_copy_(0, asked.slots, counts)
        return counts

    def _upload(self, numbers: Ints) -> Tensor:
        tensor: Tensor = self._device.upload(np.ascontiguousarray(numbers, np.int64))
        return tensor


@dataclass(frozen=True, slots=True)
class _Accepted:
    """Leaves in a result what is part of the sequences.

    Attributes:
        num_seqs: sequences of the plan.
        seqs, num_sampled: int [n], those that sample, and how many tokens of each were sampled.
        found: int32 [3, n], of these: new tokens, drafts verified and proposed.
    """

    num_seqs: int
    seqs: Ints
    num_sampled: Int32
    found: Readback

    def __call__(self, result: StepResult) -> StepResult:
        found = np.zeros((3, self.num_seqs), np.int32)
        found[:, self.seqs] = self.found.numpy()
        kept = firsts_of(self.num_sampled, found[0, self.seqs])
        return replace(
            result,
            token_ids=result.token_ids[kept],
            logprobs=result.logprobs[kept],
            ahead=AheadResult(*found),
        )


def as_it_runs(
    plan: StepPlan,
    token_ids: Int32,
    back: Ints | None,
    block_size: int,
    histories: Int32 | None = None,
) -> StepPlan:
    """A plan with what was put into it.

    Args:
        token_ids: int32 [T].
        back: int64 [S], of `StepInputs`.
        histories: int32 [S, width], of each sequence the tokens it has and those it computes; with
            tags.
    """
    ahead = plan.ahead
    assert ahead is not None, "something was put in"
    plan = replace(plan, token_ids=token_ids)
    if back is not None:
        seqs = plan.token_seqs
        positions = (plan.positions - back[seqs]).astype(np.int32)
        columns, offsets = np.divmod(positions, block_size)
        blocks = plan.block_tables[seqs, columns].astype(np.int64)
        plan = replace(
            plan,
            positions=positions,
            context_lens=(plan.context_lens - back).astype(np.int32),
            slot_mapping=blocks * block_size + offsets,
            sample_positions=(plan.sample_positions - back[plan.sample_seq]).astype(np.int32),
        )
    if plan.tags is None or histories is None or ahead.tag_sums is None:
        return plan
    tags = plan.tags[:, : int(plan.context_lens.max())].copy()
    for i in np.flatnonzero(ahead.is_open).tolist():
        start, end = int(ahead.num_known[i]), int(plan.context_lens[i])
        tags[i, start:end] = go_on(ahead.tag_sums[i], start, histories[i, start:end])
        tags[i, end:] = 0
    return replace(plan, tags=tags)


def make_carry(
    config: EngineConfig,
    num_slots: int,
    device: Device,
    drafter: Drafter | None,
    *,
    exact: bool,
    told: bool,
) -> Carry | None:
    """What the steps of an engine hand on; None where each plan is complete.

    Args:
        num_slots: draft slots, slot 0 included; 0 where plans do not look ahead.
        drafter: who proposes drafts; by default the one that `config` names.
        exact, told: of `Carry`.
    """
    if not num_slots:
        return None
    if not config.drafts:
        drafter = None
    elif drafter is None:
        drafter = make_drafter(config.drafter)
    sizes = num_slots, config.max_model_len, config.block_size
    return Carry(*sizes, device, drafter, config.drafts, exact=exact, told=told)
