"""Who runs in the next step, with which blocks; and what its result changes.

`schedule()` brings every running sequence's table to the length its next step needs, admits waiting
requests in order of arrival with what budget is left, and lays out a `StepPlan`. `commit()` writes
the result back and ends what has ended. Blocks are taken from a `BlockManager` and go back through
a `ReleaseQueue`, on every path.

Knows no device: work in flight is one fence the engine sets. Invariants: before a plan leaves,
every sequence in it owns all the blocks it will write, alone; a request that can never fit is
refused at submission, so whoever waits runs in the end; a refused allocation changes nothing.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.block_manager import BlockManager, Verdict
from deepinfer.checks.prefix_tags import PrefixTags
from deepinfer.config import EngineConfig
from deepinfer.errors import UnknownRequestError, UserError, check_name, is_int
from deepinfer.fork import ForkSplit, split_fork, take_fork_blocks
from deepinfer.names import FORK_TAIL_COPIES
from deepinfer.outputs import SchedulerCounters
from deepinfer.plan import Float32, Int32, Rows, StepPlan, StepResult
from deepinfer.planning import PlanBuilder, split_budget
from deepinfer.policies import ADMISSION, PREEMPTION, lifetime_blocks
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.sequence import (
    RowCounters,
    SamplingParams,
    Sequence,
    SequenceTable,
    blocks_for,
)

NO_ROWS = np.empty(0, np.intp)
NO_BLOCKS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Commit:
    """What a result changed.

    Attributes:
        sequences: object [M], the `Sequence`s that got a token, in plan order.
        token_ids: int32 [M], their new tokens.
        logprobs: float32 [M].
        finished: (sequence, "length" or "stop") of those that ended.
    """

    sequences: NDArray[np.object_]
    token_ids: Int32
    logprobs: Float32
    finished: list[tuple[Sequence, str]]


class Scheduler:
    """Queues, tables and the two decisions of a step.

    Attributes:
        prefix_tags: what every KV row must be tagged with; None without `tags`.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        release: ReleaseQueue,
        *,
        tags: bool = False,
    ) -> None:
        check_name("admission", config.admission, ADMISSION)
        check_name("preemption", config.preemption, PREEMPTION)
        check_name("fork_tail_copy", config.fork_tail_copy, FORK_TAIL_COPIES)
        config.check()
        self.config = config
        self.blocks = blocks
        self.release = release
        self._observer = release.observer
        self.seqs = SequenceTable(config.max_num_seqs, config.max_model_len, config.block_size)
        self.counters = SchedulerCounters()
        self.in_flight: Fence | None = None
        self._waiting: list[Sequence] = []  # by arrival
        self._running: Rows = NO_ROWS  # by admission; a new array for every new set of rows
        self.prefix_tags = PrefixTags(self.seqs, config.max_model_len, self.names) if tags else None
        self._plans = PlanBuilder(self.seqs, self.prefix_tags)
        self._num_pinned_forks = 0  # waiting forks that hold pins
        self._by_row = np.full(config.max_num_seqs, None, object)  # of Sequence | None
        self._by_id: dict[str, Sequence] = {}
        self._num_arrived = 0
        self._num_steps = 0
        self._copies: list[tuple[int, int]] = []
        self._copy_sources: list[Int32] = []
        self._source_owners: list[str] = []
        self._waits: list[Fence] = []
        self.started: list[Sequence] = []  # admitted by the last schedule()

    # -- looking ---------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that have no row."""
        return len(self._waiting)

    @property
    def num_steps(self) -> int:
        """Steps planned so far."""
        return self._num_steps

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._running)

    @property
    def running(self) -> list[Sequence]:
        """The running sequences, by admission."""
        return [self._at(row) for row in self._running.tolist()]

    @property
    def waiting(self) -> list[Sequence]:
        """The requests without a row, by arrival."""
        return self._waiting[:]

    def names(self, rows: Rows) -> NDArray[np.object_]:
        """The request ids of running `rows`, object [n]."""
        return np.array([self._at(row).request_id for row in rows.tolist()], object)

    def find(self, request_id: str) -> Sequence:
        """The live request of this id."""
        try:
            return self._by_id[request_id]
        except KeyError:
            raise UnknownRequestError(f"no live request {request_id!r}") from None

    # -- arrivals --------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: Int32, sampling: SamplingParams) -> Verdict:
        """Queue a request with its prompt, int32 [n].

        Returns NEVER, and queues nothing, if it could not finish alone in this pool; otherwise
        whether its prompt's blocks are free now (OK) or it will have to wait (LATER).
        """
        self._check_new(request_id, prompt, sampling)
        seq = Sequence(request_id, self._num_arrived, prompt, len(prompt), sampling)
        return self._enqueue(seq)

    def fork(
        self,
        parent_id: str,
        request_id: str,
        sampling: SamplingParams,
        *,
        own_tokens: Int32 = NO_BLOCKS,
        num_shared_tokens: int | None = None,
    ) -> Verdict:
        """Queue a child that continues from the first `num_shared_tokens` tokens of its parent.

        The child's prompt is that prefix (default: all the parent has) and `own_tokens`. It pins
        the blocks that hold the prefix's committed rows now, and gets blocks of its own when
        admitted: with one token left to compute it decodes at once, with more it computes a
        prompt. Returns as `add` does; NEVER leaves everything as it was.
        """
        parent = self.find(parent_id)
        if parent.row < 0:
            raise UserError(f"request {parent_id!r} is not running", hint="fork a running request")
        history = self.seqs.token_ids[parent.row, : self.seqs.num_tokens[parent.row]]
        shared = len(history) if num_shared_tokens is None else num_shared_tokens
        if not is_int(shared) or not 0 < shared <= len(history):
            raise UserError(
                f"num_shared_tokens: {shared!r} of {len(history)} tokens of {parent_id!r}"
            )
        prompt = np.concatenate((history[:shared], own_tokens)).astype(np.int32)
        self._check_new(request_id, prompt, sampling)
        seq = Sequence(request_id, self._num_arrived, prompt, len(prompt), sampling)
        committed = int(self.seqs.num_computed_tokens[parent.row])
        seq.num_computed_tokens = min(committed, shared, len(prompt) - 1)
        num_pinned = blocks_for(seq.num_computed_tokens, self.config.block_size)
        seq.forked_table = self.seqs.table(parent.row)[:num_pinned]
        verdict = self._enqueue(seq)
        if verdict is not Verdict.NEVER:
            self.blocks.pin(seq.forked_table)
            if self._observer is not None:
                self._observer.forked(request_id, parent_id, seq.forked_table)
            self._num_pinned_forks += num_pinned > 0
        return verdict

    def abort(self, request_id: str) -> Sequence:
        """End a live request now; blocks in use by a step in flight are withheld as usual."""
        seq = self.find(request_id)
        if seq.row < 0:
            self._waiting.remove(seq)
            self._unpin(seq)
        else:
            self._give_up_row(seq, "abort")
        del self._by_id[request_id]
        self.counters.num_aborted += 1
        return seq

    # -- one step --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can run."""
        self._copies, self._copy_sources, self._source_owners = [], [], []
        self._waits, self.started = [], []
        preemptions = self.counters.num_preemptions
        rows, counters = self._fit_running()
        scheduled = split_budget(
            counters.num_tokens - counters.num_computed_tokens, self.config.max_num_batched_tokens
        )
        all_served = self.counters.num_preemptions == preemptions and rows is self._running
        if self._waiting and all_served:  # blocks that a running sequence lacks are not for others
            num_rows = len(rows)
            rows, scheduled = self._admit(rows, scheduled)
            while not (len(rows) or self.blocks.num_withheld) and self._unfork_newest():
                rows, scheduled = self._admit(rows, scheduled)
            counters = self.seqs.gather(rows) if len(rows) > num_rows else counters
        served = scheduled > 0
        if self._num_pinned_forks or self._copies:
            served &= ~self._copy_on_write(rows, counters)
        if np.count_nonzero(served) < len(rows):
            rows, scheduled = rows[served], scheduled[served]
            counters = self.seqs.gather(rows)
        if not len(rows):
            return None
        self._num_steps += 1
        self.counters.num_block_copies += len(self._copies)
        return self._plans.build(
            self._num_steps,
            rows,
            counters,
            scheduled,
            self._copies,
            self._copy_sources,
            self._source_owners,
        )

    def submitted(self, plan: StepPlan, fence: Fence) -> None:
        """The plan is queued on the device; `fence` passes when all of it is done."""
        self.seqs.num_in_flight_tokens[plan.rows] = plan.num_scheduled
        self.in_flight = fence

    def take_waits(self) -> list[Fence]:
        """Fences the device must pass before the plan's copies and writes (`ordered` only)."""
        waits, self._waits = self._waits, []
        return waits

    def commit(self, plan: StepPlan, result: StepResult) -> Commit:
        """Make the rows of a collected step part of the committed prefix, and append its tokens.

        Sequences that lost their row since the plan was made are left alone.
        """
        self.in_flight = None
        seqs, rows = self.seqs, plan.rows
        sampled, token_ids, logprobs = plan.sample_seq, result.token_ids, result.logprobs
        alive = seqs.epochs[rows] == plan.epochs
        context_lens = plan.context_lens
        if np.count_nonzero(alive) < len(rows):
            kept = alive[sampled]
            sampled = (np.cumsum(alive) - 1)[sampled[kept]]  # renumbered among the alive
            token_ids, logprobs = token_ids[kept], logprobs[kept]
            rows, context_lens = rows[alive], context_lens[alive]
        seqs.num_computed_tokens[rows] = context_lens
        seqs.num_in_flight_tokens[rows] = 0
        if len(sampled) < len(rows):
            rows = rows[sampled]
        lengths = seqs.num_tokens[rows]
        ends = rows * seqs.token_ids.shape[1] + lengths  # where each row's next token goes
        seqs.token_ids.ravel()[ends] = token_ids
        seqs.logprobs.ravel()[ends] = logprobs
        lengths += 1
        seqs.num_tokens[rows] = lengths
        stopped = token_ids == seqs.stop_token_ids[rows]
        ended = (stopped | (lengths >= seqs.max_total_tokens[rows])).nonzero()[0]
        sequences = self._by_row[rows]
        finished = []
        for index in ended.tolist():
            seq = sequences[index]
            self._give_up_row(seq, "finish")
            del self._by_id[seq.request_id]
            finished.append((seq, "stop" if stopped[index] else "length"))
        return Commit(sequences, token_ids, logprobs, finished)

    # -- blocks of running sequences -------------------------------------------------------------

    def _fit_running(self) -> tuple[Rows, RowCounters]:
        """Grow and shrink every running table; returns the rows that can run, with counters."""
        rows, seqs = self._running, self.seqs
        counters = seqs.gather(rows)
        change = counters.blocks_needed(self.config.block_size) - counters.num_blocks
        if not np.count_nonzero(change):
            return rows, counters
        for index in np.flatnonzero(change < 0).tolist():
            row = int(rows[index])
            surplus = seqs.shrink(row, int(counters.num_blocks[index] + change[index]))
            owner = self._at(row).request_id
            self.release.give_up(surplus, self.in_flight, owner=owner, path="shrink")
        growing = change > 0
        counts = change[growing]
        total = int(counts.sum())
        if self.release.make_room(total):
            self._grow(rows[growing], counts)
        else:
            rows = self._grow_one_by_one(rows[growing], counts)
        return rows, seqs.gather(rows)

    def _grow_one_by_one(self, growing: Rows, counts: Int32) -> Rows:
        """Too few blocks for all: serve the oldest first, take back from others where needed."""
        held_back = []
        for row, count in zip(growing.tolist(), counts.tolist(), strict=True):
            seq = self._by_row[row]
            if seq is None:
                continue  # preempted for an older one
            while seq.row == row and not self.release.make_room(count):
                if count <= self.blocks.num_free + self.blocks.num_withheld:
                    held_back.append(row)
                    self.counters.num_held_back += 1
                    break
                self._take_back(row)
            else:
                if seq.row == row:
                    one_row, one_count = np.array([row]), np.array([count], np.int32)
                    self._grow(one_row, one_count)
        return self._running[~np.isin(self._running, held_back)] if held_back else self._running

    def _grow(self, rows: Rows, counts: Int32) -> None:
        """Append new blocks to the tables, `counts[i]` of them to `rows[i]`."""
        ids = self._allocate(int(counts.sum()))
        self.seqs.grow(rows, counts, ids)
        if self._observer is not None and len(rows):  # of nothing, split makes one part
            parts = np.split(ids, np.cumsum(counts)[:-1])
            for row, part in zip(rows.tolist(), parts, strict=True):
                self._observer.took(self._at(row).request_id, part, "append")

    def _take_back(self, needy_row: int) -> None:
        """Make one holder of blocks give way: the policy's victim, or a waiting fork's pins."""
        victim = PREEMPTION[self.config.preemption](self.seqs, self._running)
        if victim == needy_row and self._unfork_newest():
            return
        seq = self._at(victim)
        self.counters.num_preemptions += 1
        self.counters.num_recomputed_tokens += int(self.seqs.num_computed_tokens[victim])
        self._give_up_row(seq, "preempt")
        seq.num_preemptions += 1
        self._enqueue_in_order(seq)

    def _copy_on_write(self, rows: Rows, counters: RowCounters) -> NDArray[np.bool_]:
        """Give a row its own copy of the block it writes first, if somebody else owns it too.

        Returns bool [S]: the rows that must sit this step out because no block is left for a copy.
        """
        seqs = self.seqs
        columns, offsets = np.divmod(counters.num_computed_tokens, self.config.block_size)
        first = seqs.block_tables[rows, columns]
        stuck = np.zeros(len(rows), bool)
        shared = (self.blocks.ref_counts(first) > 1) & (offsets > 0)
        for index in np.flatnonzero(shared).tolist():
            source = int(first[index])
            while self._is_shared(source) and not stuck[index]:
                if self.release.make_room(1):
                    new = int(self._allocate(1)[0])
                    seqs.replace_block(int(rows[index]), int(columns[index]), new)
                    self._note_copy(int(rows[index]), source, new)
                    break
                if self.blocks.num_withheld or not self._unfork_newest():
                    stuck[index] = True
                    self.counters.num_held_back += 1
        return stuck

    def _note_copy(self, row: int, source: int, new: int) -> None:
        """A row owns `new` instead of `source`, which is to be copied into it."""
        owner = self._at(row).request_id
        self._copies.append((source, new))
        self._copy_sources.append(np.array([source], np.int32))
        self._source_owners.append(owner)
        if self._observer is not None:
            self._observer.took(owner, [new], "copy-on-write")

    def _is_shared(self, block_id: int) -> bool:
        """Whether others own the block, apart from those of this step who only await their copy."""
        leaving = sum(int(np.count_nonzero(ids == block_id)) for ids in self._copy_sources)
        return self.blocks.ref_count(block_id) - leaving > 1

    # -- waiting sequences -----------------------------------------------------------------------

    def _admit(self, rows: Rows, scheduled: Int32) -> tuple[Rows, Int32]:
        """Start waiting sequences in order while budget, rows and blocks last."""
        budget = self.config.max_num_batched_tokens - int(scheduled.sum())
        new_rows, new_scheduled = [], []
        while self._waiting and budget > 0 and self.seqs.num_free_rows:
            seq = self._waiting[0]
            if not self._start(seq):
                self.counters.num_later += 1
                break
            del self._waiting[0]
            count = min(seq.num_tokens - int(self.seqs.num_computed_tokens[seq.row]), budget)
            budget -= count
            new_rows.append(seq.row)
            new_scheduled.append(count)
        if not new_rows:
            return rows, scheduled
        admitted = np.array(new_rows, np.intp)
        all_ran = rows is self._running
        self._running = np.concatenate((self._running, admitted))
        counts = np.array(new_scheduled, np.int32)
        rows = self._running if all_ran else np.concatenate((rows, admitted))
        return rows, np.concatenate((scheduled, counts))

    def _start(self, seq: Sequence) -> bool:
        """Give a waiting sequence its blocks and a row, whole or not at all."""
        reserved, split = self._reservation(seq), self._split(seq)
        if not self.release.make_room(reserved - len(split.shared)):
            return False
        forked = take_fork_blocks(self.blocks, split, reserved)
        self._waits += self.release.fences_before_writing(forked.table[len(split.shared) :])
        self._copies += forked.copies
        if len(forked.sources):
            self._copy_sources.append(forked.sources)
            self._source_owners.append(seq.request_id)
        if self._observer is not None:
            new, path = (
                forked.table[len(split.shared) :],
                "fork" if len(seq.forked_table) else "admit",
            )
            self._observer.took(seq.request_id, new, path)
        keeps_reserve = self.config.admission == "lifetime"
        row = self.seqs.add(seq, forked.table, reserved if keeps_reserve else 0)
        self._num_pinned_forks -= len(seq.forked_table) > 0
        seq.forked_table = NO_BLOCKS
        self._by_row[row] = seq
        self.started.append(seq)
        return True

    def _unfork_newest(self) -> bool:
        """Take the pins of the newest waiting fork, which then computes its prompt itself."""
        for seq in reversed(self._waiting):
            if len(seq.forked_table):
                self._unpin(seq)
                self.counters.num_unforked += 1
                return True
        return False

    # -- small change ----------------------------------------------------------------------------

    def _at(self, row: int) -> Sequence:
        seq = self._by_row[row]
        assert isinstance(seq, Sequence), f"row {row} belongs to nobody"
        return seq

    def _allocate(self, count: int) -> Int32:
        ids = self.blocks.allocate(count)
        self._waits += self.release.fences_before_writing(ids)
        return ids

    def _reservation(self, seq: Sequence) -> int:
        reserve = ADMISSION[self.config.admission]
        return reserve(seq.num_tokens, seq.max_total_tokens, self.config.block_size)

    def _split(self, seq: Sequence) -> ForkSplit:
        decodes_at_once = seq.num_tokens - seq.num_computed_tokens == 1
        return split_fork(
            seq.forked_table,
            seq.num_computed_tokens,
            self.config.block_size,
            copy_full_tail=decodes_at_once and self.config.fork_tail_copy == "always",
        )

    def _check_new(self, request_id: str, prompt: Int32, sampling: SamplingParams) -> None:
        if not isinstance(request_id, str):
            raise UserError(f"request id {request_id!r}: expected a string")
        if request_id in self._by_id:
            raise UserError(f"request id {request_id!r} is already in use")
        if not len(prompt):
            raise UserError(f"request {request_id!r}: empty prompt; needs at least one token")
        sampling.check(request_id)

    def _enqueue(self, seq: Sequence) -> Verdict:
        longest = lifetime_blocks(seq.num_tokens, seq.max_total_tokens, self.config.block_size)
        too_long = seq.max_total_tokens > self.config.max_model_len
        if too_long or self.blocks.can_allocate(longest) is Verdict.NEVER:
            self.counters.num_never += 1
            return Verdict.NEVER
        self._num_arrived += 1
        self._by_id[seq.request_id] = seq
        self._enqueue_in_order(seq)
        return self.blocks.can_allocate(self._reservation(seq) - len(self._split(seq).shared))

    def _enqueue_in_order(self, seq: Sequence) -> None:
        insort(self._waiting, seq, key=lambda waiting: waiting.arrival)

    def _unpin(self, seq: Sequence) -> None:
        self._num_pinned_forks -= len(seq.forked_table) > 0
        self.release.give_up(seq.forked_table, self.in_flight, owner=seq.request_id, path="unpin")
        seq.forked_table, seq.num_computed_tokens = NO_BLOCKS, 0

    def _give_up_row(self, seq: Sequence, path: str) -> None:
        row = seq.row
        self._running = self._running[self._running != row]
        self._by_row[row] = None
        if self.prefix_tags is not None:
            self.prefix_tags.ended(row, seq.request_id)
        table = self.seqs.remove(seq)
        self.release.give_up(table, self.in_flight, owner=seq.request_id, path=path)
