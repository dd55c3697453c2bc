"""What synchronisation costs: each event call, on 1 to 8 host threads, per step and per block.

Knows the device seam and the release queue as the engine uses them. Invariant: every figure is
wall time of the host with the harness's own cost taken off; the device is idle unless the row's
name says `pending` or `waiting`, and a pending event is proved to have been pending to the last
call.

A host thread has a device of its own (one host thread drives a device). On CUDA that is a stream
and an event pool per thread on the one context of the process, so threads meet in the driver; on
the CPU devices they share nothing and meet only in Python's interpreter lock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from bench.probes.harness import EMPTY, Call, Contest, Cost, gc_off
from bench.stats import median, percentile
from deepinfer.block_manager import BlockIds, BlockManager
from deepinfer.device import DEVICES, Device, Event, open_device
from deepinfer.device.busy import busy_operation
from deepinfer.errors import OwnershipError, UserError
from deepinfer.names import FENCES
from deepinfer.release import Fence, ReleaseQueue

NUM_THREADS = (2, 4, 8)
NUM_BLOCKS = (1, 10, 100, 1000)
FENCE_POLICIES = ("polled", "deferred")
PENDING_S = 0.03  # how long an event is kept pending
WAIT_S = 0.0005  # device time of what `synchronize_waiting` waits for
LONG_WAIT_S = 0.05  # and of what the CPU time of a wait is measured with
BLOCKS_BELOW, SPINS_ABOVE = 20.0, 80.0  # % of the wait that is CPU time

# Idle: nothing is queued, `event`, `timed`, `start` and `end` have passed. Names are those of
# `_names`. No event is recycled before `reuse` makes the first one, so `device.event()` is new.
CALLS: dict[str, Call] = {
    "record": Call("stream.record(event)"),
    "record_timing": Call("stream.record(timed)"),
    "query_done": Call("event.query()"),
    "synchronize_done": Call("event.synchronize()"),
    "stream_wait_done": Call("other.wait(event)"),
    "elapsed": Call("end.elapsed_ms(start)"),
    "create": Call("new = device.event()", before="new = None"),
    "create_and_record": Call("new = device.event()\nstream.record(new)", before="new = None"),
    "destroy": Call("new = None", before="new = device.event()\nstream.record(new)"),
    "reuse": Call("device.recycle(device.event())"),
}
PENDING_CALLS: dict[str, Call] = {
    "query_pending": Call("event.query()"),
    "stream_wait_pending": Call("other.wait(event)"),
}
# What the fence of one step costs the engine without the blocks: take, record, look, give back.
STEP = Call("new = device.event()\nstream.record(new)\nnew.query()\ndevice.recycle(new)")
WAITING = Call(
    "stream.record(start)\nstream.submit(busy)\nstream.record(end)\nend.synchronize()",
    after="less(end.elapsed_ms(start) * 1e6)",
)
THREADED_CALLS = ("record", "record_timing", "query_done", "reuse")


@dataclass(frozen=True, slots=True)
class Wait:
    """One way in which a device's host waits: `suffix` of the rows, options, `blocks` or `spins`.

    `promise` is empty where the host itself runs what it waits for.
    """

    suffix: str
    options: dict[str, Any]
    promise: str


WAITS: dict[str, tuple[Wait, ...]] = {
    "cpu": (Wait("", {}, "blocks"),),
    "cpu-stepped": (Wait("", {}, ""),),
    "cuda": (
        Wait("_spinning", {"blocking_wait": False}, "spins"),
        Wait("_blocking", {"blocking_wait": True}, "blocks"),
    ),
}
NOT_A_WAIT = "the host itself runs the operation it waits for"
NOT_PENDING = f"the event passed before the last call, {PENDING_S * 1e3:g} ms after it was recorded"


@dataclass(frozen=True, slots=True)
class EventRow:
    """One figure, in `unit`: `us/call`, `us/step` or `% of wall`.

    Attributes:
        device, name: what was measured where.
        num_threads: host threads that made the call at the same time.
        num_blocks: given up in one step; None where no block is.
        value, p99, mean: median and others of the calls, the harness taken off (`harness.Cost`);
            all None where the profile's `undefined` says why.
        harness: what was taken off the value; None where nothing had to be.
        num_calls: behind these figures.
        verdict: of a wait: whether it blocks or spins, and whether it should.
    """

    device: str
    name: str
    unit: str
    num_threads: int = 1
    num_blocks: int | None = None
    value: float | None = None
    p99: float | None = None
    mean: float | None = None
    harness: float | None = None
    num_calls: int = 0
    verdict: str = ""

    @property
    def key(self) -> str:
        """The row in words, unique in a profile."""
        threads = f" on {self.num_threads} threads" if self.num_threads > 1 else ""
        blocks = "" if self.num_blocks is None else f" of {self.num_blocks} blocks"
        return f"{self.device} {self.name}{blocks}{threads}"


@dataclass(frozen=True, slots=True)
class EventProfile:
    """All figures of one run.

    Attributes:
        undefined: key of a row without value, or name of a device left out -> why.
        num_rounds: measured rounds of each row on one thread.
    """

    rows: tuple[EventRow, ...]
    undefined: dict[str, str]
    num_rounds: int


def profile_events(
    devices: Sequence[str] | None = None,
    *,
    quick: bool = False,
    on_probe: Callable[[str], None] = lambda name: None,
) -> EventProfile:
    """Measure every row on each of `devices`; by default on all that this machine has.

    Takes below a minute, with `quick` seconds for rougher figures. `on_probe` is called with the
    name of each row before it is measured. Raises UserError for a device that is named and missing.
    """
    num_rounds, share = (5, 0.2) if quick else (20, 1.0)
    undefined: dict[str, str] = {}
    rows: list[EventRow] = []
    for name in dict.fromkeys(devices or DEVICES):
        try:
            open_device(name).close()
        except UserError as error:
            if devices:
                raise
            undefined[name] = f"not measured: {error}"
            continue
        with gc_off():
            for row, reason in _Prober(name, num_rounds, share, on_probe).rows():
                rows.append(row)
                if reason:
                    undefined[row.key] = reason
    return EventProfile(tuple(rows), undefined, num_rounds)


Measured = tuple[EventRow, str]  # a row, and why it has no value


@dataclass(frozen=True, slots=True)
class _Prober:
    """Measures the rows of one device; each row opens devices of its own and closes them."""

    device_name: str
    num_rounds: int
    share: float  # of a row's calls
    on_probe: Callable[[str], None]

    def rows(self) -> Iterator[Measured]:
        """Every row, in the order of the table."""
        for name, call in CALLS.items():
            yield self._calls(name, call)
        for name, call in PENDING_CALLS.items():
            yield self._pending(name, call)
        yield self._calls("step_fence", STEP, unit="us/step")
        for wait in WAITS[self.device_name]:
            yield self._waiting(wait)
            yield self._cpu_share(wait)
        for name in THREADED_CALLS:
            for num_threads in NUM_THREADS:
                yield self._calls(name, CALLS[name], num_threads=num_threads)
        for policy in FENCE_POLICIES:
            for num_blocks in NUM_BLOCKS:
                for fence in FENCES:
                    yield self._given_up(policy, fence, num_blocks)

    def _calls(
        self, name: str, call: Call, *, unit: str = "us/call", num_threads: int = 1
    ) -> Measured:
        """A call on idle devices, one for each thread."""
        row = self._announce(EventRow(self.device_name, name, unit, num_threads))
        with ExitStack() as stack:
            devices = [self._open(stack) for _ in range(num_threads)]
            contest = Contest(
                call,
                [_names(device) for device in devices],
                settle=lambda: _synchronize(devices),
            )
            if num_threads == 1:
                return _filled(row, contest.measure(self.num_rounds, self._num(250)))
            # Long enough for many turns of each thread (`harness.SWITCH_INTERVAL_S`).
            return _filled(row, contest.measure(max(2, self.num_rounds // 5), self._num(20_000)))

    def _pending(self, name: str, call: Call) -> Measured:
        """A call on an event that has not passed, behind a long operation of each loop's own."""
        row = self._announce(EventRow(self.device_name, name, "us/call"))
        with ExitStack() as stack:
            device = self._open(stack)
            names = _names(device)
            busy = busy_operation(device, "compute")(PENDING_S)
            was_pending = []

            def occupy() -> None:
                device.stream("compute").submit(busy)
                device.stream("compute").record(names["event"])

            def settle() -> None:
                was_pending.append(not names["event"].query())
                device.synchronize()
                occupy()

            occupy()
            cost = Contest(call, [names], settle).measure(self.num_rounds, self._num(250))
            return _filled(row, cost) if all(was_pending) else (row, NOT_PENDING)

    def _waiting(self, wait: Wait) -> Measured:
        """From submitting a short operation to the end of the wait, less its time on the device."""
        name = f"synchronize_waiting{wait.suffix}"
        row = self._announce(EventRow(self.device_name, name, "us/call"))
        with ExitStack() as stack:
            device = self._open(stack, **wait.options)
            device_ns: list[float] = []
            names = {**_names(device), "less": device_ns.append}
            names["busy"] = busy_operation(device, "compute")(WAIT_S)
            contest = Contest(WAITING, [names], device.synchronize, correct=device_ns)
            return _filled(row, contest.measure(self.num_rounds, self._num(50)))

    def _cpu_share(self, wait: Wait) -> Measured:
        """CPU time of the whole process during a long wait, as a share of its wall time."""
        name = f"wait_cpu_share{wait.suffix}"
        row = self._announce(EventRow(self.device_name, name, "% of wall"))
        if not wait.promise:
            return row, NOT_A_WAIT
        with ExitStack() as stack:
            device = self._open(stack, **wait.options)
            stream, event = device.stream("compute"), device.event()
            busy = busy_operation(device, "compute")(LONG_WAIT_S)
            shares = []
            for _ in range(max(3, self._num(10))):
                stream.submit(busy)
                stream.record(event)
                wall_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
                event.synchronize()
                cpu_ns = time.process_time_ns() - cpu_ns
                shares.append(100 * cpu_ns / (time.perf_counter_ns() - wall_ns))
        measured = replace(
            row,
            value=median(shares),
            p99=percentile(shares, 99),
            mean=statistics.fmean(shares),
            num_calls=len(shares),
            verdict=wait_verdict(shares, wait.promise),
        )
        return measured, ""

    def _given_up(self, policy: str, fence: str, num_blocks: int) -> Measured:
        """A step gives up so many blocks behind events, and gets them back; the device is done."""
        name = f"{policy}_event_per_{fence}"
        row = self._announce(EventRow(self.device_name, name, "us/step", num_blocks=num_blocks))
        with ExitStack() as stack:
            device = self._open(stack)
            pool = BlockManager(num_blocks + 1)
            give_up = step_that_gives_up(device, pool, policy, fence)
            allocate = "table = pool.allocate(num_blocks)"
            contest = Contest(
                Call("give_up(table)", before=allocate),
                [{"pool": pool, "num_blocks": num_blocks, "give_up": give_up}],
                device.synchronize,
                empty=Call(EMPTY, before=allocate, after="pool.release(table)"),
            )
            cost = contest.measure(self.num_rounds, max(5, self._num(250) // num_blocks))
            pool.check_integrity()
            if pool.num_free != num_blocks:
                raise OwnershipError(f"{num_blocks - pool.num_free} blocks did not come back")
            return _filled(row, cost)

    def _announce(self, row: EventRow) -> EventRow:
        self.on_probe(row.key)
        return row

    def _num(self, num_calls: int) -> int:
        return max(1, int(num_calls * self.share))

    def _open(self, stack: ExitStack, **options: Any) -> Device:
        return stack.enter_context(closing(open_device(self.device_name, **options)))


def _names(device: Device) -> dict[str, Any]:
    """What the statements speak of: events that have passed, streams with nothing queued."""
    names: dict[str, Any] = {
        "device": device,
        "stream": device.stream("compute"),
        "other": device.stream("copy"),
        "event": device.event(),
        **{name: device.event(timing=True) for name in ("timed", "start", "end")},
    }
    for name in ("event", "timed", "start", "end"):
        names["stream"].record(names[name])
    device.synchronize()
    return names


def _synchronize(devices: Sequence[Device]) -> None:
    for device in devices:
        device.synchronize()


def _filled(row: EventRow, cost: Cost) -> Measured:
    filled = replace(
        row,
        value=cost.median_us,
        p99=cost.p99_us,
        mean=cost.mean_us,
        harness=cost.harness_us,
        num_calls=cost.num_calls,
    )
    return filled, ""


def step_that_gives_up(
    device: Device, pool: BlockManager, policy: str, fence: str
) -> Callable[[BlockIds], None]:
    """A function that gives up one table as a step of the engine does, and collects the step.

    `fence` is `step` or `block`: one event for the whole table, or one for each of its blocks.
    """
    queue = ReleaseQueue(pool, policy)
    stream = device.stream("compute")
    steps = count(1)

    def give_up(table: BlockIds) -> None:
        step = next(steps)
        events: list[Event] = []

        def new_fence() -> Fence:
            event = device.event()
            stream.record(event)
            events.append(event)
            return Fence(step, event)

        if fence == "step":
            queue.give_up(table, new_fence())
        else:
            for block_id in pool.in_free_order(table):
                queue.give_up([int(block_id)], new_fence())
        queue.release_point()
        queue.collected(step)
        for event in events:
            device.recycle(event)

    return give_up


def wait_verdict(shares: Sequence[float], promise: str) -> str:
    """Whether waits with these shares of CPU time (%) block or spin, and whether they should."""
    share = median(shares)
    assert share is not None, "at least one wait was measured"
    if share < BLOCKS_BELOW:
        found = "blocks"
    elif share > SPINS_ABOVE:
        found = "spins"
    else:
        return f"UNCLEAR, should be: {promise}"
    return (
        f"{found}, as it should" if found == promise else f"{found.upper()}, should be: {promise}"
    )
