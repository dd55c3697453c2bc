"""The host core driven by hand over a device that moves tuples: scheduler, block manager, queue.

`World` does what the engine does at each moment of a step, over the real host objects, and keeps a
model of its own beside them: the tokens of every live request, how many of its rows are committed,
who holds which block, and what every row of the pool contains. A row's content is the tuple of all
tokens up to it, so a block that was handed out too early shows up as a wrong row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from deepinfer.block_manager import BlockManager, Verdict
from deepinfer.config import EngineConfig
from deepinfer.plan import StepPlan, StepResult
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.scheduler import Commit, Scheduler
from deepinfer.sequence import SamplingParams
from tests.deepinfer.fake_device import FakeDevice, Operation

EMPTY = np.empty(0, np.int32)


class WatchedBlocks(BlockManager):
    """A block manager that shows every id it hands out to `on_allocate`."""

    on_allocate: Callable[[list[int]], None]

    def allocate(self, count: int) -> np.ndarray:
        ids = super().allocate(count)
        self.on_allocate(ids.tolist())
        return ids

    def allocate_one(self) -> int:
        block_id = super().allocate_one()
        self.on_allocate([block_id])
        return block_id


class World:
    """One engine's host side, its model and the checks between them."""

    def __init__(self, config: EngineConfig, seed: int = 0) -> None:
        self.config = config
        self.device = FakeDevice()
        self.blocks = WatchedBlocks(
            config.num_blocks,
            free_order=config.free_order,
            discipline=config.discipline,
            seed=config.seed,
        )
        self.blocks.on_allocate = self._handed_out
        self.release = ReleaseQueue(self.blocks, config.release)
        self.scheduler = Scheduler(config, self.blocks, self.release)
        self.rng = np.random.default_rng(seed)
        self.tokens: dict[str, list[int]] = {}  # of live requests
        self.ended: dict[str, tuple[str, list[int]]] = {}  # reason, tokens
        self.limits: dict[str, int] = {}  # tokens at which a request ends by length
        self.computed: dict[str, int] = {}  # of running requests
        self.rows: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> content
        self.wrong_reads = 0
        self.plan: StepPlan | None = None
        self._copied: Operation | None = None  # the last copies queued
        self._flight: Operation | None = None
        self._planned_ids: list[str] = []
        self._fence = Fence(0)
        self._transfers: list[tuple[int, Operation]] = []  # (step, operation)
        self._to_wait_for: list[Operation] = []

    # -- what a user does ------------------------------------------------------------------------

    def add(
        self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, stop: int | None = None
    ) -> Verdict:
        params = SamplingParams(max_tokens=max_tokens, stop_token_id=stop)
        verdict = self.scheduler.add(request_id, np.array(prompt, np.int32), params)
        self._accepted(verdict, request_id, list(prompt), max_tokens)
        return verdict

    def fork(
        self,
        parent_id: str,
        request_id: str,
        *,
        own: Sequence[int] = (),
        num_shared: int | None = None,
        max_tokens: int = 4,
    ) -> Verdict:
        verdict = self.scheduler.fork(
            parent_id,
            request_id,
            SamplingParams(max_tokens=max_tokens),
            own_tokens=np.array(own, np.int32),
            num_shared_tokens=num_shared,
        )
        prompt = self.tokens[parent_id][:num_shared] + list(own)
        self._accepted(verdict, request_id, prompt, max_tokens)
        return verdict

    def abort(self, request_id: str) -> None:
        seq = self.scheduler.abort(request_id)
        assert seq.token_ids.tolist() == self.tokens[request_id]
        self._end(request_id, "abort")
        if self.plan is None:
            self._flush_if_idle()

    def transfer(self, request_id: str, num_steps: int = 1) -> None:
        """Read a running request's committed rows on `load`; done `num_steps` steps from now.

        The reader waits for the copies in flight, as whoever queues such work must.
        """
        table, committed = self.table(request_id), self.computed[request_id]
        table = table[: -(-committed // self.config.block_size)]
        places = [self._place(table, position) for position in range(committed)]
        history = tuple(self.tokens[request_id])
        expected = [history[: position + 1] for position in range(committed)]

        def read() -> None:
            self.wrong_reads += [self.rows.get(place) for place in places] != expected

        self.blocks.pin(table)
        after = [self._copied] if self._copied else []
        operation = self.device.submit("load", table, read, after)
        last = self.plan.step if self.plan else self._fence.step
        self._transfers.append((last + num_steps, operation))
        self.release.give_up(table, Fence(last + num_steps, operation))

    # -- what the engine does --------------------------------------------------------------------

    def submit(self) -> bool:
        """Plan a step and queue it; False if there is nothing to run."""
        self._to_wait_for = []
        plan = self.scheduler.schedule()
        if plan is None and self.release.num_entries:
            self.release.flush()
            plan = self.scheduler.schedule()
        self._note_lost_rows()
        if plan is None:
            assert not self.tokens, "requests are live, but nothing runs and nothing is withheld"
            return False
        running = {seq.row: seq.request_id for seq in self.scheduler.running}
        for seq in self.scheduler.started:  # a fork starts with the rows it shares
            self.computed[seq.request_id] = int(self.scheduler.seqs.num_computed_tokens[seq.row])
        self._planned_ids = [running[row] for row in plan.rows.tolist()]
        self.check(plan.copy_sources)
        self.check_plan(plan)
        waits = [f.event for f in self.scheduler.take_waits() if isinstance(f.event, Operation)]
        self._check_waits(waits)
        self._submit_copies(plan, waits)
        self._give_up_sources(plan)
        self.check()
        self._flight = self._submit_forward(plan, waits)
        self._fence = Fence(plan.step, self._flight)
        self.scheduler.submitted(plan, self._fence)
        self.release.release_point()
        self.plan = plan
        return True

    def collect(self, sampled: Sequence[int] | None = None) -> Commit:
        """Run the step in flight to its end and commit its tokens (random ones by default)."""
        plan = self.plan
        assert plan is not None
        assert self._flight is not None
        self._flight.synchronize()
        for step, operation in self._transfers:
            if step <= plan.step:
                operation.synchronize()
        self._transfers = [(s, op) for s, op in self._transfers if s > plan.step]
        self._fence.passed = True
        self.release.collected(plan.step)
        count = len(plan.sample_seq)
        tokens = self.rng.integers(0, 9, count) if sampled is None else np.array(sampled)
        result = StepResult(plan.step, tokens.astype(np.int32), np.zeros(count, np.float32))
        commit = self.scheduler.commit(plan, result)
        self._follow_commit(plan, tokens.tolist(), commit)
        self.plan = None
        self._flush_if_idle()
        return commit

    def step(self, sampled: Sequence[int] | None = None) -> Commit | None:
        return self.collect(sampled) if self.submit() else None

    def drain(self, max_steps: int = 2000) -> None:
        """Run everything to its end; the pool is then as it was at the start."""
        if self.plan is not None:
            self.collect()
        for _ in range(max_steps):
            if self.step() is None:
                break
            self.check()
        assert not self.tokens, "requests are still live"
        self.release.flush()
        self.check()
        assert self.blocks.num_free == self.blocks.num_usable

    # -- looking ---------------------------------------------------------------------------------

    def table(self, request_id: str) -> list[int]:
        """The block table of a running request."""
        return self.scheduler.seqs.table(self.scheduler.find(request_id).row).tolist()

    def running_ids(self) -> list[str]:
        return [seq.request_id for seq in self.scheduler.running]

    def holders(self, sources: Iterable[np.ndarray] = ()) -> Counter[int]:
        """Owners of each block, counted from whoever is alive."""
        counts: Counter[int] = Counter()
        for request_id in self.tokens:
            seq = self.scheduler.find(request_id)
            counts.update(self.table(request_id) if seq.row >= 0 else seq.forked_table.tolist())
        for ids in sources:
            counts.update(ids.tolist())
        return counts

    # -- checks ----------------------------------------------------------------------------------

    def check(self, sources: Iterable[np.ndarray] = ()) -> None:
        """Conservation, owner counts, counters and coverage, against the model."""
        blocks, holders = self.blocks, self.holders(sources)
        blocks.check_integrity()
        refs = blocks.ref_counts(np.arange(blocks.num_blocks)).tolist()
        assert refs == [holders[block_id] for block_id in range(blocks.num_blocks)]
        free = blocks.free_ids()
        assert len(set(free)) == len(free) == blocks.num_free
        assert not set(free) & holders.keys()
        assert 0 not in free
        withheld = set(range(1, blocks.num_blocks)) - set(free) - holders.keys()
        assert len(withheld) == blocks.num_withheld
        assert blocks.num_free + blocks.num_held + blocks.num_withheld + 1 == blocks.num_blocks
        assert self.release.num_entries or not withheld, "withheld, and no fence will lift it"
        if self.release.policy.safe and self.config.release != "ordered":
            assert not self.device.touching(free), "free while work on it is open"
        if self.release.policy.safe:
            assert not self.wrong_reads
        self._check_rows()

    def _check_rows(self) -> None:
        seqs = self.scheduler.seqs
        live = self.scheduler.num_running + self.scheduler.num_waiting
        assert live == len(self.tokens)
        for seq in self.scheduler.running:
            row, tokens = seq.row, self.tokens[seq.request_id]
            computed = self.computed[seq.request_id]
            assert seqs.token_ids[row, : seqs.num_tokens[row]].tolist() == tokens
            assert seqs.num_computed_tokens[row] == computed < len(tokens)
            assert seqs.num_blocks[row] * self.config.block_size >= computed
            assert not seqs.block_tables[row, seqs.num_blocks[row] :].any()
            if self.plan is None:
                assert seqs.num_in_flight_tokens[row] == 0

    def check_plan(self, plan: StepPlan) -> None:
        """What the plan says against the model: tokens, positions, slots, tables, copies."""
        size, seqs = self.config.block_size, self.scheduler.seqs
        pending = Counter(np.concatenate([EMPTY, *plan.copy_sources]).tolist())
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(set(plan.slot_mapping.tolist())) == plan.num_tokens
        assert plan.query_start.tolist() == [0, *np.cumsum(plan.num_scheduled).tolist()]
        for index, request_id in enumerate(self._planned_ids):
            row, tokens = int(plan.rows[index]), self.tokens[request_id]
            computed, table = self.computed[request_id], self.table(request_id)
            count = int(plan.num_scheduled[index])
            part = slice(int(plan.query_start[index]), int(plan.query_start[index + 1]))
            positions = list(range(computed, computed + count))
            assert count >= 1
            assert plan.positions[part].tolist() == positions
            assert plan.token_ids[part].tolist() == tokens[computed : computed + count]
            assert plan.context_lens[index] == computed + count
            assert (index in plan.sample_seq) == (computed + count == len(tokens))
            slots = [table[p // size] * size + p % size for p in positions]
            assert plan.slot_mapping[part].tolist() == slots
            width = plan.block_tables.shape[1]
            assert plan.block_tables[index].tolist() == table + [0] * (width - len(table))
            assert min(table) > 0
            lookahead = int(seqs.num_lookahead_slots[row])
            needed = min(len(tokens) + lookahead, max(self.limits[request_id] - 1, len(tokens)))
            if self.config.admission == "lifetime":
                needed = max(needed, self.limits[request_id] - 1)
            assert len(table) == -(-needed // size)
            for block_id in {slot // size for slot in slots}:
                owners = self.blocks.ref_count(block_id) - pending[block_id]
                assert owners == 1, f"{request_id} writes block {block_id} of {owners} owners"
        self._check_copies(plan, pending)

    def _check_copies(self, plan: StepPlan, pending: Counter[int]) -> None:
        sources, destinations = plan.block_copies.T.tolist()
        assert len(set(destinations)) == len(destinations)
        assert not set(sources) & set(destinations)
        for source, destination in zip(sources, destinations, strict=True):
            assert pending[source], "the source is not held until its copy is done"
            assert self.blocks.ref_count(destination) == 1

    # -- inside ----------------------------------------------------------------------------------

    def _handed_out(self, ids: list[int]) -> None:
        still_open = self.device.touching(ids)
        if self.config.release == "ordered":
            self._to_wait_for += still_open
        elif self.release.policy.safe:
            assert not still_open, f"{ids} handed out while a fence on it is open"

    def _check_waits(self, waits: list[Operation]) -> None:
        for op in self._to_wait_for:
            waited_for = any(w.queue == op.queue and w.index >= op.index for w in waits)
            assert op.done or waited_for, "a writer does not wait for open work on its block"

    def _submit_copies(self, plan: StepPlan, waits: list[Operation]) -> None:
        pairs = plan.block_copies.tolist()
        if not pairs:
            return

        def copy() -> None:
            size = self.config.block_size
            for source, destination in pairs:
                for offset in range(size):
                    content = self.rows.get((source, offset))
                    if content is not None:
                        self.rows[destination, offset] = content

        touched = [block_id for pair in pairs for block_id in pair]
        self._copied = self.device.submit("step", touched, copy, waits)

    def _give_up_sources(self, plan: StepPlan) -> None:
        event = self._copied if self.release.policy.needs_events else None
        shared = Fence(plan.step, event)
        for ids in plan.copy_sources:
            if self.config.fence == "step":
                self.release.give_up(ids, shared)
            else:
                for block_id in self.blocks.in_free_order(ids):
                    self.release.give_up([int(block_id)], Fence(plan.step, event))

    def _submit_forward(self, plan: StepPlan, waits: list[Operation]) -> Operation:
        histories = [tuple(self.tokens[request_id]) for request_id in self._planned_ids]
        size = self.config.block_size

        def forward() -> None:
            for index, history in enumerate(histories):
                table, end = plan.block_tables[index].tolist(), int(plan.context_lens[index])
                start = end - int(plan.num_scheduled[index])
                for position in range(start, end):
                    self.rows[self._place(table, position)] = history[: position + 1]
                read = [self.rows.get(self._place(table, p)) for p in range(end)]
                self.wrong_reads += read != [history[: p + 1] for p in range(end)]

        used = [
            plan.block_tables[index, : -(-int(plan.context_lens[index]) // size)]
            for index in range(plan.num_seqs)
        ]
        return self.device.submit("step", np.concatenate(used), forward, waits)

    def _place(self, table: list[int], position: int) -> tuple[int, int]:
        column, offset = divmod(position, self.config.block_size)
        return table[column], offset

    def _accepted(
        self, verdict: Verdict, request_id: str, prompt: list[int], max_tokens: int
    ) -> None:
        limit, size = len(prompt) + max_tokens, self.config.block_size
        fits = limit <= self.config.max_model_len
        fits = fits and -(-(limit - 1) // size) <= self.config.num_blocks - 1
        assert (verdict is not Verdict.NEVER) == fits
        if fits:
            self.tokens[request_id] = prompt
            self.limits[request_id] = limit

    def _note_lost_rows(self) -> None:
        running = set(self.running_ids())
        self.computed = {i: count for i, count in self.computed.items() if i in running}

    def _end(self, request_id: str, reason: str) -> None:
        self.ended[request_id] = (reason, self.tokens.pop(request_id))
        self.computed.pop(request_id, None)
        del self.limits[request_id]

    def _follow_commit(self, plan: StepPlan, sampled: list[int], commit: Commit) -> None:
        """Move the model on as the result says, and compare what the scheduler reported."""
        got: list[tuple[str, int]] = []
        for index, request_id in enumerate(self._planned_ids):
            if request_id in self.computed:  # not aborted since
                self.computed[request_id] += int(plan.num_scheduled[index])
        for index, token in zip(plan.sample_seq.tolist(), sampled, strict=True):
            request_id = self._planned_ids[index]
            if request_id in self.computed:
                self.tokens[request_id].append(token)
                got.append((request_id, token))
        reported = [seq.request_id for seq in commit.sequences]
        assert list(zip(reported, commit.token_ids.tolist(), strict=True)) == got
        finished = {seq.request_id: reason for seq, reason in commit.finished}
        for seq, _ in commit.finished:
            assert seq.token_ids.tolist() == self.tokens[seq.request_id]
        for request_id, token in got:
            stop = None
            if len(self.tokens[request_id]) >= self.limits[request_id]:
                stop = "length"
            seq_stop = next(s for s in commit.sequences if s.request_id == request_id).sampling
            if token == seq_stop.stop_token_id:
                stop = "stop"
            assert finished.get(request_id) == stop
            if stop:
                self._end(request_id, stop)

    def _flush_if_idle(self) -> None:
        if not self.tokens:
            self.release.flush()
