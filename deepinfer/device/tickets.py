"""Tickets, events and failures: what the CPU devices share, whoever runs their entries.

Job: number what is queued on a stream and say when it has passed. Everything queued on a stream is
an entry with a ticket, 1, 2, 3, ...; an event is the ticket of the last entry before it, and has
passed once the stream has passed that ticket:

    compute   1 op   2 op   | event: ticket 2   3 op
              `- passed = 1: op 2 is running, the event has not passed

Knows neither threads nor what an operation computes. torch is imported only where a tensor is made:
labs that move token ids start without it.

Invariants: a wait names a ticket that existed when `wait` was called, so every dependency points to
something queued earlier and no set of waits forms a cycle; the one cycle left, an operation that
waits for the device it runs on, is refused. A stream passes every entry, even after a failure (it
then skips them), so whoever waits for a ticket wakes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import numpy as np

from deepinfer.device.base import (
    ClockAnchor,
    DeviceMemory,
    Event,
    EventPool,
    Failure,
    Readback,
    T,
    run_and_wait,
)
from deepinfer.errors import DeviceError, DeviceTimeoutError
from deepinfer.observer import Access

if TYPE_CHECKING:
    import torch


class Stamp:
    """An entry that notes the time at which its stream passes it."""

    __slots__ = ("time_ns",)

    def __init__(self) -> None:
        self.time_ns: int | None = None

    def __call__(self) -> None:
        self.time_ns = time.perf_counter_ns()


@dataclass(frozen=True, slots=True)
class Wait:
    """An entry that holds its stream until `stream` has passed `ticket`."""

    stream: TicketStream
    ticket: int


Work = Callable[[], None] | Stamp | Wait
Entry = tuple[Work, str]  # the work and its label


class TicketEvent:
    """A ticket of a stream and, with timing, a stamp. Implements `base.Event`.

    An event behind a failed operation counts as passed: what was queued before it will not run any
    more. `synchronize` raises DeviceError then, and whenever its stream has failed.
    """

    __slots__ = ("pooled", "stamp", "stream", "ticket", "timing")

    def __init__(self, timing: bool) -> None:
        self.timing = timing
        self.pooled = False
        self.reset()

    def reset(self) -> None:
        """Forget the recording."""
        self.stream: TicketStream | None = None
        self.ticket = 0
        self.stamp: Stamp | None = None

    def query(self) -> bool:
        """Whether the stream has passed the recorded point; never blocks, never runs anything."""
        stream = self.stream
        return stream is None or stream.passed >= self.ticket

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block until the stream has passed the point. Raises DeviceError if the stream failed.

        Raises DeviceTimeoutError, naming the operation that runs, after `timeout_s` seconds.
        """
        if self.stream is not None:
            self.stream.wait_on_host(self.ticket, timeout_s)
            self.stream.check()

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds from `since` to this event, taken as the streams passed them.

        Raises DeviceError unless both were made with timing, recorded, and run up to.
        """
        return (self._time_ns() - own_event(since)._time_ns()) / 1e6

    def _time_ns(self) -> int:
        if self.stamp is None:
            why = "was never recorded" if self.timing else "was made without timing=True"
            raise DeviceError(f"no elapsed time: an event {why}")
        if self.stamp.time_ns is None:
            raise DeviceError("no elapsed time: the stream has not run up to an event")
        return self.stamp.time_ns


def own_event(event: Event) -> TicketEvent:
    """`event`, if a CPU device made it; else DeviceError."""
    if not isinstance(event, TicketEvent):
        raise DeviceError(f"{type(event).__name__} belongs to another kind of device")
    return event


class TicketStream(ABC):
    """The host's side of a stream; subclasses say who runs the entries. Implements `base.Stream`.

    The host alone writes `queued`; whoever runs the entries alone writes `passed` and `failure`
    (closing the device, when nothing runs any more, is the exception).

    Attributes:
        queued: ticket of the newest entry.
        passed: ticket of the last entry run or skipped.
        failure: why no more entries run; None while all is well.
        failed_at: ticket at which `failure` struck.
        given_up: the last ticket that a wait of the host gave up on; 0 if none did.
        current: label of the operation, or the wait, that the stream is at while it is not empty.
        runs_on_host: whether the entries run on the thread that drives the device.
    """

    runs_on_host: ClassVar[bool]

    def __init__(self, name: str, put: Callable[[Entry], None]) -> None:
        self.name = name
        self.queued = 0
        self.passed = 0
        self.failure: Failure | None = None
        self.failed_at = 0
        self.given_up = 0
        self.current: str | Wait = ""
        self._put = put

    def submit(
        self,
        fn: Callable[[], None],
        *,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        cost: float | None = None,
        label: str = "",
    ) -> None:
        """Queue `fn`. Raises DeviceError if an earlier operation failed or the device is closed."""
        if self.failure is not None:
            raise self.failure.error()
        self.queued += 1
        self._put((fn, label))

    def record(self, event: Event) -> None:
        """Mark this point with `event`; raises as `submit` does."""
        event = own_event(event)
        self.check()
        if event.timing:
            # A new stamp each time: one still queued for an older recording must not overwrite it.
            event.stamp = Stamp()
            self.queued += 1
            self._put((event.stamp, ""))
        event.stream = self
        event.ticket = self.queued

    def wait(self, event: Event) -> None:
        """Hold what follows until `event`, as recorded now, has passed; raises as `submit` does.

        If what the event stands behind fails, this stream fails with it.
        """
        event = own_event(event)
        self.check()
        other, ticket = event.stream, event.ticket
        if other is None or other is self or (other.passed >= ticket and other.failure is None):
            return
        self.queued += 1
        self._put((Wait(other, ticket), ""))

    def check(self) -> None:
        """Raise DeviceError if the stream takes no more work."""
        if self.failure is not None:
            raise self.failure.error()

    @property
    def is_stuck(self) -> bool:
        """Whether what a wait gave up on is still not done."""
        return self.passed < self.given_up

    def wait_on_host(self, ticket: int, timeout_s: float | None = None) -> None:
        """Block the host until `ticket` has passed; DeviceTimeoutError after `timeout_s`."""
        if self.passed < ticket:
            if self.inside_operation():
                raise DeviceError(
                    f"deadlock: an operation waits for stream {self.name!r} of its own device"
                )
            if not self.reach(ticket, timeout_s):
                self.given_up = max(self.given_up, ticket)
                raise DeviceTimeoutError(f"after {timeout_s:g} s {self.doing()}")

    def doing(self) -> str:
        """What a stream that is not empty is at, in words."""
        current = self.current
        if isinstance(current, Wait):
            return f"stream {self.name!r} still waits for another: {current.stream.doing()}"
        what = f"operation {current!r}" if current else "an operation without a label"
        return f"{what} on stream {self.name!r} still runs"

    def pass_entry(self, work: Work, label: str) -> None:
        """Run one entry, or skip it after a failure. What a wait waits for has passed already."""
        try:
            if self.failure is not None:
                return
            if isinstance(work, Wait):
                other = work.stream
                if other.failure is not None and other.failed_at <= work.ticket:
                    self._fail(other.failure)
            else:
                work()
        # Everything: a worker that died would leave its waiters asleep for ever.
        except BaseException as cause:
            self._fail(Failure.of_operation(label, self.name, cause))
            if self.runs_on_host and isinstance(cause, KeyboardInterrupt):
                raise  # Ctrl-C is for the program, not only for the operation it struck
        finally:
            self.passed += 1

    def _fail(self, failure: Failure) -> None:
        # Other threads read `failed_at` once they see `failure`, so it comes first.
        self.failed_at = self.passed + 1
        self.failure = failure

    @abstractmethod
    def reach(self, ticket: int, timeout_s: float | None = None) -> bool:
        """Return once this stream has passed `ticket`, or after `timeout_s`: whether it has."""

    @abstractmethod
    def inside_operation(self) -> bool:
        """Whether the caller is an operation of this device."""


class HostReadback:
    """A tensor that is on the host already. Implements `base.Readback`."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def numpy(self) -> np.ndarray:
        """The tensor as an array over the same memory."""
        return self._tensor.numpy()


