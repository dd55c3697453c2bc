"""A trace with hash ids through the engine's pool and release queue: no model, no tokens, seconds.

Each request takes the blocks of prompt and output whole, hits what is cached of its prompt, and is
held until the hold says otherwise; docs/prefix-reuse.md has the rules. Not a forecast of an
engine's hit rate: there, how long a request is held follows from the time of its steps.

Knows trace requests, keys and the pool; does not know how a block is chosen, nor how results are
shown. Invariant: the same requests and setup give the same tables, so `digest` compares two
implementations request by request; when all is given back, the pool is whole.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

import numpy as np

from bench.traces import TraceRequest
from bench.traces.mooncake import CHUNK_TOKENS
from deepinfer.free_list import Ids
from deepinfer.prefix_cache import CachingBlockManager
from deepinfer.release import Fence, ReleaseQueue

TIMED = "timed"


@dataclass(frozen=True, slots=True)
class ReplaySetup:
    """What a trace is replayed on.

    Attributes:
        free_order: one of `CachingBlockManager.free_orders`.
        block_size: tokens; divides `CHUNK_TOKENS`.
        num_chunks: pool size in chunks of `CHUNK_TOKENS` tokens, so that it is the same memory at
            every block size; one block of it is never handed out.
        hold: so many requests are held, the newest ones; or `TIMED`: each until its finish.
        in_flight: a table that was given up is withheld until so many more requests have come.
    """

    free_order: str = "reverse"
    block_size: int = CHUNK_TOKENS
    num_chunks: int = 2000
    hold: int | str = TIMED
    in_flight: int = 0

    @property
    def num_blocks(self) -> int:
        """Pool size in blocks, block 0 included."""
        return self.num_chunks * CHUNK_TOKENS // self.block_size


@dataclass(slots=True)
class ReplayResult:
    """Counts of one replay.

    Attributes:
        admitted, never: requests that ran, and that are larger than the pool.
        later_requests, later_verdicts: requests that had to wait, and how often they were told to.
        hit_blocks, hit_requests: blocks found by their keys, and requests that found any.
        full_blocks, prompt_tokens: of admitted requests; only full blocks can be hit.
        new_blocks: handed out.
        evictions, evicted_head, evicted_middle, evicted_tail: of these, blocks that held something,
            and where in its chain; see `CacheCounters`.
        peak_held, held_at_end, cached_at_end: blocks with owners after an admission, and after the
            last request; keys that have a block then.
        withheld_peak: most blocks kept by fences at once.
        reuse_distance: blocks handed out from the moment the last owner gives a block up to its
            being handed out again, median; None if none was.
        mean_run: mean length of runs of consecutive ids in a table.
        digest: SHA-256 of every request's verdict, counts and table.
    """

    admitted: int = 0
    never: int = 0
    later_requests: int = 0
    later_verdicts: int = 0
    hit_blocks: int = 0
    hit_requests: int = 0
    full_blocks: int = 0
    prompt_tokens: int = 0
    new_blocks: int = 0
    evictions: int = 0
    evicted_head: int = 0
    evicted_middle: int = 0
    evicted_tail: int = 0
    peak_held: int = 0
    held_at_end: int = 0
    cached_at_end: int = 0
    withheld_peak: int = 0
    reuse_distance: float | None = None
    mean_run: float | None = None
    hit_rate: float | None = None
    token_hit_rate: float | None = None
    digest: str = ""


def replay(requests: Sequence[TraceRequest], setup: ReplaySetup) -> ReplayResult:
    """What becomes of `requests`, which must all have hash ids, on a pool of its own."""
    run = _Replay(setup)
    for index, request in enumerate(requests):
        run.serve(index, request)
    return run.finish(len(requests))


def unlimited_hit_rate(requests: Iterable[TraceRequest], block_size: int) -> float | None:
    """Hits per full block if nothing were ever evicted; None without a full block."""
    seen: set[int] = set()
    num_hits = num_full = 0
    for request in requests:
        keys = _keys(request, block_size)
        for key in keys[: (request.num_prompt - 1) // block_size]:
            if key not in seen:
                break
            num_hits += 1
        seen.update(keys)
        num_full += len(keys)
    return num_hits / num_full if num_full else None


def _keys(request: TraceRequest, block_size: int) -> Sequence[int]:
    """A key for each full block of the prompt: hash id and place within the chunk."""
    assert request.hash_ids is not None
    num_full = request.num_prompt // block_size
    per_chunk = CHUNK_TOKENS // block_size
    if per_chunk == 1:
        return request.hash_ids[:num_full]
    return [hash_id * per_chunk + k for hash_id in request.hash_ids for k in range(per_chunk)][
        :num_full
    ]


# -- how long a request is held ------------------------------------------------------------------


@dataclass(order=True, slots=True)
class _Held:
    finish: int
    index: int
    table: list[int] = field(compare=False)


class _Hold(Protocol):
    """Decides which tables are given up when; the tables it names are no longer held."""

    def arrive(self, request: TraceRequest) -> Iterator[list[int]]:
        """Tables to give up because the next request is here."""
        ...

    def give_way(self) -> Iterator[list[int]]:
        """Tables to give up because there is no room: at least one, if any is held."""
        ...

    def keep(self, index: int, request: TraceRequest, table: list[int]) -> None:
        """A request was admitted."""
        ...


class _Window:
    """The newest `size` requests, first in first out."""

    def __init__(self, size: int) -> None:
        self._size, self._tables = size, deque[list[int]]()

    def arrive(self, request: TraceRequest) -> Iterator[list[int]]:
        if len(self._tables) == self._size:
            yield self._tables.popleft()

    def give_way(self) -> Iterator[list[int]]:
        if self._tables:
            yield self._tables.popleft()

    def keep(self, index: int, request: TraceRequest, table: list[int]) -> None:
        self._tables.append(table)


class _Timed:
    """Each request until a finish that its lengths and the clock (whole ms) give."""

    def __init__(self) -> None:
        self._clock, self._held = 0, list[_Held]()

    def arrive(self, request: TraceRequest) -> Iterator[list[int]]:
        self._clock = max(self._clock, round(request.arrival_s * 1000))
        return self._finished()

    def give_way(self) -> Iterator[list[int]]:
        self._clock = self._held[0].finish if self._held else self._clock
        return self._finished()

    def keep(self, index: int, request: TraceRequest, table: list[int]) -> None:
        finish = self._clock + 50 + request.num_prompt // 8 + 25 * request.num_output
        heappush(self._held, _Held(finish, index, table))

    def _finished(self) -> Iterator[list[int]]:
        while self._held and self._held[0].finish <= self._clock:
            yield heappop(self._held).table


# -- the replay ----------------------------------------------------------------------------------


class _Replay:
    def __init__(self, setup: ReplaySetup) -> None:
        self._setup = setup
        self._blocks = CachingBlockManager(setup.num_blocks, free_order=setup.free_order)
        self._queue = ReleaseQueue(self._blocks, "step")
        self._hold: _Hold = _Timed() if isinstance(setup.hold, str) else _Window(setup.hold)
        self._result = ReplayResult()
        self._hash = hashlib.sha256()
        self._given_up_at = np.full(setup.num_blocks, -1, dtype=np.int64)  # in blocks handed out
        self._distances: list[Ids] = []
        self._num_runs = self._num_in_tables = 0

    def serve(self, index: int, request: TraceRequest) -> None:
        """Admit one request, or find that it never fits."""
        blocks, result, block_size = self._blocks, self._result, self._setup.block_size
        need = -(-(request.num_prompt + request.num_output) // block_size)
        if need > blocks.num_usable:
            result.never += 1
            self._hash.update(f"{index} NEVER\n".encode())
            return
        self._queue.collected(index - self._setup.in_flight)
        self._give_up(self._hold.arrive(request), index)
        keys = _keys(request, block_size)
        hits = blocks.match(keys, (request.num_prompt - 1) // block_size)
        verdicts = self._make_room(need - len(hits), hits, index)
        evictions = blocks.counters.num_evictions
        table = self._take(need, hits, keys)
        self._hold.keep(index, request, table)
        result.admitted += 1
        result.later_requests += verdicts > 0
        result.later_verdicts += verdicts
        result.hit_requests += bool(hits)
        result.full_blocks += len(keys)
        result.prompt_tokens += request.num_prompt
        result.peak_held = max(result.peak_held, blocks.num_held)
        evictions = blocks.counters.num_evictions - evictions
        ids = ",".join(map(str, table))
        self._hash.update(f"{index} OK {len(hits)} {verdicts} {evictions} {ids}\n".encode())

    def finish(self, num_requests: int) -> ReplayResult:
        """The result; gives everything back and proves the pool whole."""
        blocks, result, counters = self._blocks, self._result, self._blocks.counters
        result.hit_blocks, result.evictions = counters.num_hits, counters.num_evictions
        result.evicted_head = counters.num_evicted_head
        result.evicted_middle = counters.num_evicted_middle
        result.evicted_tail = counters.num_evicted_tail
        result.held_at_end, result.cached_at_end = blocks.num_held, blocks.num_cached
        result.withheld_peak = self._queue.counters.withheld_peak
        if self._distances and len(distances := np.concatenate(self._distances)):
            result.reuse_distance = float(np.median(distances))
        if self._num_runs:
            result.mean_run = self._num_in_tables / self._num_runs
        if result.full_blocks:
            result.hit_rate = result.hit_blocks / result.full_blocks
        if result.prompt_tokens:
            hit_tokens = result.hit_blocks * self._setup.block_size
            result.token_hit_rate = hit_tokens / result.prompt_tokens
        result.digest = self._hash.hexdigest()
        while tables := list(self._hold.give_way()):
            self._give_up(iter(tables), num_requests)
        self._queue.collected(num_requests)
        blocks.check_integrity()
        assert blocks.num_free == blocks.num_usable
        return result

    def _make_room(self, num_new: int, hits: list[int], index: int) -> int:
        """Wait until the blocks fit beside the hits; how often the answer was LATER."""
        verdicts = 0
        # A hit in the free list is not free for anything else.
        while not self._queue.make_room(num_new + self._blocks.num_free_among(hits)):
            verdicts += 1
            if self._queue.num_entries:
                self._queue.collected(index)  # the device catches up
            else:
                self._give_up(self._hold.give_way(), index)
        return verdicts

    def _take(self, need: int, hits: list[int], keys: Sequence[int]) -> list[int]:
        """Hits first, so that no new block evicts one; each new block is published at once."""
        blocks = self._blocks
        blocks.take_hits(hits)
        table = list(hits)
        for i in range(len(hits), len(keys)):
            block_id = blocks.allocate_one()
            blocks.publish(block_id, keys[i], keys[i - 1] if i else None)
            table.append(block_id)
        table += blocks.allocate(need - len(table)).tolist()
        self._note(np.array(table, dtype=np.int64), len(hits))
        return table

    def _note(self, table: Ids, num_hits: int) -> None:
        """Where a table's blocks lie, and how long ago they were given up."""
        self._num_in_tables += len(table)
        self._num_runs += 1 + int(np.count_nonzero(np.diff(table) != 1))
        new = table[num_hits:]
        now = self._result.new_blocks + np.arange(len(new))
        before = self._given_up_at[new]
        self._distances.append((now - before)[before >= 0].astype(np.int32))
        self._result.new_blocks += len(new)

    def _give_up(self, tables: Iterator[list[int]], index: int) -> None:
        for table in tables:
            fence = Fence(step=index) if self._setup.in_flight else None
            self._queue.give_up(table, fence)
            ids = np.array(table, dtype=np.int32)
            without_owner = ids[self._blocks.ref_counts(ids) == 0]
            self._given_up_at[without_owner] = self._result.new_blocks
