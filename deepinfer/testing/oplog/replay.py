"""Replays an operation log through another policy, free list, pool or block manager.

No model: the host operations of the log run in their order through a real release queue and a real
block manager for each pool (blocks, state slots), and the device operations on a stepped device
that moves names instead of rows (`deepinfer.testing.oplog.memory`), so a block that was handed out
too early is a wrong read. What the recorded policy did is left out; the replayed one acts at the
same moments in its own way.

Knows operations, not where they come from; no torch. Invariant: a replay of the recorded
configuration hands out the recorded ids, as long as the device is as far as the host saw it then.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from deepinfer.block_manager import BlockManager
from deepinfer.checks.blocks import observed
from deepinfer.checks.findings import Findings
from deepinfer.checks.suite import Checks
from deepinfer.config import EngineConfig
from deepinfer.device.base import Event, Stream
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.device.wrapper import inner_event
from deepinfer.errors import DeepInferError, listed
from deepinfer.names import UNSAFE_POLICIES
from deepinfer.observer import NO_STEP, Observer
from deepinfer.release import Fence
from deepinfer.sizing import num_state_slots
from deepinfer.testing.oplog.figures import RANDOM, RECORDED, Figures, Progress
from deepinfer.testing.oplog.memory import ReplayMemory
from deepinfer.testing.oplog.operations import (
    Allocate,
    Collected,
    Commit,
    Copy,
    Flush,
    Host,
    Operation,
    Pin,
    Query,
    Record,
    Recycle,
    Release,
    ReleasePoint,
    Submit,
    Synchronize,
    Wait,
    seen,
    with_notes,
)
from deepinfer.testing.oplog.pools import ReplayPool

AS_LATE = Progress()
CONTENT = "content"  # the finding of a wrong read
MakeBlocks = Callable[..., BlockManager]


class DoesNotFit(DeepInferError):
    """An allocation of the log finds too few blocks, whatever is waited for."""


class Replay:
    """One log on its way through one configuration.

    Args:
        config: the recorded one with the choices to try instead.
        make_blocks: a block manager class, or a function called as one.
        checks: of `order` and `conservation`.

    Attributes:
        findings: what the checkers found, and wrong reads as `CONTENT`.
        stopped: why it did not reach the end of the log; empty if it has.
        num_steps: the last step whose end was recorded.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        make_blocks: MakeBlocks = BlockManager,
        checks: Sequence[str] = (),
        progress: Progress = AS_LATE,
    ) -> None:
        self.config, self.stopped, self.num_steps = config, "", 0
        self._num_operations = 0
        watch = Checks("order" if "order" in checks else "off", config.block_size)
        self.findings: Findings = watch.findings
        self._counts_blocks = "conservation" in checks
        num_slots = num_state_slots(config.max_num_seqs, config.num_state_slots)
        # What the checkers look at here: `config`, `num_steps`, and of slots how many there are.
        self.states = SimpleNamespace(slots=SimpleNamespace(num_blocks=num_slots))
        watch.bind(cast(Any, self))

        def pool(thing: str, size: int, observer: Observer | None) -> ReplayPool:
            blocks = make_blocks(
                size,
                free_order=config.free_order,
                discipline=config.discipline,
                seed=config.seed,
            )
            return ReplayPool(
                thing, size, observed(blocks, observer), config.release, observer, self._contradict
            )

        self._observer = watch.observer
        self._blocks = pool("block", config.num_blocks, watch.observer)
        self._slots = pool("state slot", num_slots, watch.state_observer)
        self._pools = (self._blocks, self._slots)
        self._stepped = SteppedCpuDevice()
        self.device = watch.watch_device(self._stepped)
        self._progress, self._rng = progress, random.Random(progress.seed)
        self._memory = ReplayMemory(
            config.num_blocks,
            config.block_size,
            lambda message: self.findings.add(CONTENT, self.num_steps, message),
            num_slots,
        )
        self._events: dict[str, Event] = {}
        self._fences: dict[str, Fence] = {}  # by the event at a step's end
        self._eventless: list[Fence] = []
        self._transfers: dict[str, Fence] = {}  # those behind no step, by their events
        self._copy_fence: Fence | None = None  # of the step being queued
        self._copy_events: list[tuple[Release, Event]] = []
        self._stream_waits: list[Fence] = []
        self._num_held: Counter[str] = Counter()  # of these, how many each stream waits for
        self._apply: dict[type[Any], Callable[[Any], None]] = {
            Allocate: self._allocate,
            Pin: self._pin,
            Release: self._release,
            Submit: self._submit,
            Copy: self._copy,
            Record: self._record,
            Wait: lambda op: self._stream(op.stream).wait(self._event(op.event)),
            Synchronize: self._synchronize,
            Query: lambda op: None,
            Recycle: self._recycle,
            Host: self._host,
            ReleasePoint: self._release_point,
            Collected: self._collected,
            Commit: self._commit,
            Flush: lambda op: self._flush(),
        }

    @property
    def is_safe(self) -> bool:
        """Whether the policy promises that no block is handed out too early."""
        return self.config.release not in UNSAFE_POLICIES

    @property
    def has_failed(self) -> bool:
        """Whether something is wrong that the policy does not admit to."""
        return self.is_safe and len(self.findings) > 0

    @property
    def blocks(self) -> BlockManager:
        """The manager of blocks."""
        return self._blocks.blocks

    @property
    def slot_figures(self) -> Figures:
        """What was counted of state slots up to now; nothing where the log has none."""
        return self._slots.figures

    @property
    def figures(self) -> Figures:
        """What was counted of blocks up to now, and all operations."""
        figures = self._blocks.figures
        figures.operations = self._num_operations
        return figures

    def apply(self, operation: Operation, notes: Sequence[Operation] = ()) -> None:
        """Do one operation of the recorded engine.

        Args:
            notes: what the recorded policy did in it or right after it.

        Raises what the block manager raises, and DoesNotFit.
        """
        self._num_operations += 1
        if self._progress.kind == RECORDED:
            first: dict[str, bool] = {}
            for event, passed in seen(notes):
                first.setdefault(event, passed)
            self._run_up_to(event for event, passed in first.items() if passed)
        self._apply[type(operation)](operation)
        if self._progress.kind == RECORDED:
            self._run_up_to(event for event, passed in seen(notes) if passed)
        elif self._progress.kind == RANDOM:
            names = self._stepped.runnable()
            if names and self._rng.random() < 0.5:
                self._stepped.advance(self._rng.choice(names))

    def finish(self) -> None:
        """The log has ended: let the device finish, and what is withheld go."""
        self.device.synchronize()
        for fence in self._eventless:
            fence.passed = True
        self._flush()
        self._count_blocks()

    def stop(self, line: int, operation: Operation, error: Exception) -> None:
        """Note why the log cannot be replayed beyond a line."""
        if isinstance(error, DoesNotFit):
            self.stopped = f"line {line}: {error}"
            return
        self.stopped = f"line {line}: {operation.op}: {type(error).__name__}: {error}"
        self._contradict(self.stopped)

    # -- blocks ----------------------------------------------------------------------------------

    def _pool(self, blocks: Sequence[int]) -> ReplayPool:
        """Whose names these are."""
        return self._slots if self._memory.are_slots(blocks) else self._blocks

    def _allocate(self, op: Allocate) -> None:
        pool, count = self._slots if op.pool else self._blocks, len(op.blocks)
        if not pool.queue.make_room(count):
            self._wait_for_room(pool)
            if count > pool.blocks.num_free:
                takers = listed(f"{owner} ({path})" for owner, path, _ in op.takers)
                raise DoesNotFit(pool.refusal(count, takers))
        places = pool.allocate(count)
        self._stream_waits += pool.queue.fences_before_writing(places)
        self._memory.add(op, places)
        if pool.observer is not None:
            start = 0
            for owner, path, taken in op.takers:
                pool.observer.took(owner, places[start : start + taken], path)
                start += taken

    def _wait_for_room(self, pool: ReplayPool) -> None:
        """What an engine does that cannot go on: wait for every fence."""
        open_steps = set()
        for fence in self._eventless:  # `step`: passes with the end of its step
            end = next((f for f in self._fences.values() if f.step == fence.step), None)
            if end is None:
                open_steps.add(fence.step)
            elif not fence.passed:
                end.wait()
                fence.passed = True
                pool.num_waits += 1
        if open_steps:
            for fence in self._transfers.values():
                if not fence.passed:
                    fence.wait()
                    pool.num_waits += 1
            pool.queue.lift_passed()
        else:
            pool.queue.flush()

    def _pin(self, op: Pin) -> None:
        pool, places = self._pool(op.blocks), self._memory.places(op.blocks)
        pool.pin(places)
        if pool.observer is not None and op.owner:
            pool.observer.forked(op.owner, op.parent, places)

    def _release(self, op: Release) -> None:
        pool, places = self._pool(op.blocks), self._memory.places(op.blocks)
        give_up = partial(pool.queue.give_up, owner=op.owner, path=op.path)
        if op.step is None and op.event:
            event = cast(Any, self._event(op.event))
            give_up(places, self._transfers.setdefault(op.event, Fence(NO_STEP, event)))
        elif op.step is None:
            give_up(places)
        elif op.stream and self.config.fence == "block":
            for place in pool.blocks.in_free_order(places):
                give_up([int(place)], self._fence_behind(op, op.step))
        elif op.stream:
            if self._copy_fence is None or self._copy_fence.step != op.step:
                self._copy_fence = self._fence_behind(op, op.step)
            give_up(places, self._copy_fence)
        else:
            give_up(places, self._fences.get(op.event) or self._eventless_fence(op.step))
        pool.given_up(places)

    def _fence_behind(self, op: Release, step: int) -> Fence:
        """A fence behind all that is queued on a stream, as the engine makes it."""
        if not self._blocks.queue.policy.needs_events:
            return self._eventless_fence(step)
        event = self.device.event()
        self._stream(op.stream).record(event)
        self._copy_events.append((op, event))
        if op.event:
            self._events[op.event] = event
        return Fence(step, event)

    def _eventless_fence(self, step: int) -> Fence:
        self._eventless.append(Fence(step))
        return self._eventless[-1]

    # -- the device ------------------------------------------------------------------------------

    def _submit(self, op: Submit) -> None:
        stream, work, memory = self._stream(op.stream), self._memory.work(op), self._memory
        if self._observer is None:
            stream.submit(work)
        else:
            reads, writes = memory.accesses(op.reads), memory.accesses(op.writes)
            stream.submit(work, reads=reads, writes=writes, label=op.label)

    def _copy(self, op: Copy) -> None:
        memory = self._memory
        self._stream(op.stream).submit(
            memory.copying(op),
            reads=[memory.whole(op.sources), *memory.accesses(op.reads)],
            writes=[memory.whole(op.blocks)],
            label=op.label,
        )

    def _record(self, op: Record) -> None:
        event = self._event(op.event)
        self._stream(op.stream).record(event)
        if op.step is not None:
            self._fences[op.event] = Fence(op.step, cast(Any, event))
            self.num_steps = op.step

    def _synchronize(self, op: Synchronize) -> None:
        if op.event:
            self._event(op.event).synchronize()
        else:
            self.device.synchronize()

    def _recycle(self, op: Recycle) -> None:
        if op.event not in self._events:
            return
        transfer = self._transfers.pop(op.event, None)
        if transfer is not None:
            transfer.wait()  # whoever recycles it knows that it has passed
        self.device.recycle(self._events.pop(op.event))
        self._fences.pop(op.event, None)

    def _host(self, op: Host) -> None:
        if self._observer is not None:
            self.device.on_host(
                op.label,
                reads=self._memory.accesses(op.reads),
                writes=self._memory.accesses(op.writes),
            )

    def _stream(self, name: str) -> Stream:
        """The stream, behind the fences of blocks that are written from now on (`ordered`)."""
        stream = self.device.stream(name)
        while self._num_held[name] < len(self._stream_waits):
            self._stream_waits[self._num_held[name]].hold(stream)
            self._num_held[name] += 1
        return stream

    def _event(self, name: str) -> Event:
        if name not in self._events:
            self._events[name] = self.device.event()
        return self._events[name]

    def _run_up_to(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._events:
                inner_event(self._events[name]).synchronize()

    # -- moments of a step -----------------------------------------------------------------------

    def _release_point(self, op: ReleasePoint) -> None:
        for pool in self._pools:
            pool.release_point()

    def _flush(self) -> None:
        for pool in self._pools:
            pool.queue.flush()

    def _commit(self, op: Commit) -> None:
        if self._observer is not None:
            for rows in self._memory.accesses(op.rows):
                self._observer.committed(rows)

    def _collected(self, op: Collected) -> None:
        for fence in (*self._fences.values(), *self._stream_waits):
            fence.passed = fence.passed or fence.step <= op.step
        if all(fence.passed for fence in self._stream_waits):
            self._stream_waits.clear()
            self._num_held.clear()
        for pool in self._pools:
            pool.queue.collected(op.step)
        self._eventless = [fence for fence in self._eventless if fence.step > op.step]
        while self._copy_events and (self._copy_events[0][0].step or 0) <= op.step:
            release, event = self._copy_events.pop(0)
            self._events.pop(release.event, None)
            self.device.recycle(event)
        self._stepped.log.clear()
        self._count_blocks()

    def _count_blocks(self) -> None:
        if self._counts_blocks:
            for pool in self._pools:
                pool.check()

    def _contradict(self, message: str) -> None:
        self.findings.add("conservation", self.num_steps, message)


def replay_all(operations: Iterable[tuple[int, Operation]], replays: Sequence[Replay]) -> None:
    """Take every replay through the log, side by side; one that stops leaves the others alone."""
    running = list(replays)
    for line, operation, notes in with_notes(operations):
        for replay in tuple(running):
            try:
                replay.apply(operation, notes)
            # Everything: a block manager of anybody may raise anything, and the others go on.
            except Exception as error:
                replay.stop(line, operation, error)
                running.remove(replay)
    for replay in running:
        replay.finish()