S = TypeVar("S", bound=TicketStream)


class TicketDevice(ABC, Generic[S]):
    """Streams by name, pooled events, and host memory as device memory. Implements `base.Device`.

    Submitted work chooses its own grad mode: torch keeps it per thread, so an `inference_mode`
    around the host's loop does not reach a worker.
    """

    name: str

    def __init__(self) -> None:
        self._streams: dict[str, S] = {}
        self._events: EventPool[TicketEvent] = EventPool(TicketEvent)
        self._closed = False

    @property
    def torch_device(self) -> torch.device:
        """The CPU."""
        import torch

        return torch.device("cpu")

    def stream(self, name: str) -> S:
        """The stream of this name; made at the first call. DeviceError once closed."""
        if self._closed:
            raise Failure.of_closing(self.name).error()
        if name not in self._streams:
            self._streams[name] = self._new_stream(name)
        return self._streams[name]

    def event(self, *, timing: bool = False) -> TicketEvent:
        """An event that counts as never recorded, from the pool or new."""
        return self._events.take(timing)

    def recycle(self, event: Event) -> None:
        """Give `event` back to the pool. OwnershipError if it is there already."""
        self._events.give_back(own_event(event))

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """`array` as a tensor over the same memory; shape and dtype are the array's.

        No copy is right here: device memory is host memory, and the host does not write the array
        afterwards. For the same reason an operation must not write an uploaded tensor in place.
        """
        import torch

        return torch.from_numpy(array)

    def linear(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """`x -> x @ weight.T`, by oneDNN with a packed weight where torch has it."""
        from deepinfer.device.cpu_linear import cpu_linear

        return cpu_linear(weight)

    def grouped_linear(
        self, weights: torch.Tensor
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Products of groups of rows, one by one."""
        from deepinfer.device.grouped import one_by_one

        return one_by_one([self.linear(weight) for weight in weights.unbind()])

    def rms_norm(
        self, weight: torch.Tensor | None, eps: float
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Root mean square norm, in fewer kernels than torch's own."""
        from deepinfer.device.cpu_norm import cpu_rms_norm

        return cpu_rms_norm(weight, eps)

    def sinkhorn(
        self, size: int, rounds: int, eps: float, dtype: torch.dtype
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Balances small matrices, in numpy where that is faster."""
        from deepinfer.device.sinkhorn import cpu_sinkhorn

        return cpu_sinkhorn(size, rounds, eps, dtype)

    def host_buffer(self, num_bytes: int) -> np.ndarray:
        """Ordinary memory."""
        return np.empty(num_bytes, np.uint8)

    def download(self, tensor: torch.Tensor) -> HostReadback:
        """`tensor` itself, which must not be written again before it is read."""
        return HostReadback(tensor)

    def read(self, readback: Readback) -> np.ndarray:
        """What an operation of the CPU has downloaded is there."""
        return readback.numpy()

    def part(self, name: str) -> None:
        """Nothing; see `base.Device.part`."""

    def stamp(self, event: Event) -> None:
        """Let `event` pass now: an operation of the CPU is where it is."""
        event = own_event(event)
        event.reset()
        event.stamp = Stamp()
        event.stamp()

    def on_host(
        self, label: str, *, reads: Sequence[Access] = (), writes: Sequence[Access] = ()
    ) -> None:
        """Nothing; see `base.Device.on_host`."""

    def anchor(self) -> ClockAnchor:
        """Now: stamps are taken from the host's clock, so nothing is off."""
        self.synchronize()
        event = self.event(timing=True)
        self.stamp(event)
        return ClockAnchor(event, event._time_ns(), error_ns=0)

    def synchronize(self) -> None:
        """Block the host until every stream is empty; then raise DeviceError if one has failed."""
        streams = list(self._streams.values())
        for stream in streams:
            stream.wait_on_host(stream.queued)
        for stream in streams:
            stream.check()

    def run(self, fn: Callable[[], T], *, label: str = "") -> T:
        """Run `fn` on stream `COMPUTE` and wait for it; raises what it raises."""
        return run_and_wait(self, fn, label)

    def memory(self) -> DeviceMemory:
        """Bytes of memory the machine has, and how many of them new work could get."""
        import psutil

        memory = psutil.virtual_memory()
        return DeviceMemory(total_bytes=memory.total, free_bytes=memory.available)

    def close(self) -> None:
        """Finish queued work and refuse any more. Idempotent.

        Raises nothing for work that failed: `close` runs in `finally` blocks, where a second error
        would hide the first. Call `synchronize` before it to be sure.
        """
        if self._closed:
            return
        self._closed = True
        self._finish()
        for stream in self._streams.values():
            stream.failure = stream.failure or Failure.of_closing(self.name)

    @abstractmethod
    def _new_stream(self, name: str) -> S: ...

    @abstractmethod
    def _finish(self) -> None:
        """Run what is queued and let go of threads."""
