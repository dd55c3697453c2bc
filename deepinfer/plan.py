"""What crosses from the host to the device and back: one `StepPlan` out, one `StepResult` in.

Invariant: a plan owns its arrays. They are fresh copies that nobody writes after the plan is made,
so a device that runs behind the host reads what was planned, whatever the host does meanwhile.

The tokens of all sequences of a step lie one after the other. With S sequences, T tokens, M of the
sequences sampling, C block copies and D copies of state slots:

    seq          0           1       2
    tokens    [a a a a a]  [b]  [c d d]      query_start   = [0, 5, 6, 9]
    sampled        no       yes  y  y  y     sample_tokens = [5, 6, 7, 8], sample_seq = [1, 2, 2, 2]

A step may be planned before the tokens it goes on from are known, and with drafts whose tokens the
host never sees. Such a sequence is *open*: the plan says where it is if all that is in flight is
accepted, the most it can be, and the device puts in what is true (`deepinfer.carry`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Ints = NDArray[np.integer[Any]]
Rows = NDArray[np.intp]  # indices into a sequence table; never sent to the device
Float32 = NDArray[np.float32]

PLACEHOLDER = -1  # of a token that only the device knows; no model ever sees it


def _no_states() -> Int32:
    return np.empty(0, np.int32)


def _no_state_copies() -> Int32:
    return np.empty((0, 2), np.int32)


def firsts_of(sizes: Ints, counts: Ints) -> NDArray[np.bool_]:
    """Of groups of so many `sizes` one after the other, int [n], the first `counts` of each."""
    number = np.arange(int(sizes.sum())) - (np.cumsum(sizes) - sizes).repeat(sizes)
    return number < counts.repeat(sizes)


@dataclass(frozen=True, slots=True)
class SlotStart:
    """A draft slot has a new request: what the device must know of it.

    Attributes:
        token_ids: int32 [num_tokens], all it has.
        num_prompt_tokens: how many of them were given.
        max_total_tokens: where it ends by length.
    """

    slot: int
    request_id: str
    token_ids: Int32
    num_prompt_tokens: int
    max_total_tokens: int


@dataclass(frozen=True, slots=True)
class LookAhead:
    """What a plan leaves open, for S sequences.

    Attributes:
        slots: int32 [S], the draft slot of each sequence.
        is_open: bool [S], whether the host does not know all the tokens that are to be computed.
        num_known: int32 [S], tokens the host knows.
        num_drafts: int32 [S], drafts at the end of what is scheduled; the device may have fewer.
        num_unsure: int32 [S], how many positions further back the sequence may be, if drafts of
            steps in flight are rejected.
        num_pending: int32 [S], most tokens that this step brings; 0 where nothing samples.
        starts: slots that have new requests since the last plan, in order.
        most_room: no sequence has room for more drafts behind this step.
        tag_sums: uint64 [S], from which the tags behind the known tokens go on; None without tags.
    """

    slots: Int32
    is_open: NDArray[np.bool_]
    num_known: Int32
    num_drafts: Int32
    num_unsure: Int32
    num_pending: Int32
    starts: tuple[SlotStart, ...]
    most_room: int
    tag_sums: NDArray[np.uint64] | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of device work.

    Attributes:
        step: number of this step, counted from 1.
        rows: intp [S], the sequence-table row of each scheduled sequence.
        epochs: int32 [S], the row's epoch when planned: a result for an older epoch is stale.
        num_scheduled: int32 [S], tokens computed for each sequence, >= 1.
        query_start: int32 [S + 1], first token of each sequence; the last entry is T.
        context_lens: int32 [S], tokens each sequence has in the cache after this step.
        token_ids: int32 [T]; `PLACEHOLDER` where the host does not know it.
        positions: int32 [T], position of each token in its sequence.
        slot_mapping: int64 [T], where the token's K and V go: block_id * block_size + offset.
        block_tables: int32 [S, W], padded with 0 (block 0 belongs to nobody).
        sample_tokens: int32 [M], indices into the T tokens: those that get a successor.
        sample_seq: int32 [M], indices into the S sequences: whose tokens these are.
        temperature: float32 [M], 0 = greedy.
        seeds: int64 [M], of the request's noise.
        sample_positions: int32 [M], position the sampled token will have.
        block_copies: int32 [C, 2], (source, destination) block ids, copied before the forward.
        copy_sources: per fork of this step the block ids it gives up, int32 [R]: the source of its
            tail copy, and blocks released without a copy. Owned until the engine gives them up.
        source_owners: the request that gives up each of `copy_sources`.
        tags: int64 [S, longest context], the tag of each row a sequence must see, 0 behind its
            context (`deepinfer.checks.prefix_tags`); None where rows are not tagged.
        state_ids: int32 [S], the state slot of each sequence; empty for a model without state.
        state_copies: int32 [D, 2], (source, destination) state slots, copied before the forward.
            The sources stay owned until the engine gives them up.
        state_owners: the request that gives up each of their sources.
        ahead: what is open in it; None where the host knows all.
    """

    step: int
    rows: Rows
    epochs: Int32
    num_scheduled: Int32
    query_start: Int32
    context_lens: Int32
    token_ids: Int32
    positions: Int32
    slot_mapping: Int64
    block_tables: Int32
    sample_tokens: Int32
    sample_seq: Int32
    temperature: Float32
    seeds: Int64
    sample_positions: Int32
    block_copies: Int32
    copy_sources: tuple[Int32, ...]
    source_owners: tuple[str, ...]
    tags: Int64 | None = None
    state_ids: Int32 = field(default_factory=_no_states)
    state_copies: Int32 = field(default_factory=_no_state_copies)
    state_owners: tuple[str, ...] = ()
    ahead: LookAhead | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step (T)."""
        return int(self.token_ids.shape[0])

    @property
    def num_seqs(self) -> int:
        """Sequences in this step (S)."""
        return int(self.rows.shape[0])

    @property
    def token_seqs(self) -> Int64:
        """The sequence of each token, int64 [T]: indices into the S sequences."""
        return np.arange(self.num_seqs).repeat(self.num_scheduled)


@dataclass(frozen=True, slots=True)
class WrongRows:
    """Rows a step read that carried another tag than the plan's.

    Attributes:
        count: row reads, padding included; a row that n sequences share counts for each.
        seqs, positions: int32 [K], the first of them: indices into the S sequences, and where.
        found: int64 [K], the tags they carried.
        places: where in state slots each lies, in words; empty for a row in a block; None: all are.
    """

    count: int
    seqs: Int32
    positions: Int32
    found: Int64
    places: list[str] | None = None


@dataclass(frozen=True, slots=True)
class AheadResult:
    """What became of a plan with `StepPlan.ahead`, for its S sequences.

    Attributes:
        num_new: int32 [S], accepted drafts and one token more, or none. The device knows no stop
            tokens: what lies behind one is dropped by the host.
        num_verified: int32 [S], drafts that were computed.
        num_proposed: int32 [S], drafts that wait on the device for each sequence's next step.
    """

    num_new: Int32
    num_verified: Int32
    num_proposed: Int32

    @classmethod
    def without_drafts(cls, ahead: LookAhead) -> AheadResult:
        """Where there are none: a token for each sequence that sampled."""
        none = np.zeros_like(ahead.num_pending)
        return cls(ahead.num_pending, none, none)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device found.

    Attributes:
        step: the plan's number.
        token_ids: int32 [M], one per entry of the plan's `sample_seq`; with `ahead` the `num_new`
            of each sequence, one sequence after the other.
        logprobs: float32 [M], natural log-probability of each token under the model's softmax
            (temperature 1, before the sampling noise).
        tags: what was wrong with the rows it read; None where rows are not tagged.
        ahead: of a plan with open sequences, what became of them; None without `StepPlan.ahead`.
    """

    step: int
    token_ids: Int32
    logprobs: Float32
    tags: WrongRows | None = None
    ahead: AheadResult | None = None
