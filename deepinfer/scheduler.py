"""Who runs in the next step, with which blocks; and what its result changes.

`schedule()` brings every running sequence's table to the length its next step needs, admits waiting
requests in order of arrival with what budget is left, and lays out a `StepPlan`. `commit()` writes
the result back and ends what has ended. Blocks are taken from a `BlockManager` and go back through
a `ReleaseQueue`, on every path, and state slots likewise.

Knows no device: work in flight is one fence the engine sets. Invariants: before a plan leaves,
every sequence in it owns all the blocks it will write, and its state slot, alone; a request that
can never fit is refused at submission, so whoever waits runs in the end; a refused allocation
changes nothing.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from deepinfer.block_manager import BlockManager, Verdict
from deepinfer.block_tables import BlockTables
from deepinfer.checks.prefix_tags import PrefixTags
from deepinfer.config import EngineConfig
from deepinfer.draft_slots import DraftSlots
from deepinfer.errors import UserError, check_name
from deepinfer.fork import ForkSplit, num_taken_over, split_fork
from deepinfer.live import LiveRequests
from deepinfer.lookahead import BlocksAhead, blocks_ahead, ready_rows, set_out, wanted_drafts
from deepinfer.names import FORK_TAIL_COPIES
from deepinfer.outputs import SchedulerCounters
from deepinfer.plan import Int32, Rows, StepPlan, StepResult
from deepinfer.planning import PlanBuilder, split_budget
from deepinfer.policies import ADMISSION, PREEMPTION, lifetime_blocks
from deepinfer.prefix_cache import CachingBlockManager
from deepinfer.prefix_reuse import NO_BLOCKS, PrefixReuse
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.results import Commit, write_back
from deepinfer.sequence import RowCounters, SamplingParams, Sequence, SequenceTable, blocks_for
from deepinfer.state_slots import StateSlots
from deepinfer.waiting import WaitingQueue

NO_ROWS = np.empty(0, np.intp)
NO_TOKENS = np.empty(0, np.int32)


class Scheduler:
    """Queues, tables and the two decisions of a step.

    Args:
        states: the pool of state slots; None for a model without state.
        drafts: the pool of draft slots, where the configuration looks ahead.

    Attributes:
        prefix_tags: what every KV row must be tagged with; None without `tags`.
        num_steps: steps planned so far.
        in_flight: passes behind the last step that was submitted and not committed.
        looks_ahead: whether plans may have open sequences.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        release: ReleaseQueue,
        states: StateSlots | None = None,
        drafts: DraftSlots | None = None,
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
        self.states = states
        self.drafts = drafts
        self.seqs = seqs = SequenceTable(
            config.max_num_seqs, config.max_model_len, config.block_size
        )
        self.counters = SchedulerCounters()
        self.in_flight: Fence | None = None
        self.started: list[Sequence] = []  # admitted by the last schedule()
        self.prefix_tags = PrefixTags(seqs, config.max_model_len, seqs.names) if tags else None
        self.looks_ahead = config.looks_ahead
        assert self.looks_ahead == (drafts is not None), "who looks ahead needs draft slots"
        self._gather = seqs.gather_ahead if self.looks_ahead else seqs.gather
        self._plans = PlanBuilder(
            seqs,
            self.prefix_tags,
            has_state=states is not None,
            looks_ahead=self.looks_ahead,
        )
        self._tables = BlockTables(seqs, blocks, release)
        self.reuse: PrefixReuse | None = None
        if config.prefix_cache:
            self.reuse = PrefixReuse(seqs, cast(CachingBlockManager, blocks), release)
        self._waiting = WaitingQueue()
        self._running: Rows = NO_ROWS  # by admission; a new array for every new set of rows
        self._live = LiveRequests()
        self.num_steps = 0

    # -- looking ---------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that have no row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._running)

    @property
    def running(self) -> list[Sequence]:
        """The running sequences, by admission."""
        return [self.seqs.at(row) for row in self._running.tolist()]

    @property
    def waiting(self) -> list[Sequence]:
        """The requests without a row, by arrival."""
        return list(self._waiting)

    def blocks_ahead(self) -> BlocksAhead:
        """Blocks held for tokens that are not known; none where plans do not look ahead."""
        return blocks_ahead(self.seqs, self._running) if self.looks_ahead else BlocksAhead()

    def find(self, request_id: str) -> Sequence:
        """The live request of this id."""
        return self._live.find(request_id)

    # -- arrivals --------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: Int32, sampling: SamplingParams) -> Verdict:
        """Queue a request with its prompt, int32 [n].

        Returns NEVER, and queues nothing, if it could not finish alone in this pool; otherwise
        whether its prompt's blocks are free now (OK) or it will have to wait (LATER).
        """
        return self._enqueue(self._live.make(request_id, prompt, sampling))

    def fork(
        self,
        parent_id: str,
        request_id: str,
        sampling: SamplingParams,
        *,
        own_tokens: Int32 = NO_TOKENS,
        num_shared_tokens: int | None = None,
    ) -> Verdict:
        """Queue a child that continues from the first `num_shared_tokens` tokens of its parent.

        The child's prompt is that prefix (default: all the parent has) and `own_tokens`. It pins
        the blocks that hold the prefix's committed rows now, and gets blocks of its own when
        admitted: with one token left to compute it decodes at once, with more it computes a
        prompt. Where requests have state it takes its slot now, or starts from nothing. Returns as
        `add` does; NEVER leaves everything as it was.
        """
        parent = self.find(parent_id)
        if parent.row < 0:
            raise UserError(f"request {parent_id!r} is not running", hint="fork a running request")
        history = self.seqs.token_ids[parent.row, : self.seqs.num_tokens[parent.row]]
        shared = num_taken_over(num_shared_tokens, len(history), parent_id)
        prompt = np.concatenate((history[:shared], own_tokens)).astype(np.int32)
        seq = self._live.make(request_id, prompt, sampling)
        committed = int(self.seqs.num_computed_tokens[parent.row])
        num_common = min(committed, shared, len(prompt) - 1)
        seq.num_computed_tokens = num_common if self._can_share(parent.row, num_common) else 0
        num_pinned = blocks_for(seq.num_computed_tokens, self.config.block_size)
        seq.forked_table = self.seqs.table(parent.row)[:num_pinned]
        verdict = self._enqueue(seq)
        if verdict is not Verdict.NEVER:
            self.blocks.pin(seq.forked_table)
            if self.release.observer is not None:
                self.release.observer.forked(request_id, parent_id, seq.forked_table)
            if self.states is not None and num_pinned:
                seq.num_written_tokens = self.seqs.state_end(parent.row)
                self.states.fork(seq, parent)
            self.counters.num_stateless_forks += seq.num_computed_tokens < num_common
        return verdict

    def abort(self, request_id: str) -> Sequence:
        """End a live request now; blocks in use by a step in flight are withheld as usual."""
        seq = self.find(request_id)
        if seq.row < 0:
            self._give_up_pins(seq, self._waiting.remove(seq))
        else:
            self._give_up_row(seq, "abort")
        self._live.forget(seq)
        self.counters.num_aborted += 1
        return seq

    # -- one step --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can run."""
        self._tables.begin_step()
        self.started = []
        short = self._num_short if self._waiting else 0
        rows, counters = self._fit_running()
        drafts = self.seqs.num_lookahead_slots[rows] if self.config.drafts else None
        budget = self.config.max_num_batched_tokens - (0 if drafts is None else int(drafts.sum()))
        scheduled = split_budget(counters.num_tokens - counters.num_computed_tokens, budget)
        if self._waiting and self._num_short == short:  # what a running one lacks is not for others
            num_rows = len(rows)
            rows, scheduled = self._admit(rows, scheduled, budget)
            while not (len(rows) or self._comes_back()) and self._unfork_newest():
                rows, scheduled = self._admit(rows, scheduled, budget)
            counters = self._gather(rows) if len(rows) > num_rows else counters
        if drafts is not None:
            drafts = np.append(drafts, np.zeros(len(rows) - len(drafts), np.int32))
            scheduled = scheduled + drafts
        served = scheduled > 0
        copies = self._tables.copies
        if self._waiting.num_pinned_forks or copies.blocks:
            served &= ~self._copy_on_write(rows, counters)
        if np.count_nonzero(served) < len(rows):
            rows, scheduled = rows[served], scheduled[served]
            drafts = None if drafts is None else drafts[served]
            counters = self._gather(rows)
        if not len(rows):
            return None
        if self.states is not None:
            self._tables.waits += self.states.queue_copies(copies)
        self.num_steps += 1
        self.counters.num_block_copies += len(copies.blocks)
        self.counters.num_state_copies += len(copies.states)
        return self._plans.build(self.num_steps, rows, counters, scheduled, copies, drafts)

    def submitted(self, plan: StepPlan, fence: Fence) -> None:
        """The plan is queued on the device; `fence` passes when all of it is done."""
        set_out(self.seqs, plan)
        self.in_flight = fence

    def take_waits(self) -> list[Fence]:
        """Fences the device must pass before the plan's copies and writes (`ordered` only)."""
        waits, self._tables.waits = self._tables.waits, []
        return waits

    def commit(self, plan: StepPlan, result: StepResult) -> Commit:
        """Make the rows of a collected step part of the committed prefix, and append its tokens.

        Sequences that lost their row since the plan was made are left alone.
        """
        if self.in_flight is not None and self.in_flight.step <= plan.step:
            self.in_flight = None
        commit = write_back(self.seqs, plan, result)
        if self.reuse is not None:
            rows = plan.rows[self.seqs.epochs[plan.rows] == plan.epochs]
            self.reuse.publish(rows, self.in_flight)
        for seq, _ in commit.finished:
            self._give_up_row(seq, "finish")
            self._live.forget(seq)
        if plan.ahead is not None and self.config.drafts:
            drafted = (self.seqs.epochs[plan.rows] == plan.epochs) & (plan.ahead.num_drafts > 0)
            rows = plan.rows[drafted]
            self.counters.num_blocks_shrunk += self._cut_back(rows, self._gather(rows))
        return commit

    # -- blocks of running sequences -------------------------------------------------------------

    def _fit_running(self) -> tuple[Rows, RowCounters]:
        """Grow and shrink every running table; returns the rows that can run, with counters."""
        rows, seqs, size = self._running, self.seqs, self.config.block_size
        if self.in_flight is not None:
            rows = ready_rows(seqs, rows)
        if self.config.drafts:
            seqs.num_lookahead_slots[self._running] = 0
            budget = self.config.max_num_batched_tokens
            wanted = wanted_drafts(seqs, rows, self._gather(rows), self.config.drafts, budget)
            seqs.num_lookahead_slots[rows] = wanted
        counters = self._gather(rows)
        change = counters.blocks_needed(size) - counters.num_blocks
        if not np.count_nonzero(change):
            return rows, counters
        self._cut_back(rows, counters)
        if self.config.drafts and not self.release.make_room(int(change[change > 0].sum())):
            seqs.num_lookahead_slots[rows] = 0  # drafts give way before anybody else does
            counters = self._gather(rows)
            self._cut_back(rows, counters)
            change = counters.blocks_needed(size) - seqs.num_blocks[rows]
        growing = change > 0
        counts = change[growing]
        if self.release.make_room(int(counts.sum())):
            self._tables.grow(rows[growing], counts)
        else:
            rows = self._grow_one_by_one(rows, rows[growing], counts)
        return rows, self._gather(rows)

    def _cut_back(self, rows: Rows, counters: RowCounters) -> int:
        """Give up what the tables of `rows` have beyond their need; returns the blocks cut off."""
        surplus = counters.num_blocks - counters.blocks_needed(self.config.block_size)
        for index in np.flatnonzero(surplus > 0).tolist():
            num_blocks = int(counters.num_blocks[index] - surplus[index])
            self._tables.shrink(int(rows[index]), num_blocks, self.in_flight)
        return int(surplus.clip(0).sum())

    def _grow_one_by_one(self, rows: Rows, growing: Rows, counts: Int32) -> Rows:
        """Too few blocks for all: serve the oldest first, take back from others where needed."""
        held_back, some_end = [], len(rows) < len(self._running)
        for row, count in zip(growing.tolist(), counts.tolist(), strict=True):
            seq = self.seqs.sequences[row]
            if seq is None:
                continue  # preempted for an older one
            while seq.row == row and not self.release.make_room(count):
                if some_end or count <= self.blocks.num_free + self.blocks.num_withheld:
                    held_back.append(row)
                    self.counters.num_held_back += 1
                    break
                self._take_back(row)
            else:
                if seq.row == row:
                    self._tables.grow(np.array([row]), np.array([count], np.int32))
        running = ready_rows(self.seqs, self._running) if some_end else self._running
        return running[~np.isin(running, held_back)] if held_back else running

    def _take_back(self, needy_row: int) -> None:
        """Make one holder of blocks give way: the policy's victim, or a waiting fork's pins."""
        victim = PREEMPTION[self.config.preemption](self.seqs, self._running)
        if victim == needy_row and self._unfork_newest():
            return
        seq = self.seqs.at(victim)
        self.counters.num_preemptions += 1
        self.counters.num_recomputed_tokens += int(self.seqs.num_computed_tokens[victim])
        self._give_up_row(seq, "preempt")
        seq.num_preemptions += 1
        self._waiting.add(seq)

    def _copy_on_write(self, rows: Rows, counters: RowCounters) -> NDArray[np.bool_]:
        """Give a row its own copy of the block it writes first, if somebody else owns it too.

        Returns bool [S]: the rows that must sit this step out because no block is left for a copy.
        """
        tables = self._tables
        starts = counters.num_computed_tokens
        if self.looks_ahead:  # drafts in flight may be rejected
            starts = starts - self.seqs.num_unsure(rows, counters)
        columns, offsets = np.divmod(starts, self.config.block_size)
        first = self.seqs.block_tables[rows, columns]
        stuck = np.zeros(len(rows), bool)
        shared = (self.blocks.ref_counts(first) > 1) & (offsets > 0)
        for index in np.flatnonzero(shared).tolist():
            while tables.is_shared(int(first[index])) and not stuck[index]:
                if self.release.make_room(1):
                    tables.replace(int(rows[index]), int(columns[index]))
                    break
                if self.blocks.num_withheld or not self._unfork_newest():
                    stuck[index] = True
                    self.counters.num_held_back += 1
        return stuck

    # -- waiting sequences -----------------------------------------------------------------------

    def _admit(self, rows: Rows, scheduled: Int32, budget: int) -> tuple[Rows, Int32]:
        """Start waiting sequences in order while budget, rows and blocks last."""
        budget -= int(scheduled.sum())
        new_rows, new_scheduled = [], []
        while self._waiting and budget > 0 and self.seqs.num_free_rows:
            seq = self._waiting.head
            if not self._start(seq):
                break
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
        """Give a waiting sequence its blocks, a state slot and a row, whole or not at all."""
        reserved, split, hits = self._reservation(seq), self._split(seq), self._hits(seq)
        if not self.release.make_room(self._num_new(reserved, split, hits)):
            self.counters.num_later_blocks += 1
            return False
        states = None if seq.state_id else self.states
        pools = [pool for pool in (states, self.drafts) if pool is not None]
        if not all(pool.has_room() for pool in pools):
            self.counters.num_later_slots += 1
            return False
        for pool in pools:
            self._tables.waits += pool.take(seq)
        keeps_reserve = self.config.admission == "lifetime"
        if self.reuse is not None and len(hits):
            self.reuse.take(seq, hits)
            split = ForkSplit(hits, NO_BLOCKS, copies_tail=False)
            self.counters.num_hit_blocks += len(hits)
        self._tables.start(seq, split, reserved, reserved if keeps_reserve else 0)
        self._waiting.remove(seq)
        self._plans.started(seq)
        self.started.append(seq)
        return True

    def _unfork_newest(self) -> bool:
        """Take what the newest waiting fork holds; it then computes its prompt itself."""
        seq = self._waiting.newest_fork
        if seq is None:
            return False
        self._give_up_pins(seq, self._waiting.unpin(seq))
        self.counters.num_unforked += 1
        return True

    # -- small change ----------------------------------------------------------------------------

    def _enqueue(self, seq: Sequence) -> Verdict:
        longest = lifetime_blocks(seq.num_tokens, seq.max_total_tokens, self.config.block_size)
        too_long = seq.max_total_tokens > self.config.max_model_len
        if too_long or self.blocks.can_allocate(longest) is Verdict.NEVER:
            self.counters.num_never += 1
            return Verdict.NEVER
        self._live.accept(seq)
        self._waiting.add(seq)
        if self.states is not None and not self.states.slots.num_free:
            return Verdict.LATER
        reserved, split, hits = self._reservation(seq), self._split(seq), self._hits(seq)
        return self.blocks.can_allocate(self._num_new(reserved, split, hits))

    def _can_share(self, parent_row: int, num_tokens: int) -> bool:
        """Whether a fork can go on behind so many tokens of its parent: its blocks always can."""
        if self.states is None or not num_tokens:
            return True
        return self.states.can_fork(self.seqs.state_end(parent_row), num_tokens)

    @property
    def _num_short(self) -> int:
        """Times that a running sequence got fewer blocks than it needed."""
        return self.counters.num_preemptions + self.counters.num_held_back

    def _comes_back(self) -> bool:
        """Whether blocks or slots come back by themselves: a fence keeps them, or a step runs."""
        pools = [pool.slots for pool in (self.states, self.drafts) if pool is not None]
        withheld = any(pool.num_withheld for pool in (self.blocks, *pools))
        return withheld or self.in_flight is not None

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

    def _hits(self, seq: Sequence) -> Int32:
        """Blocks a waiting request could take over from those that others have published."""
        return NO_BLOCKS if self.reuse is None else self.reuse.match(seq)

    def _num_new(self, reserved: int, split: ForkSplit, hits: Int32) -> int:
        """Free blocks that a request takes: new ones, and hits that nobody owns."""
        num_blocks = reserved - len(split.shared)
        return num_blocks if self.reuse is None else self.reuse.num_needed(num_blocks, hits)

    def _give_up_pins(self, seq: Sequence, pinned: Int32) -> None:
        """Of a request that has no row, and computes its own prompt if it still runs."""
        self.release.give_up(pinned, self.in_flight, owner=seq.request_id, path="unpin")
        if self.states is not None:
            self.states.give_up(seq, self.in_flight, "unpin")
        seq.num_computed_tokens = seq.num_written_tokens = 0

    def _give_up_row(self, seq: Sequence, path: str) -> None:
        self._running = self._running[self._running != seq.row]
        if self.prefix_tags is not None:
            self.prefix_tags.ended(seq.row, seq.request_id)
        table = self.seqs.remove(seq)
        self.release.give_up(table, self.in_flight, owner=seq.request_id, path=path)
        for pool in (self.states, self.drafts):
            if pool is not None:
                pool.give_up(seq, self.in_flight, path)
