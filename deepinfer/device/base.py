"""The device seam: streams, events and memory, the same to the engine on every device.

The engine submits work to named streams and orders it with events; it never asks which device it
has. What a stream promises: its operations run in the order submitted. What it does not promise:
any order against another stream, or against the host, except where an event says so.

`reads` and `writes` name what an operation touches (`deepinfer.observer.Access`), `on_host` what
the host does: nothing here looks at them; `deepinfer.device.observed` shows them to whoever
checks. `cost` is the seam for a simulated device.

One host thread drives a device. An operation calls nothing of the device that runs it but
`upload`, `download`, `read`, `part` and `stamp`, and the kernels (`linear`, `grouped_linear`,
`rms_norm`, `sinkhorn`): one that waited for the device would wait for itself.

`Failure`, `EventPool` and `run_and_wait` are the parts every device shares. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from deepinfer.errors import DeviceError, OwnershipError
from deepinfer.observer import Access

COMPUTE = "compute"  # the stream of forward passes; every other one is a side stream
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Device memory in bytes; None where the device cannot say.

    `reserved_bytes` and `allocated_bytes` are the torch caching allocator's.
    """

    total_bytes: int | None
    free_bytes: int | None
    reserved_bytes: int | None = None
    allocated_bytes: int | None = None
    peak_allocated_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """One moment on the device's clock and on the host's.

    Attributes:
        event: a timing event that has passed; the caller recycles it.
        host_ns: when it did, by `time.perf_counter_ns`.
        error_ns: how far off that may be, either way; 0 where device and host share the clock.
    """

    event: Event
    host_ns: int
    error_ns: int


class Event(Protocol):
    """A point in a stream's queue. Reusable: recording again moves it.

    An event that was never recorded counts as passed (as cudaEventQuery does); `elapsed_ms`
    refuses it.
    """

    def query(self) -> bool:
        """Whether the stream has passed the recorded point. Never blocks."""
        ...

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block the host until the stream has passed the point.

        Raises DeviceError if it failed, DeviceTimeoutError if it takes longer than `timeout_s`
        seconds (None: no limit). After a time-out the device can only be closed.
        """
        ...

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds of device time from `since` to this event; both made with timing=True."""
        ...


class Stream(Protocol):
    """A queue of device work, run in order."""

    name: str

    def submit(
        self,
        fn: Callable[[], None],
        *,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        cost: float | None = None,
        label: str = "",
    ) -> None:
        """Queue `fn`; it runs on the device after everything queued on this stream before it."""
        ...

    def record(self, event: Event) -> None:
        """Mark this point of the queue with `event`."""
        ...

    def wait(self, event: Event) -> None:
        """Hold what is queued after this until `event` (as recorded now) has passed."""
        ...


class Readback(Protocol):
    """A device array on its way to the host."""

    def numpy(self) -> np.ndarray:
        """The array; valid only after the event recorded behind the download has passed."""
        ...


