"""Who runs in the next step, and what its result changes.

    schedule    who runs goes on, its table fitted        deepinfer.fitting
                who waits starts, with what is left       deepinfer.admission
                the plan is laid out                      deepinfer.planning
    commit      the result is written back                deepinfer.results
                who has ended gives up what it holds      deepinfer.holdings

Knows no device: work in flight is one fence the engine sets. Invariant: before a plan leaves, every
sequence in it owns all the blocks it will write, and its slots, alone; a refused call changes
nothing.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from deepinfer.admission import Admission
from deepinfer.block_manager import BlockManager, Verdict
from deepinfer.block_tables import BlockTables
from deepinfer.checks.prefix_tags import PrefixTags
from deepinfer.config import EngineConfig
from deepinfer.errors import UserError, check_name
from deepinfer.fitting import TableFitting
from deepinfer.fork import num_taken_over
from deepinfer.holdings import Holdings
from deepinfer.live import LiveRequests
from deepinfer.lookahead import BlocksAhead, blocks_ahead, set_out
from deepinfer.names import FORK_COPIES
from deepinfer.plan import Int32, StepPlan, StepResult
from deepinfer.planning import PlanBuilder, split_budget
from deepinfer.policies import ADMISSION, PREEMPTION
from deepinfer.prefix_cache import CachingBlockManager
from deepinfer.prefix_reuse import PrefixReuse
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.results import Commit, ResultWriter, committed_rows
from deepinfer.sequence import SamplingParams, Sequence, SequenceTable, blocks_for
from deepinfer.slots import Slots
from deepinfer.state_slots import StateSlots
from deepinfer.store.tiers import TieredStore
from deepinfer.store_reuse import Load, Save, StoreReuse

NO_TOKENS = np.empty(0, np.int32)


class Scheduler:
    """The two decisions of a step: who goes on, and who starts.

    Args:
        states: the pool of state slots; None for a model without state.
        drafts: the pool of draft slots, where the configuration looks ahead.

    Attributes:
        seqs: the rows of running sequences.
        counters: decisions so far.
        prefix_tags: what every KV row must be tagged with; None without `tags`.
        num_steps: steps planned so far.
        looks_ahead: whether plans may have open sequences.
        reuse, store_reuse: what finds rows that need not be computed, in the pool and in the store;
            None without.
        states_to_keep: state slots to be copied out before the step of the last plan writes them.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        release: ReleaseQueue,
        states: StateSlots | None = None,
        drafts: Slots | None = None,
        store: TieredStore | None = None,
        *,
        tags: bool = False,
    ) -> None:
        check_name("admission", config.admission, ADMISSION)
        check_name("preemption", config.preemption, PREEMPTION)
        check_name("fork_copy", config.fork_copy, FORK_COPIES)
        config.check()
        self.config = config
        self.blocks = blocks
        self.release = release
        self.states = states
        self.drafts = drafts
        self.seqs = seqs = SequenceTable(
            config.max_num_seqs, config.max_model_len, config.block_size
        )
        self.prefix_tags = PrefixTags(seqs, config.max_model_len, seqs.names) if tags else None
        self.looks_ahead = config.looks_ahead
        assert self.looks_ahead == (drafts is not None), "who looks ahead needs draft slots"
        self.reuse: PrefixReuse | None = None
        if config.prefix_cache:
            self.reuse = PrefixReuse(seqs, cast(CachingBlockManager, blocks), release)
        self.store_reuse: StoreReuse | None = None
        if store is not None:
            self.store_reuse = StoreReuse(store, seqs, blocks, release, states)
        self.states_to_keep: list[Save] = []
        self.num_steps = 0
        self._held = Holdings(seqs, release, states, drafts, self.prefix_tags)
        self.counters = self._held.counters
        self._waiting = self._held.waiting
        self._live = LiveRequests()
        self._tables = BlockTables(seqs, blocks, release)
        self._fitting = TableFitting(config, self._held, self._tables)
        self._admission = Admission(config, self._held, self._tables, self.reuse, self.store_reuse)
        self._plans = PlanBuilder(
            seqs,
            self.prefix_tags,
            has_state=states is not None,
            looks_ahead=self.looks_ahead,
        )
        self._results = ResultWriter(seqs)

    # -- looking ---------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that have no row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._held.running) + len(self._held.loading)

    @property
    def running(self) -> list[Sequence]:
        """The sequences that have a row: those that run, by admission, then those that load."""
        running = [self.seqs.at(row) for row in self._held.running.tolist()]
        return running + [load.seq for load in self._held.loading]

    @property
    def waiting(self) -> list[Sequence]:
        """The requests without a row, by arrival."""
        return list(self._waiting)

    @property
    def started(self) -> list[Sequence]:
        """The sequences that run since the last `schedule()`."""
        return self._admission.started

    @property
    def loads(self) -> list[Load]:
        """Begun by the last `schedule()`."""
        return self._admission.loads

    @property
    def in_flight(self) -> Fence | None:
        """What passes behind the last step that was submitted and not committed."""
        return self._held.in_flight

    def blocks_ahead(self) -> BlocksAhead:
        """Blocks held for tokens that are not known; none where plans do not look ahead."""
        return blocks_ahead(self.seqs, self._held.running) if self.looks_ahead else BlocksAhead()

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
        self._end(seq, "abort")
        self.counters.num_aborted += 1
        return seq

    def loaded(self, load: Load) -> None:
        """The rows of a request have come from the store: it runs."""
        self._admission.loaded(load)

    def load_failed(self, load: Load) -> None:
        """An entry was gone, or bad: the request waits again."""
        assert self.store_reuse is not None, "it was loaded from there"
        self.store_reuse.counters.num_failed_loads += 1
        self._held.load_failed(load)

    # -- one step --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can run."""
        self._tables.begin_step()
        self._admission.begin_step()
        gather = self._fitting.gather
        rows, counters, all_fit = self._fitting.fit()
        drafts = self.seqs.num_lookahead_slots[rows] if self.config.drafts else None
        budget = self.config.max_num_batched_tokens - (0 if drafts is None else int(drafts.sum()))
        scheduled = split_budget(counters.num_tokens - counters.num_computed_tokens, budget)
        if self._waiting and all_fit:  # what a running one lacks is not for others
            num_rows = len(rows)
            rows, scheduled = self._admission.admit(rows, scheduled, budget)
            while not (len(rows) or self._held.comes_back) and self._held.unfork_newest():
                rows, scheduled = self._admission.admit(rows, scheduled, budget)
            counters = gather(rows) if len(rows) > num_rows else counters
        for seq in self._admission.started:
            self._plans.started(seq)
        if self.store_reuse is not None:
            first = counters.num_computed_tokens
            scheduled = self.store_reuse.cut_at_boundary(rows, first, scheduled)
        if drafts is not None:
            drafts = np.append(drafts, np.zeros(len(rows) - len(drafts), np.int32))
            scheduled = scheduled + drafts
        copies = self._tables.copies
        if self._waiting.num_pinned_forks or copies.blocks:
            stuck = self._fitting.copy_on_write(rows, counters)
            scheduled = scheduled * ~stuck
        if np.count_nonzero(scheduled) < len(rows):
            served = scheduled > 0
            rows, scheduled = rows[served], scheduled[served]
            drafts = None if drafts is None else drafts[served]
            counters = gather(rows)
        if not len(rows):
            return None
        if self.states is not None:
            self._tables.waits += self.states.queue_copies(copies)
        if self.store_reuse is not None:
            unsure = self.seqs.num_unsure(rows, counters)
            self.states_to_keep = self.store_reuse.states_to_keep(rows, counters, unsure)
        self.num_steps += 1
        self.counters.num_block_copies += len(copies.blocks)
        self.counters.num_state_copies += len(copies.states)
        return self._plans.build(self.num_steps, rows, counters, scheduled, copies, drafts)

    def submitted(self, plan: StepPlan, fence: Fence) -> None:
        """The plan is queued on the device; `fence` passes when all of it is done."""
        set_out(self.seqs, plan)
        self._held.in_flight = fence

    def take_waits(self) -> list[Fence]:
        """Fences the device must pass before the plan's copies and writes (`ordered` only)."""
        waits, self._tables.waits = self._tables.waits, []
        return waits

    def commit(self, plan: StepPlan, result: StepResult) -> Commit:
        """Make the rows of a collected step part of the committed prefix, and append its tokens.

        Sequences that lost their row since the plan was made are left alone.
        """
        held = self._held
        if held.in_flight is not None and held.in_flight.step <= plan.step:
            held.in_flight = None
        commit = self._results.write_back(plan, result)
        if self.config.drafts and self.release.observer is not None:
            self.release.observer.committed(committed_rows(self.seqs, plan))
        if self.reuse is not None or self.store_reuse is not None:
            rows = plan.rows[self.seqs.epochs[plan.rows] == plan.epochs]
            if self.reuse is not None:
                self.reuse.publish(rows, held.in_flight)
            if self.store_reuse is not None:
                self.store_reuse.committed(rows)
        for seq, _ in commit.finished:
            self._end(seq, "finish")
        self._fitting.committed(plan)
        return commit

    # -- inside ----------------------------------------------------------------------------------

    def _enqueue(self, seq: Sequence) -> Verdict:
        verdict = self._admission.queue(seq)
        if verdict is not Verdict.NEVER:
            self._live.accept(seq)
        return verdict

    def _can_share(self, parent_row: int, num_tokens: int) -> bool:
        """Whether a fork can go on behind so many tokens of its parent: its blocks always can."""
        if self.states is None or not num_tokens:
            return True
        return self.states.can_fork(self.seqs.state_end(parent_row), num_tokens)

    def _end(self, seq: Sequence, path: str) -> None:
        self._held.end(seq, path)
        self._live.forget(seq)
