"""What crosses from the host to the device and back: one `StepPlan` out, one `StepResult` in.

Invariant: a plan owns its arrays. They are fresh copies that nobody writes after the plan is made,
so a device that runs behind the host reads what was planned, whatever the host does meanwhile.

The tokens of all sequences of a step lie one after the other. With S sequences, T tokens, M of the
sequences sampling, C block copies and D copies of state slots:

    seq          0           1       2
    tokens    [a a a a a]  [b]  [c c c]      query_start = [0, 5, 6, 9]
    sampled        no       yes    yes       sample_seq  = [1, 2]
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Rows = NDArray[np.intp]  # indices into a sequence table; never sent to the device
Float32 = NDArray[np.float32]


def _no_states() -> Int32:
    return np.empty(0, np.int32)


def _no_state_copies() -> Int32:
    return np.empty((0, 2), np.int32)


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
        token_ids: int32 [T].
        positions: int32 [T], position of each token in its sequence.
        slot_mapping: int64 [T], where the token's K and V go: block_id * block_size + offset.
        block_tables: int32 [S, W], padded with 0 (block 0 belongs to nobody).
        sample_seq: int32 [M], indices into the S sequences whose last token gets a successor.
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

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step (T)."""
        return int(self.token_ids.shape[0])

    @property
    def num_seqs(self) -> int:
        """Sequences in this step (S)."""
        return int(self.rows.shape[0])


@dataclass(frozen=True, slots=True)
class WrongRows:
    """Rows a step read that carried another tag than the plan's.

    Attributes:
        count: row reads, padding included; a row that n sequences share counts for each.
        seqs, positions: int32 [K], the first of them: indices into the S sequences, and where.
        found: int64 [K], the tags they carried.
        slots: int32 [K], the state slots they lie in, 0 for rows in blocks; None: all in blocks.
    """

    count: int
    seqs: Int32
    positions: Int32
    found: Int64
    slots: Int32 | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device found.

    Attributes:
        step: the plan's number.
        token_ids: int32 [M], one per entry of the plan's `sample_seq`.
        logprobs: float32 [M], natural log-probability of each token under the model's softmax
            (temperature 1, before the sampling noise).
        tags: what was wrong with the rows it read; None where rows are not tagged.
    """

    step: int
    token_ids: Int32
    logprobs: Float32
    tags: WrongRows | None = None
