"""What a step hands to the next one on the device: tokens, lengths and drafts, by draft slot.

A plan made ahead says where its sequences are if all that is in flight is accepted. Here, inside
the submitted work and so behind the step before, it becomes what is true:

    planned     positions 12 13 14 15     tokens  ?  ?  ?  ?       two of three drafts may be wrong
    carried     11 tokens, drafts [7 9]
    resolved    positions 10 11 12        tokens  4  7  9          4 is the last one sampled

and after the step each draft is compared with what was sampled in its place. The longest prefix
that agrees is accepted, with one token more: what was sampled behind it. Noise depends on seed and
position alone, so these are the tokens of a run without drafts. For a drafter that proposes one
token per position this is rejection sampling (Y. Leviathan and others, arXiv:2211.17192): the draft
is kept with the probability that the model gives it, and replaced by a draw from all others if not.

Knows no stream, pool or request order. Invariants: a plan that leaves here has no placeholder; what
it touches lies inside what was planned; a request that has ended by what the device knows is
left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deepinfer.checks.prefix_tags import go_on
from deepinfer.config import MAX_DRAFTS, EngineConfig
from deepinfer.drafters.base import Drafter, DraftHead
from deepinfer.drafters.registry import make_drafter
from deepinfer.plan import (
    PLACEHOLDER,
    AheadResult,
    Float32,
    Int32,
    LookAhead,
    SlotStart,
    StepPlan,
)
from deepinfer.planning import behind_drafts, one_after_the_other

NO_TOKENS = np.empty(0, np.int32)
NO_LOGPROBS = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A plan as it really runs.

    Attributes:
        plan: of the sequences that still run, with everything known; None if none does.
        kept: bool [S], which sequences of the plan that was made these are.
        num_drafts: int32 [K], drafts of each of them.
    """

    plan: StepPlan | None
    kept: NDArray[np.bool_]
    num_drafts: Int32


@dataclass(frozen=True, slots=True)
class Accepted:
    """The tokens a step added, sequence after sequence, and how many for each as it was planned."""

    token_ids: Int32
    logprobs: Float32
    ahead: AheadResult


