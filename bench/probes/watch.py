"""A device that takes notes: what ran on which stream and when, what was uploaded, who waited.

It wraps any device at the seam the engine uses, so the engine runs as always. Around each operation
and each wait of a stream stand two timing events; they are read after the run, when nobody waits
for anything. Host and device times are brought onto one clock by an anchor before and one after.

Knows nothing of requests or blocks. Invariant: what it wraps sees the same operations in the same
order; the notes of a step are complete once its result was collected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from deepinfer.device import Device, Event, Stream
from deepinfer.device.base import ClockAnchor
from deepinfer.device.wrapper import DeviceWrapper, EventWrapper, StreamWrapper
from deepinfer.observer import Access

WAIT = "wait"
Annotate = Callable[[str], AbstractContextManager[Any]]  # a named range for another tool


def no_annotation(name: str) -> AbstractContextManager[Any]:
    """A range nobody sees."""
    return nullcontext()


class Span(NamedTuple):
    """A stretch of time by the host's clock, in nanoseconds."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Upload:
    """One copy to the device: how long the call took, and whose time that was.

    Attributes:
        by_device: whether the stream's own thread made the call; then its time is the operation's.
    """

    span: Span
    num_bytes: int
    by_device: bool


@dataclass(slots=True, eq=False)
class Operation:
    """Something a stream did: an operation, or a wait (label `WAIT`).

    Attributes:
        start, end: timing events right before and behind it.
        parts: name and timing event of each part the operation told of.
    """

    stream: str
    label: str
    start: Event
    end: Event
    parts: list[tuple[str, Event]] = field(default_factory=list)
    uploads: list[Upload] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Notes:
    """What happened since the last notes were taken."""

    operations: list[Operation]
    host_waits: list[Span]


class WatchedEvent(EventWrapper):
    """An event whose host waits are noted."""

    __slots__ = ("_waits",)

    def __init__(self, inner: Event, waits: list[Span]) -> None:
        super().__init__(inner)
        self._waits = waits

    def synchronize(self, timeout_s: float | None = None) -> None:
        """As the inner event's; notes how long it took."""
        start_ns = time.perf_counter_ns()
        super().synchronize(timeout_s)
        self._waits.append(Span(WAIT, start_ns, time.perf_counter_ns()))


class _WatchedStream(StreamWrapper):
    """A stream with a timing event on either side of all it is given."""

    def __init__(self, inner: Stream, device: WatchedDevice) -> None:
        super().__init__(inner)
        self._device = device

    def submit(
        self,
        fn: Callable[[], None],
        *,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        cost: float | None = None,
        label: str = "",
    ) -> None:
        operation = self._device.note(self.name, label)

        def watched() -> None:
            with self._device.inside(operation):
                fn()

        self.inner.record(operation.start)
        with self._device.annotate(f"{self.name}: {label}"):
            super().submit(watched, reads=reads, writes=writes, cost=cost, label=label)
        self.inner.record(operation.end)

    def wait(self, event: Event) -> None:
        operation = self._device.note(self.name, WAIT)
        self.inner.record(operation.start)
        super().wait(event)
        self.inner.record(operation.end)


class _Inside:
    """While entered, the thread's uploads and parts belong to `operation`."""

    def __init__(self, thread: threading.local, operation: Operation) -> None:
        self._thread = thread
        self._operation = operation

    def __enter__(self) -> None:
        self._thread.operation = self._operation

    def __exit__(self, *exc: object) -> None:
        self._thread.operation = None


class WatchedDevice(DeviceWrapper):
    """`inner`, watched from now on.

    The first anchor is set now, the second by `stop`; only then does `place` know when anything on
    the device was. Each submit stands in a range `annotate(stream and label)`.
    """

    def __init__(self, inner: Device, annotate: Annotate = no_annotation) -> None:
        super().__init__(inner)
        self.annotate = annotate
        self._operations: list[Operation] = []
        self._host_waits: list[Span] = []
        self._thread = threading.local()
        self._host = threading.get_ident()
        self._first = inner.anchor()
        self._last: ClockAnchor | None = None
        self._device_ns = 0  # between the anchors, by the device's clock

    # -- notes -----------------------------------------------------------------------------------

    def take_notes(self) -> Notes:
        """What was noted since the last call."""
        notes = Notes(self._operations[:], self._host_waits[:])
        self._operations.clear()
        self._host_waits.clear()
        return notes

    def stop(self) -> None:
        """Set the second anchor: nothing watched comes after it."""
        self._last = self.inner.anchor()
        # Whole nanoseconds: what the way through milliseconds adds is not drift.
        self._device_ns = round(self._last.event.elapsed_ms(self._first.event) * 1e6)

    @property
    def clock_error_ns(self) -> int:
        """How far a device time may be off against the host's, either way."""
        assert self._last is not None, "stop() comes first"
        return max(self._first.error_ns, self._last.error_ns)

    @property
    def drift_ns(self) -> int:
        """How far the two clocks moved apart between the anchors; `place` spreads it evenly."""
        assert self._last is not None, "stop() comes first"
        return self._device_ns - (self._last.host_ns - self._first.host_ns)

    def place(self, operation: Operation) -> list[Span]:
        """The operation's parts by the host's clock, in order; one span if it told of none.

        The first part has the operation's label. Gives the events back: call it once.
        """
        assert self._last is not None, "stop() comes first"
        names = [operation.label, *(name for name, _ in operation.parts)]
        events = [operation.start, *(event for _, event in operation.parts), operation.end]
        times = [self._host_ns(event) for event in events]
        for event in events:
            self.inner.recycle(event)
        return [Span(*part) for part in zip(names, times[:-1], times[1:], strict=True)]

    def _host_ns(self, event: Event) -> int:
        assert self._last is not None
        device_ns = event.elapsed_ms(self._first.event) * 1e6
        stretch = (self._last.host_ns - self._first.host_ns) / self._device_ns
        return self._first.host_ns + round(device_ns * stretch)

    def note(self, stream: str, label: str) -> Operation:
        """A new operation, with its events; whoever queues it records them."""
        start, end = self.inner.event(timing=True), self.inner.event(timing=True)
        operation = Operation(stream, label, start, end)
        self._operations.append(operation)
        return operation

    def inside(self, operation: Operation) -> _Inside:
        """A context around the operation's work, on the thread that does it."""
        return _Inside(self._thread, operation)

    # -- what the engine calls -------------------------------------------------------------------

    def wrap_stream(self, stream: Stream) -> Stream:
        """The inner device's stream, watched."""
        return _WatchedStream(stream, self)

    def event(self, *, timing: bool = False) -> Event:
        """The inner device's event, watched."""
        return WatchedEvent(self.inner.event(timing=timing), self._host_waits)

    def upload(self, array: np.ndarray) -> Any:
        """As the inner device's; noted if an operation does it."""
        operation: Operation | None = getattr(self._thread, "operation", None)
        if operation is None:
            return self.inner.upload(array)
        start_ns = time.perf_counter_ns()
        tensor = self.inner.upload(array)
        span = Span("upload", start_ns, time.perf_counter_ns())
        by_device = threading.get_ident() != self._host
        operation.uploads.append(Upload(span, array.nbytes, by_device))
        return tensor

    def part(self, name: str) -> None:
        """Stamp the point where the operation's part `name` begins."""
        operation: Operation | None = getattr(self._thread, "operation", None)
        if operation is not None:
            event = self.inner.event(timing=True)
            self.inner.stamp(event)
            operation.parts.append((name, event))