class Device(Protocol):
    """Streams, events, host<->device copies and memory figures of one device."""

    name: str

    @property
    def torch_device(self) -> Any:
        """The torch.device tensors of this device live on."""
        ...

    def stream(self, name: str) -> Stream:
        """The stream of this name; made at the first call."""
        ...

    def event(self, *, timing: bool = False) -> Event:
        """An event from the pool, or a new one."""
        ...

    def recycle(self, event: Event) -> None:
        """Give an event back to the pool; the caller must not touch it again."""
        ...

    def upload(self, array: np.ndarray) -> Any:
        """Inside submitted work: `array` as a tensor on the device.

        The host array must not be written afterwards (plans guarantee it). On CUDA the copy goes
        through a pinned staging buffer that is not rewritten while its copy is pending.
        """
        ...

    def linear(self, weight: Any) -> Callable[[Any], Any]:
        """`x -> x @ weight.T` by the fastest kernel the device has for this weight.

        `weight` [out, in] is on the device and may be packed: it must not be written afterwards.
        """
        ...

    def grouped_linear(self, weights: Any) -> Callable[[Any, Any], Any]:
        """`(x, ends) -> ` the products of groups of rows with a weight each, [n, out].

        Rows [ends[g - 1], ends[g]) of x [n, in], n > 0, are group g; `ends` int64 [G] is on the
        device. So are `weights` [G, out, in], which must not be written afterwards.
        """
        ...

    def rms_norm(self, weight: Any, eps: float) -> Callable[[Any], Any]:
        """`x -> x * rsqrt(mean(x^2) + eps) [* weight]` over the last dimension, in new memory.

        `weight` [size] is on the device, or None.
        """
        ...

    def sinkhorn(self, size: int, rounds: int, eps: float, dtype: Any) -> Callable[[Any], Any]:
        """Balances matrices [T, size, size] of `dtype`, float32 or float64; they are not written.

        `eps` is added to all. Each round divides the columns by their sums + `eps`, and all but the
        last then the rows by theirs.
        """
        ...

    def host_buffer(self, num_bytes: int) -> np.ndarray:
        """Host memory, uint8 [num_bytes], that copies to and from the device can be queued for.

        Its content is anything. Raises MemoryError if there is none.
        """
        ...

    def download(self, tensor: Any) -> Readback:
        """Inside submitted work: start copying `tensor` to the host."""
        ...

    def read(self, readback: Readback) -> np.ndarray:
        """Inside submitted work: the array of a download that the same operation began.

        At once on the CPU; on CUDA the host waits for it.
        """
        ...

    def part(self, name: str) -> None:
        """Inside submitted work: what follows is its part `name`.

        Does nothing: like `reads` and `writes` of an operation, it is for whoever watches.
        """
        ...

    def stamp(self, event: Event) -> None:
        """Inside submitted work: `event`, made with timing=True, passes behind what the operation
        has done so far."""
        ...

    def on_host(
        self, label: str, *, reads: Sequence[Access] = (), writes: Sequence[Access] = ()
    ) -> None:
        """What the host itself reads or writes now, of what operations touch too.

        Does nothing: like `reads` and `writes` of an operation, it is for whoever watches.
        """
        ...

    def anchor(self) -> ClockAnchor:
        """Where the two clocks meet; `elapsed_ms` since its event places any other event.

        Waits until the device has nothing to do, so call it before and after what is measured.
        """
        ...

    def synchronize(self) -> None:
        """Block the host until every stream is empty."""
        ...

    def run(self, fn: Callable[[], T], *, label: str = "") -> T:
        """Run `fn` on stream `COMPUTE` and wait: how anything outside a step is computed.

        On the CPU the stream's thread owns the cores (see `deepinfer.device.openmp`). Raises what
        `fn` raises, and the device goes on.
        """
        ...

    def memory(self) -> DeviceMemory:
        """Device memory now."""
        ...

    def close(self) -> None:
        """Finish queued work and let go of threads; the device cannot be used afterwards.

        Work that a wait gave up on (DeviceTimeoutError) is not waited for again.
        """
        ...


def run_and_wait(device: Device, fn: Callable[[], T], label: str) -> T:
    """What `Device.run` does, on any device."""
    results: list[T] = []
    errors: list[Exception] = []

    def operation() -> None:
        try:
            results.append(fn())
        except Exception as error:  # the caller's, and no reason for the stream to fail
            errors.append(error)

    device.stream(COMPUTE).submit(operation, label=label)
    device.synchronize()
    if errors:
        raise errors[0]
    return results[0]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a stream takes no more work; one object travels to every stream that depends on it."""

    message: str
    cause: BaseException | None = None
    kind: type[DeviceError] = DeviceError

    @classmethod
    def of_operation(cls, label: str, stream: str, cause: BaseException) -> Failure:
        """The failure of the operation `label` on `stream`, which raised `cause`."""
        what = f"operation {label!r}" if label else "an operation without a label"
        return cls(f"{what} on stream {stream!r} failed: {type(cause).__name__}: {cause}", cause)

    @classmethod
    def of_closing(cls, device: str) -> Failure:
        """What a stream of a closed device answers."""
        return cls(f"device {device!r} is closed")

    def error(self) -> DeviceError:
        """A new error to raise, chained to the cause (one error object raised twice would mix up
        its tracebacks)."""
        error = self.kind(self.message)
        error.__cause__ = self.cause
        return error


class PooledEvent(Protocol):
    """What `EventPool` needs to know of an event."""

    timing: bool
    pooled: bool

    def reset(self) -> None:
        """Forget the recording: the next user gets an event that was never recorded."""
        ...


E = TypeVar("E", bound=PooledEvent)


class EventPool(Generic[E]):
    """Events for reuse, those with timing apart from those without (they cost differently)."""

    def __init__(self, make: Callable[[bool], E]) -> None:
        """`make(timing)` gives a new event when the pool has none."""
        self._make = make
        self._free: dict[bool, list[E]] = {False: [], True: []}

    def take(self, timing: bool) -> E:
        """An event that counts as never recorded."""
        free = self._free[timing]
        if not free:
            return self._make(timing)
        event = free.pop()
        event.pooled = False
        return event

    def give_back(self, event: E) -> None:
        """Keep `event` for the next `take`. Raises OwnershipError if it is in the pool already."""
        if event.pooled:
            raise OwnershipError("an event was recycled twice: it would get two users")
        event.pooled = True
        event.reset()
        self._free[event.timing].append(event)