class Carry:
    """Tokens, lengths and drafts of all draft slots, as the device has them.

    Args:
        num_slots: draft slots, slot 0 included.
        max_model_len, block_size: of the engine.
        drafter, num_drafts: who proposes, and how many at most; None = nobody.
        draft_head: proposes instead of a drafter.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        drafter: Drafter | None = None,
        num_drafts: int = 0,
        draft_head: DraftHead | None = None,
    ) -> None:
        self._block_size = block_size
        self._drafter, self._draft_head, self._max_drafts = drafter, draft_head, num_drafts
        # Drafts lie behind a slot's tokens, where the next ones will be.
        self._tokens = np.zeros((num_slots, max_model_len + MAX_DRAFTS), np.int32)
        self._num_tokens = np.zeros(num_slots, np.int32)
        self._num_drafts = np.zeros(num_slots, np.int32)
        self._max_total = np.zeros(num_slots, np.int32)
        self._stop = np.zeros(num_slots, np.int32)
        self._ended = np.zeros(num_slots, bool)

    # -- before a step ---------------------------------------------------------------------------

    def resolve(self, plan: StepPlan) -> Resolved:
        """Inside submitted work, before the step: put in what the steps before have found."""
        ahead = plan.ahead
        assert ahead is not None, "the plan was made by a builder that looks ahead"
        for start in ahead.starts:
            self._start(start)
        if not np.count_nonzero(ahead.is_open):
            return Resolved(plan, np.ones(plan.num_seqs, bool), np.zeros_like(ahead.num_drafts))
        slots, is_open = ahead.slots, ahead.is_open
        drafts = np.where(is_open, np.minimum(ahead.num_drafts, self._num_drafts[slots]), 0)
        first = plan.context_lens - plan.num_scheduled
        first = np.where(is_open, self._num_tokens[slots] - 1, first)
        kept = ~(is_open & self._ended[slots])
        if not np.count_nonzero(kept):
            return Resolved(None, kept, NO_TOKENS)
        counts = np.where(is_open, 1 + drafts, plan.num_scheduled)
        first, counts, drafts = (part[kept].astype(np.int32) for part in (first, counts, drafts))
        return Resolved(self._lay_out(plan, ahead, kept, first, counts, drafts), kept, drafts)

    def _start(self, start: SlotStart) -> None:
        slot, count = start.slot, len(start.token_ids)
        self._tokens[slot, :count] = start.token_ids
        self._num_tokens[slot] = count
        self._num_drafts[slot] = 0
        self._max_total[slot] = start.max_total_tokens
        self._stop[slot] = start.stop_token_id
        self._ended[slot] = False
        if self._drafter is not None:
            self._drafter.start(slot, start.request_id, start.num_prompt_tokens)

    def _lay_out(
        self,
        plan: StepPlan,
        ahead: LookAhead,
        kept: NDArray[np.bool_],
        first: Int32,
        counts: Int32,
        drafts: Int32,
    ) -> StepPlan:
        """The plan of the sequences `kept`, from position `first` on, `counts` tokens each."""
        slots, tables, num_seqs = ahead.slots[kept], plan.block_tables[kept], len(first)
        query_start, positions = one_after_the_other(first, counts)
        seqs = np.arange(num_seqs).repeat(counts)
        token_ids = self._tokens[slots[seqs], positions]
        assert PLACEHOLDER not in token_ids, "a placeholder would reach the model"
        columns, offsets = np.divmod(positions, self._block_size)
        context_lens = first + counts
        sampled = np.zeros(plan.num_seqs, bool)
        sampled[plan.sample_seq] = True
        sample_seq = np.flatnonzero(sampled[kept]).astype(np.int32)
        # Settings are those of sampled tokens, and the same for all of a sequence.
        temperature, seeds = np.zeros(len(sampled), np.float32), np.zeros(len(sampled), np.int64)
        temperature[plan.sample_seq], seeds[plan.sample_seq] = plan.temperature, plan.seeds
        behind, sample_seq = behind_drafts(drafts, sample_seq)
        return replace(
            plan,
            rows=plan.rows[kept],
            epochs=plan.epochs[kept],
            num_scheduled=counts,
            query_start=query_start,
            context_lens=context_lens,
            token_ids=token_ids,
            positions=positions,
            slot_mapping=tables[seqs, columns].astype(np.int64) * self._block_size + offsets,
            block_tables=tables,
            sample_tokens=query_start[1:][sample_seq] - 1 - behind,
            sample_seq=sample_seq,
            temperature=temperature[kept][sample_seq],
            seeds=seeds[kept][sample_seq],
            sample_positions=context_lens[sample_seq] - behind,
            tags=self._tags(plan, ahead, kept, context_lens),
            state_ids=plan.state_ids[kept] if len(plan.state_ids) else plan.state_ids,
        )

    def _tags(
        self, plan: StepPlan, ahead: LookAhead, kept: NDArray[np.bool_], context_lens: Int32
    ) -> NDArray[np.int64] | None:
        """The plan's tags, and behind them those of tokens the host does not know."""
        if plan.tags is None or ahead.tag_sums is None:
            return None
        tags = plan.tags[kept][:, : int(context_lens.max())]
        slots, sums, known = ahead.slots[kept], ahead.tag_sums[kept], ahead.num_known[kept]
        for i in np.flatnonzero(ahead.is_open[kept]).tolist():
            start, end = int(known[i]), int(context_lens[i])
            tags[i, start:end] = go_on(sums[i], start, self._tokens[slots[i], start:end])
        return tags

    # -- after it --------------------------------------------------------------------------------

    def accept(self, plan: StepPlan, resolved: Resolved, sampled: Int32) -> Callable[..., Accepted]:
        """Inside submitted work, after the step: verify drafts, keep tokens, propose new drafts.

        Args:
            sampled: int32 [M], of the resolved plan.

        Returns:
            What makes the step's result of its log-probabilities, float32 [M].
        """
        num_seqs, runs = plan.num_seqs, resolved.plan
        num_new, verified, proposed = (np.zeros(num_seqs, np.int32) for _ in range(3))
        if runs is None:
            ahead = AheadResult(num_new, verified, proposed)
            return lambda _: Accepted(NO_TOKENS, NO_LOGPROBS, ahead)
        places = np.flatnonzero(resolved.kept)  # of its sequences in the plan that was made
        verified[places] = resolved.num_drafts
        is_accepted = np.zeros(len(sampled), bool)
        assert plan.ahead is not None, "the plan was resolved"
        slots, begin = plan.ahead.slots[resolved.kept], 0
        sampling = np.unique(runs.sample_seq)
        for seq in sampling.tolist():
            slot, num_drafts = int(slots[seq]), int(resolved.num_drafts[seq])
            new = sampled[begin : begin + 1 + num_drafts]
            count = self._keep(slot, new, num_drafts)
            is_accepted[begin : begin + count] = True
            num_new[places[seq]] = count
            begin += 1 + num_drafts
        proposed[places[sampling]] = self._propose(slots[sampling], runs, sampling)
        ahead = AheadResult(num_new, verified, proposed)
        token_ids = sampled[is_accepted]
        return lambda logprobs: Accepted(token_ids, logprobs[is_accepted], ahead)

    def _keep(self, slot: int, sampled: Int32, num_drafts: int) -> int:
        """Append the accepted ones of a slot's sampled tokens; returns how many."""
        length = int(self._num_tokens[slot])
        drafts = self._tokens[slot, length : length + num_drafts]
        wrong = np.flatnonzero(drafts != sampled[:num_drafts])
        count = 1 + (int(wrong[0]) if len(wrong) else num_drafts)
        stops = np.flatnonzero(sampled[:count] == self._stop[slot])
        count = int(stops[0]) + 1 if len(stops) else count
        self._tokens[slot, length : length + count] = sampled[:count]
        self._num_tokens[slot] = length + count
        self._ended[slot] = len(stops) > 0 or length + count >= self._max_total[slot]
        return count

    def _propose(self, slots: Int32, runs: StepPlan, seqs: Int32) -> Int32:
        """Ask for drafts behind the tokens of `slots`, those of a plan's sequences `seqs`; int32
        [n], how many there are."""
        lengths = self._num_tokens[slots]
        # The last token of a request is never written, so no draft lies there or behind.
        room = np.clip(self._max_total[slots] - 1 - lengths, 0, self._max_drafts)
        room[self._ended[slots]] = 0
        counts: Int32 = np.zeros_like(room)
        asked = np.flatnonzero(room)
        together: Int32 | None = None
        if self._draft_head is not None and len(asked):
            newest = self._tokens[slots[asked], lengths[asked] - 1]
            states, most = runs.state_ids[seqs[asked]], int(room.max())
            together = self._draft_head.propose(states, newest, lengths[asked] - 1, most)
        for number, i in enumerate(asked.tolist()):
            slot, length, drafts = int(slots[i]), int(lengths[i]), NO_TOKENS
            if together is not None:
                drafts = together[number]
            elif self._drafter is not None:
                drafts = self._drafter.propose(slot, self._tokens[slot, :length], int(room[i]))
            drafts = drafts[: room[i]]
            counts[i] = len(drafts)
            self._tokens[slot, length : length + len(drafts)] = drafts
        self._num_drafts[slots] = counts
        return counts


def make_carry(
    config: EngineConfig, num_slots: int, drafter: Drafter | None, draft_head: DraftHead | None
) -> Carry | None:
    """What the steps of an engine hand on; None where each plan is complete.

    Args:
        num_slots: draft slots, slot 0 included; 0 where plans do not look ahead.
        drafter: who proposes drafts; by default `draft_head`, or the one that `config` names.
        draft_head: the model's own draft layers; None without.
    """
    if not num_slots:
        return None
    sizes = num_slots, config.max_model_len, config.block_size
    if not config.drafts:
        return Carry(*sizes)
    if drafter is None and draft_head is None:
        drafter = make_drafter(config.drafter)
    return Carry(*sizes, drafter, config.drafts, draft_head if drafter is None else None)
