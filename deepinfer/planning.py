"""Turn "these rows, that many tokens each" into the arrays of a `StepPlan`.

Reads the sequence table and changes nothing in it. There is no prefill and no decode here: a row
with more than one uncomputed token is a chunk, one with a single token decodes, and both are laid
out the same way. A row samples when this step computes its last token, and behind each draft.

What does not change from step to step (the sampling settings of an unchanged set of rows, their
block tables while no table changed) is laid out once and shared by the plans, which never write it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from deepinfer.checks.prefix_tags import PrefixTags
from deepinfer.plan import (
    PLACEHOLDER,
    Float32,
    Int32,
    Int64,
    LookAhead,
    Rows,
    SlotStart,
    StepPlan,
)
from deepinfer.sequence import RowCounters, Sequence, SequenceTable

NO_COPIES = np.empty((0, 2), np.int32)
ONE = np.array(1, np.int32)  # numpy would make an array of a Python number anew in every call


def split_budget(uncomputed: Int32, budget: int) -> Int32:
    """Tokens each running sequence gets: decodes first, then chunks in order, int32 [S].

    Args:
        uncomputed: int32 [S], tokens known but not in the cache, >= 1 each.
        budget: tokens of the step; at least the number of decodes.
    """
    decodes = uncomputed == ONE
    num_decodes = np.count_nonzero(decodes)
    if num_decodes == len(uncomputed) or int(uncomputed.sum()) <= budget:
        return uncomputed
    chunks = np.where(decodes, 0, uncomputed)
    left = budget - int(num_decodes)
    return np.where(decodes, 1, in_order(chunks, left)).astype(np.int32)


def one_after_the_other(first: Int32, counts: Int32) -> tuple[Int32, Int32]:
    """The tokens of all sequences in a row: where each sequence begins, and their positions.

    Args:
        first: int32 [S], the position of each sequence's first token.
        counts: int32 [S], its tokens.

    Returns:
        int32 [S + 1], whose last entry is the number of tokens T, and int32 [T].
    """
    query_start = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    positions = np.repeat(first - query_start[:-1], counts)
    positions += np.arange(len(positions), dtype=np.int32)
    return query_start, positions


def behind_drafts(num_drafts: Int32, sample_seq: Int32) -> tuple[Int32, Int32]:
    """Where sampled tokens lie when each sampling sequence samples behind its drafts too.

    Returns:
        How many tokens before its sequence's last one each lies, and the sequence, int32 [M] each.
    """
    counts = num_drafts[sample_seq] + 1
    ends = np.cumsum(counts, dtype=np.int32)
    behind = ends.repeat(counts) - np.arange(1, int(counts.sum()) + 1)
    return behind.astype(np.int32), sample_seq.repeat(counts)


def in_order(asked: Int32, left: int) -> Int32:
    """What each sequence gets of what is left, the first ones first, int32 [S]."""
    granted: Int32 = np.clip(left - (np.cumsum(asked) - asked), 0, asked)
    return granted


@dataclass(slots=True)
class StepCopies:
    """What is copied before a step, and who lets the sources go.

    Attributes:
        blocks: (source, destination) of each block.
        sources, owners: block ids given up behind the copies, copied ones or not, and by whom.
        states, state_owners: (source, destination) of each state slot, and who gives the source up.
    """

    blocks: list[tuple[int, int]] = field(default_factory=list)
    sources: list[Int32] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    states: list[tuple[int, int]] = field(default_factory=list)
    state_owners: list[str] = field(default_factory=list)


class PlanBuilder:
    """Lays out plans over one sequence table.

    Args:
        tags: of the rows, if the plans are to have them.
        has_state: whether sequences have state slots.
        looks_ahead: whether plans may have open sequences.
    """

    def __init__(
        self,
        seqs: SequenceTable,
        tags: PrefixTags | None = None,
        *,
        has_state: bool = False,
        looks_ahead: bool = False,
    ) -> None:
        self._seqs = seqs
        self._tags = tags
        self._has_state = has_state
        self._looks_ahead = looks_ahead
        self._starts: list[SlotStart] = []
        self._state_ids: Int32 = np.empty(0, np.int32)
        self._rows: Rows | None = None  # whose settings and tables are laid out below
        self._temperature: Float32 = np.empty(0, np.float32)
        self._seeds: Int64 = np.empty(0, np.int64)
        self._tables: Int32 = np.empty((0, 0), np.int32)
        self._tables_version = -1
        self._indices: Int32 = np.empty(0, np.int32)  # 0 ... S
        self._block_size = np.array(seqs.block_size, np.intp)

    def started(self, seq: Sequence) -> None:
        """A sequence got a row; where plans look ahead, the next one tells the device."""
        if self._looks_ahead:
            lengths = seq.num_prompt_tokens, seq.max_total_tokens
            start = SlotStart(seq.draft_slot, seq.request_id, seq.token_ids, *lengths)
            self._starts.append(start)

    def build(
        self,
        step: int,
        rows: Rows,
        counters: RowCounters,
        num_scheduled: Int32,
        copies: StepCopies,
        num_drafts: Int32 | None = None,
    ) -> StepPlan:
        """One step over `rows`, intp [S], with their `counters` as they are now.

        `num_scheduled` is int32 [S], >= 1 each, of which the last `num_drafts`, int32 [S], are
        drafts. Where plans look ahead, `counters` are those of `gather_ahead`. All arguments are
        kept, none is written.
        """
        seqs, num_seqs = self._seqs, len(rows)
        computed = counters.num_computed_tokens
        self._lay_out(rows)
        if np.count_nonzero(num_scheduled == ONE) == num_seqs:
            # Every sequence decodes: token i belongs to sequence i.
            positions, query_start = computed, self._indices
            last_tokens = query_start[:-1]
            token_starts, table_starts = self._token_starts, self._table_starts
        else:
            query_start, positions = one_after_the_other(computed, num_scheduled)
            last_tokens = query_start[1:] - 1
            token_starts = np.repeat(self._token_starts, num_scheduled)
            table_starts = np.repeat(self._table_starts, num_scheduled)
        context_lens = computed + num_scheduled
        lengths = counters.num_tokens if num_drafts is None else counters.num_tokens + num_drafts
        samples = context_lens == lengths
        all_sample = np.count_nonzero(samples) == num_seqs
        sample_seq = self._indices[:-1] if all_sample else samples.nonzero()[0].astype(np.int32)
        sample_tokens, sample_positions = last_tokens, context_lens
        if not all_sample:
            sample_tokens = sample_tokens[sample_seq]
            sample_positions = context_lens[sample_seq]
        if num_drafts is not None and np.count_nonzero(num_drafts):
            behind, sample_seq = behind_drafts(num_drafts, sample_seq)
            sample_tokens = sample_tokens.repeat(1 + num_drafts[samples]) - behind
            sample_positions = sample_positions.repeat(1 + num_drafts[samples]) - behind
            all_sample = False
        offsets = positions.astype(np.intp)  # sums of one type need no buffered casts
        token_ids = seqs.token_ids.ravel().take(token_starts + offsets)
        num_known = known = context_lens
        if self._looks_ahead:
            num_known = seqs.num_tokens[rows]
            known = np.minimum(context_lens, num_known)
            token_ids[positions >= num_known.repeat(num_scheduled)] = PLACEHOLDER
        tags, tag_sums = None, None
        if self._tags is not None:
            width = int(context_lens.max())
            tags, tag_sums = self._tags.up_to(rows, counters.epochs, known, width)
        ahead: LookAhead | None = None
        if self._looks_ahead:
            drafts, most_room = np.zeros(num_seqs, np.int32), 0
            if num_drafts is not None:
                drafts = num_drafts
                sure = seqs.num_sure_tokens(rows) + 1  # it brings one more
                room = counters.max_total_tokens - 1 - sure
                most_room = int(room.max(initial=0, where=samples))
            ahead = LookAhead(
                slots=seqs.draft_slots[rows],
                is_open=context_lens > num_known,
                num_known=num_known,
                num_drafts=drafts,
                num_unsure=seqs.num_unsure(rows, counters),
                num_pending=np.where(samples, 1 + drafts, 0).astype(np.int32),
                starts=tuple(self._starts),
                most_room=most_room,
                tag_sums=tag_sums,
            )
            self._starts = []
        return StepPlan(
            step=step,
            rows=rows,
            epochs=counters.epochs,
            num_scheduled=num_scheduled,
            query_start=query_start,
            context_lens=context_lens,
            token_ids=token_ids,
            positions=positions,
            slot_mapping=self._slots(table_starts, offsets),
            block_tables=self._tables,
            sample_tokens=sample_tokens,
            sample_seq=sample_seq,
            temperature=self._temperature if all_sample else self._temperature[sample_seq],
            seeds=self._seeds if all_sample else self._seeds[sample_seq],
            sample_positions=sample_positions,
            block_copies=_pairs(copies.blocks),
            copy_sources=tuple(copies.sources),
            source_owners=tuple(copies.owners),
            tags=tags,
            state_ids=self._state_ids,
            state_copies=_pairs(copies.states),
            state_owners=tuple(copies.state_owners),
            ahead=ahead,
        )

    def _slots(self, table_starts: Rows, positions: Rows) -> Int64:
        """block_id * block_size + offset of each token, int64 [T]."""
        columns = positions // self._block_size
        slots = self._seqs.block_tables.ravel().take(table_starts + columns).astype(np.int64)
        slots -= columns
        slots *= self._block_size
        slots += positions  # = table[column] * size + (position - column * size)
        return slots

    def _lay_out(self, rows: Rows) -> None:
        seqs = self._seqs
        if rows is not self._rows:  # the scheduler makes a new array for every new set of rows
            self._temperature, self._seeds = seqs.temperature[rows], seqs.seeds[rows]
            if self._has_state:
                self._state_ids = seqs.state_ids[rows]
            self._indices = np.arange(len(rows) + 1, dtype=np.int32)
            self._token_starts = rows * seqs.token_ids.shape[1]
            self._table_starts = rows * seqs.block_tables.shape[1]
        if rows is not self._rows or self._tables_version != seqs.tables_version:
            width = int(seqs.num_blocks[rows].max())
            self._tables = seqs.block_tables[:, :width].take(rows, axis=0)
            self._tables_version = seqs.tables_version
        self._rows = rows


def _pairs(copies: list[tuple[int, int]]) -> Int32:
    return np.array(copies, np.int32) if copies else NO_COPIES
