"""Rows kept beyond the pool: what a request can load instead of computing, and what is to be kept.

The store has entries of two kinds, both at the ends of segments (`deepinfer.store.keys`): the rows
of a segment's blocks and, where requests have state, the state behind its last token. Only so far
can a request go on from what was kept.

    admit      256 of its 300 tokens are kept     2 segments to load, then computes from token 256
    schedule   its state is behind token 384      the state is to be kept, before the step writes it
    commit     rows 256 ... 383 are committed     their blocks are pinned, to be kept

Only says what moves: bytes and streams are `deepinfer.transfers`'. Invariants: nothing is kept that
is not committed, and no state but one that a request behind its boundary can go on from; a block
that is to be kept has an owner of its own until its copy has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from deepinfer.block_manager import BlockManager
from deepinfer.plan import Int32, Rows
from deepinfer.prefix_cache import block_keys
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.sequence import RowCounters, Sequence, SequenceTable
from deepinfer.state_slots import StateSlots
from deepinfer.store.keys import Segment, segment_blocks, segments, state_key
from deepinfer.store.tiers import Fetch, TieredStore

STORE = "store"  # whose pins are those of blocks that are being kept
MAX_FAILED_LOADS = 3  # of one request, which then computes what it lacks


@dataclass(frozen=True, slots=True)
class Found:
    """What a waiting request could take over.

    Attributes:
        hits: int32, blocks of the pool, from its first on.
        segments: to be loaded, all that are not covered by `hits`.
        num_tokens: how far both reach together.
    """

    hits: Int32
    segments: tuple[Segment, ...] = ()
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LoadPart:
    """One entry on its way: the images from `first` on go to `ids`, blocks or a state slot."""

    fetch: Fetch
    ids: Int32
    first: int = 0
    is_state: bool = False


@dataclass(slots=True, eq=False)
class Load:
    """What a request waits for that has its row, its blocks and its slots.

    Attributes:
        num_tokens: rows it has when it is done, `num_hit_tokens` of them from the pool.
        parts: the entries.
        waits: fences that the writes must come behind (`ordered` only).
        fence: passes when nothing of it is written any more; None until it is queued.
        given_up: whether its request does not wait any more.
    """

    seq: Sequence
    num_tokens: int
    num_hit_tokens: int
    parts: list[LoadPart]
    waits: list[Fence]
    fence: Fence | None = None
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class Save:
    """An entry to be made of `ids`: blocks that are pinned for it, or a state slot.

    Attributes:
        row: of the sequence table, whose state it is; -1 for blocks.
    """

    key: int
    parent: int | None
    ids: Int32
    row: int = -1


@dataclass(slots=True)
class StoreCounters:
    """What was decided.

    Attributes:
        num_loads: requests that were admitted with something to load.
        num_failed_loads: loads that came to nothing: an entry was gone, or bad.
        num_loaded_tokens: tokens that were not computed because their rows were loaded.
    """

    num_loads: int = 0
    num_failed_loads: int = 0
    num_loaded_tokens: int = 0


class StoreReuse:
    """Finds and names entries for the requests in `seqs`.

    Args:
        states: the pool of state slots; None for a model without state.

    Attributes:
        segment_tokens: where segments end: at its multiples.
        saves: of blocks, since the engine took them last.
    """

    def __init__(
        self,
        store: TieredStore,
        seqs: SequenceTable,
        blocks: BlockManager,
        release: ReleaseQueue,
        states: StateSlots | None,
    ) -> None:
        self.counters = StoreCounters()
        self.segment_tokens = segment_blocks(seqs.block_size) * seqs.block_size
        self.saves: list[Save] = []
        self._store = store
        self._seqs = seqs
        self._blocks = blocks
        self._release = release
        self._states = states
        rows = len(seqs.epochs)
        # How far each row was looked at, in tokens: for blocks, and for the state.
        self._seen_blocks = np.zeros(rows, np.int32)
        self._seen_states = np.zeros(rows, np.int32)

    # -- loading ---------------------------------------------------------------------------------

    def match(self, seq: Sequence, hits: Int32) -> Found:
        """What a waiting request, which could take `hits` over, could have from the store too.

        Never all of its tokens: the last one is computed, because its successor is sampled from it.
        Where requests have state, hits end where a state is kept.
        """
        size = self._seqs.block_size
        if len(seq.forked_table) or seq.num_failed_loads >= MAX_FAILED_LOADS:
            return Found(hits if self._states is None else hits[:0])
        keys = block_keys(seq.block_keys, seq.token_ids, (seq.num_tokens - 1) // size, size)
        whole = segments(keys, size)
        num_whole = 0
        for segment in whole:
            if segment.end_block > len(hits) and not self._store.has(segment.key, segment.parent):
                break
            num_whole += 1
        if self._states is not None:
            while num_whole and not self._has_state(whole[num_whole - 1]):
                num_whole -= 1
            hits = hits[: whole[num_whole - 1].end_block if num_whole else 0]
        to_load = tuple(s for s in whole[:num_whole] if s.end_block > len(hits))
        end = whole[num_whole - 1].end_block if num_whole else 0
        return Found(hits, to_load, max(end, len(hits)) * size)

    def begin(self, seq: Sequence, found: Found, waits: list[Fence]) -> Load | None:
        """Hold the entries for a request that has its row; None if it needs none."""
        row, size = seq.row, self._seqs.block_size
        self._seen_blocks[row] = self._seen_states[row] = 0
        parts, num_tokens = [], found.num_tokens
        for segment in found.segments:
            fetch = self._store.open(segment.key, segment.parent)
            first = max(segment.first_block, len(found.hits))
            if self._states is None and fetch.ready and fetch.handle is None:
                fetch.close()  # no room to read it: what comes before it is of use by itself
                num_tokens = first * size
                break
            ids = self._seqs.block_tables[row, first : segment.end_block].copy()
            parts.append(LoadPart(fetch, ids, first - segment.first_block))
        if self._states is not None and found.num_tokens:
            last = seq.block_keys[found.num_tokens // size - 1]
            fetch = self._store.open(state_key(last), last)
            parts.append(LoadPart(fetch, np.array([seq.state_id], np.int32), is_state=True))
        if not parts:
            return None
        if self._states is not None:  # rows without the state behind them are nothing to go on from
            self._seqs.num_computed_tokens[row] = 0
        self.counters.num_loads += 1
        return Load(seq, num_tokens, len(found.hits) * size, parts, waits)

    def done(self, load: Load) -> None:
        """A load has come: its request has the rows of `load.num_tokens` tokens."""
        row = load.seq.row
        self.counters.num_loaded_tokens += load.num_tokens - load.num_hit_tokens
        self._seqs.num_computed_tokens[row] = load.num_tokens
        if self._states is not None:  # it may have gone on as far as one that can be kept
            self._seqs.num_written_tokens[row] = load.num_tokens + self._states.max_rewind

    # -- keeping ---------------------------------------------------------------------------------

    def cut_at_boundary(self, rows: Rows, first: Int32, counts: Int32) -> Int32:
        """Chunks cut where a state is to be kept: a slot has that of one place only.

        Args:
            rows: intp [S].
            first: int32 [S], the position of each row's first token.
            counts: int32 [S], its tokens.
        """
        if self._states is None:
            return counts
        size, counts = self.segment_tokens, counts.copy()
        for index in np.flatnonzero(first // size < (first + counts - 1) // size).tolist():
            start, end = int(first[index]), int(first[index] + counts[index])
            for boundary in range(start // size * size + size, end, size):
                key = self._key_at(int(rows[index]), boundary)
                if self._store.lacks(state_key(key), key):
                    counts[index] = boundary - start
                    break
        return counts

    def states_to_keep(self, rows: Rows, ahead: RowCounters, unsure: Int32) -> list[Save]:
        """The states that the next step of `rows` is about to change, if they are to be kept.

        Args:
            ahead: their counters when all that is in flight has been done.
            unsure: int32 [S], how many positions before that they may be.
        """
        if self._states is None:
            return []
        seqs = self._seqs
        sure = ahead.num_computed_tokens - unsure
        ends = np.minimum(sure, seqs.num_tokens[rows])
        boundaries = ends - ends % self.segment_tokens
        num_behind = seqs.state_ends(rows) - boundaries  # that a state there has gone on
        due = (boundaries > self._seen_states[rows]) & (num_behind <= self._states.max_rewind)
        saves = []
        for index in np.flatnonzero(due).tolist():
            row, boundary = int(rows[index]), int(boundaries[index])
            self._seen_states[row] = boundary
            key = self._key_at(row, boundary)
            if self._store.lacks(state_key(key), key):
                slot = seqs.state_ids[row : row + 1].copy()
                saves.append(Save(state_key(key), key, slot, row))
        return saves

    def committed(self, rows: Rows) -> None:
        """Pin the blocks of segments whose rows are committed now and that are not kept yet."""
        ends = self._seqs.num_computed_tokens[rows] // self.segment_tokens * self.segment_tokens
        for index in np.flatnonzero(ends > self._seen_blocks[rows]).tolist():
            row = int(rows[index])
            for segment in self._missing(row, int(self._seen_blocks[row]), int(ends[index])):
                ids = self._seqs.block_tables[row, segment.first_block : segment.end_block].copy()
                self._blocks.pin(ids)
                if self._release.observer is not None:
                    self._release.observer.took(STORE, ids, "save")
                self.saves.append(Save(segment.key, segment.parent, ids))
            self._seen_blocks[row] = ends[index]

    def take_saves(self) -> list[Save]:
        """The saves of blocks since the last call; their pins are the caller's to give up."""
        saves, self.saves = self.saves, []
        return saves

    # -- inside ----------------------------------------------------------------------------------

    def _has_state(self, segment: Segment) -> bool:
        return self._store.has(state_key(segment.key), segment.key)

    def _missing(self, row: int, first: int, num_tokens: int) -> Iterator[Segment]:
        """What is not kept of the segments between two places of a row."""
        size = self._seqs.block_size
        own_keys = self._seqs.at(row).block_keys
        keys = block_keys(own_keys, self._seqs.token_ids[row], num_tokens // size, size)
        asked = {save.key for save in self.saves}
        for segment in segments(keys, size)[first // self.segment_tokens :]:
            if segment.key not in asked and self._store.lacks(segment.key, segment.parent):
                yield segment

    def _key_at(self, row: int, num_tokens: int) -> int:
        """The key of the segment of a row that ends behind so many of its tokens."""
        size = self._seqs.block_size
        own_keys, tokens = self._seqs.at(row).block_keys, self._seqs.token_ids[row]
        return block_keys(own_keys, tokens, num_tokens // size, size)[-1]
