"""The CUDA device: torch streams and events, and pinned staging buffers for every copy to it.

Job: hand submitted work to `torch.cuda` in stream order. `submit` runs the Python of an operation
at once, on the host, with its stream current; what is queued is the kernels and copies it launches.
Knows nothing of what an operation computes.

Invariant: a pinned buffer is not rewritten while a copy out of it may still be running.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from deepinfer.device.base import (
    COMPUTE,
    ClockAnchor,
    DeviceMemory,
    Event,
    EventPool,
    Failure,
    Readback,
    T,
    run_and_wait,
)
from deepinfer.device.grouped import has_kernel, in_one_kernel, one_by_one
from deepinfer.device.sinkhorn import torch_sinkhorn
from deepinfer.errors import DeviceError, DeviceTimeoutError, UserError
from deepinfer.observer import Access

MIN_STAGING_BYTES = 512
NUM_ANCHORS = 16
SPIN_S = 0.05  # a wait with a time-out looks without a pause for as long, as a plain one spins
PAUSE_S = 2e-4  # and then as often


def size_class(num_bytes: int) -> int:
    """Bytes of the staging buffer for a copy of `num_bytes`: the next power of two, 512 or more."""
    return max(MIN_STAGING_BYTES, 1 << (num_bytes - 1).bit_length())


class StagingPool:
    """Host buffers for copies to the device, each handed out again only after its copy is done.

    A buffer given back waits, with the event recorded right behind its copy, in one queue, oldest
    first; `take` looks at the oldest and stops at the first that has not passed. A copy held up on
    one stream therefore keeps buffers of other streams waiting: that costs new buffers, never a
    rewritten one. The pool keeps what it has made: at most what was in flight at once, per size.
    """

    def __init__(self, *, pin_memory: bool, recycle: Callable[[Event], None]) -> None:
        """`recycle` takes the events that have done their duty; only pinned memory makes a copy
        asynchronous, pageable memory is for tests."""
        self._pin_memory = pin_memory
        self._recycle = recycle
        self._pending: deque[tuple[Event, torch.Tensor]] = deque()
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def take(self, num_bytes: int) -> torch.Tensor:
        """A uint8 buffer [size_class(num_bytes)] that no copy is reading."""
        self._reclaim()
        size = size_class(num_bytes)
        free = self._free[size]
        if free:
            return free.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin_memory)

    def give_back(self, buffer: torch.Tensor, behind_copy: Event) -> None:
        """Keep `buffer` for reuse once `behind_copy`, recorded behind its copy, has passed."""
        self._pending.append((behind_copy, buffer))

    def clear(self) -> None:
        """Let go of all buffers. No copy may be pending."""
        self._pending.clear()
        self._free.clear()

    def _reclaim(self) -> None:
        while self._pending and self._pending[0][0].query():
            event, buffer = self._pending.popleft()
            self._free[buffer.numel()].append(buffer)
            self._recycle(event)


class CudaEvent:
    """A `torch.cuda.Event` that can be made to look unrecorded again. Implements `base.Event`."""

    __slots__ = ("_given_up", "_recorded", "_spin_s", "_torch_event", "pooled", "timing")

    def __init__(
        self, timing: bool, blocking_wait: bool, given_up: list[CudaEvent] | None = None
    ) -> None:
        """`given_up` is where an event on which a wait gave up is noted."""
        self.timing = timing
        self.pooled = False
        self._spin_s = 0.0 if blocking_wait else SPIN_S
        self._given_up = [] if given_up is None else given_up
        self._recorded = False
        # Not torch.Event: its `blocking` does not reach cudaEventBlockingSync.
        self._torch_event = torch.cuda.Event(  # type: ignore[no-untyped-call]  # torch's
            enable_timing=timing, blocking=blocking_wait
        )

    def reset(self) -> None:
        """Forget the recording: `query` says passed until the event is recorded again."""
        self._recorded = False

    def record_on(self, stream: torch.cuda.Stream) -> None:
        """Mark the present end of `stream`."""
        self._torch_event.record(stream)
        self._recorded = True

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let what follows on `stream` wait for this event as recorded now."""
        if self._recorded:
            stream.wait_event(self._torch_event)

    def query(self) -> bool:
        """Whether the stream has passed the recorded point. DeviceError if the device failed."""
        if not self._recorded:
            return True
        try:
            return bool(self._torch_event.query())  # type: ignore[no-untyped-call]  # torch's
        except RuntimeError as cause:
            raise _device_failure(cause) from cause

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block until the stream has passed the point. DeviceError if the device failed.

        With `timeout_s` it looks again and again (CUDA's own wait cannot be ended): first without a
        pause, then every 0.2 ms; DeviceTimeoutError when the time is over.
        """
        if not self._recorded:
            return
        if timeout_s is not None:
            self._poll(timeout_s)
            return
        try:
            self._torch_event.synchronize()
        except RuntimeError as cause:
            raise _device_failure(cause) from cause

    def _poll(self, timeout_s: float) -> None:
        start = time.perf_counter()
        while not self.query():
            waited_s = time.perf_counter() - start
            if waited_s > timeout_s:
                self._given_up.append(self)
                raise DeviceTimeoutError(
                    f"after {timeout_s:g} s work queued on device 'cuda' still runs"
                )
            if waited_s > self._spin_s:
                time.sleep(PAUSE_S)

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds of device time from `since` to this event, to about half a microsecond.

        Raises DeviceError unless both were made with timing, recorded, and have passed.
        """
        start = _cuda_event(since)
        for event in (start, self):
            if not event.timing:
                raise DeviceError("no elapsed time: an event was made without timing=True")
            if not event._recorded:
                raise DeviceError("no elapsed time: an event was never recorded")
            if not event.query():
                raise DeviceError("no elapsed time: the stream has not run up to an event")
        return float(start._torch_event.elapsed_time(self._torch_event))


def _cuda_event(event: Event) -> CudaEvent:
    if not isinstance(event, CudaEvent):
        raise DeviceError(f"{type(event).__name__} belongs to another kind of device")
    return event


def _device_failure(cause: Exception) -> DeviceError:
    """CUDA reports a failed kernel at some later call, so no operation can be named."""
    return DeviceError(
        f"device 'cuda': work queued earlier failed: {type(cause).__name__}: {cause}"
    )


class CudaStream:
    """A `torch.cuda.Stream`. Implements `base.Stream`.

    An operation whose Python raises makes `submit` raise DeviceError at once, and every later call
    on this stream; a kernel that fails shows at a later wait, of any stream.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.failure: Failure | None = None
        self._torch_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's

    def submit(
        self,
        fn: Callable[[], None],
        *,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        cost: float | None = None,
        label: str = "",
    ) -> None:
        """Run `fn` with this stream current, so that its kernels and copies are queued here."""
        self._check()
        try:
            with torch.cuda.stream(self._torch_stream):
                fn()
        except Exception as cause:
            self.failure = Failure.of_operation(label, self.name, cause)
            raise self.failure.error() from cause

    def record(self, event: Event) -> None:
        """Mark this point with `event`."""
        self._check()
        _cuda_event(event).record_on(self._torch_stream)

    def wait(self, event: Event) -> None:
        """Hold what follows until `event`, as recorded now, has passed; the host goes on."""
        self._check()
        _cuda_event(event).hold(self._torch_stream)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure.error()


class PinnedReadback:
    """A pinned host tensor a copy is on its way to. Implements `base.Readback`."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def numpy(self) -> np.ndarray:
        """The tensor as an array over the same memory."""
        return self._tensor.numpy()


class CudaDevice:
    """The current CUDA device. Implements `base.Device`.

    Tensors and streams. torch's allocator gives freed memory to the next tensor made on the stream
    where the old one was made, with no look at other streams. Hence:

    - made and used by operations of one stream (nearly everything): nothing to do;
    - given to `download` on another stream than its own: done here;
    - used by operations of another stream otherwise: keep the tensor until an event behind the last
      use has passed, or call `tensor.record_stream(torch.cuda.current_stream())` in the operation;
    - pools and weights: keep them until `synchronize` or `close`.

    What runs outside `submit` (loading weights, zeroing pools) runs on torch's default stream, for
    which streams made here do not wait: `synchronize` once between set-up and the first submit.

    Args:
        blocking_wait: `Event.synchronize` lets the host thread sleep (cudaEventBlockingSync), a
            few tens of microseconds slower to wake; otherwise it spins on a core.
    """

    name = "cuda"

    def __init__(self, *, blocking_wait: bool = False) -> None:
        if not torch.cuda.is_available():
            raise UserError(
                f"device 'cuda': torch {torch.__version__} finds no CUDA device",
                hint="use 'cpu', or check `nvidia-smi` and install a CUDA build of torch",
            )
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._streams: dict[str, CudaStream] = {}
        self._given_up: list[CudaEvent] = []
        self._events = EventPool(lambda timing: CudaEvent(timing, blocking_wait, self._given_up))
        self._staging = StagingPool(pin_memory=True, recycle=self.recycle)
        self._closed = False

    @property
    def torch_device(self) -> torch.device:
        """The GPU, with its index."""
        return self._device

    def stream(self, name: str) -> CudaStream:
        """The stream of this name; made at the first call. DeviceError once closed."""
        if self._closed:
            raise Failure.of_closing(self.name).error()
        if name not in self._streams:
            self._streams[name] = CudaStream(name, self._device)
        return self._streams[name]

    def event(self, *, timing: bool = False) -> CudaEvent:
        """An event that counts as never recorded, from the pool or new."""
        return self._events.take(timing)

    def recycle(self, event: Event) -> None:
        """Give `event` back to the pool. OwnershipError if it is there already."""
        self._events.give_back(_cuda_event(event))

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """`array` as a new tensor on the GPU, same shape and dtype, copied on the current stream.

        The bytes are in a pinned buffer when this returns; the copy to the GPU is only queued.
        """
        source = torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)
        if array.nbytes == 0:
            return torch.empty(array.shape, dtype=source.dtype, device=self._device)
        buffer = self._staging.take(array.nbytes)
        staged = buffer[: array.nbytes].view(source.dtype).view(array.shape)
        staged.copy_(source)
        tensor = staged.to(self._device, non_blocking=True)
        behind_copy = self.event()
        behind_copy.record_on(torch.cuda.current_stream(self._device))
        self._staging.give_back(buffer, behind_copy)
        return tensor

    def linear(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """`x -> x @ weight.T`, by cuBLAS."""
        return lambda x: F.linear(x, weight)

    def grouped_linear(
        self, weights: torch.Tensor
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Products of groups of rows: in one kernel, if there is one; else the host waits to know
        the groups."""
        if has_kernel(weights):
            return in_one_kernel(weights)
        return one_by_one([self.linear(weight) for weight in weights.unbind()])

    def rms_norm(
        self, weight: torch.Tensor | None, eps: float
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Root mean square norm, by torch's one kernel."""
        return lambda x: F.rms_norm(x, x.shape[-1:], weight, eps)

    def sinkhorn(
        self, size: int, rounds: int, eps: float, dtype: torch.dtype
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Balances small matrices, in torch."""
        return torch_sinkhorn(size, rounds, eps, dtype, self._device)

    def host_buffer(self, num_bytes: int) -> np.ndarray:
        """Pinned memory, which goes back to torch's host allocator with the array."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:
            raise MemoryError(f"{num_bytes} bytes of pinned memory: {error}") from error

    def download(self, tensor: torch.Tensor) -> PinnedReadback:
        """Queue a copy of `tensor` to pinned memory on the current stream.

        torch's host allocator keeps the pinned memory until the copy has ended, even if the result
        is dropped unread.
        """
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        # Free of charge if the tensor was made on this stream.
        tensor.record_stream(torch.cuda.current_stream(self._device))
        return PinnedReadback(host)

    def read(self, readback: Readback) -> np.ndarray:
        """Wait for what the current stream has queued, and read what it downloaded."""
        torch.cuda.current_stream(self._device).synchronize()
        return readback.numpy()

    def run(self, fn: Callable[[], T], *, label: str = "") -> T:
        """Run `fn` on stream `COMPUTE` and wait for it; raises what it raises."""
        return run_and_wait(self, fn, label)

    def part(self, name: str) -> None:
        """Nothing; see `base.Device.part`."""

    def stamp(self, event: Event) -> None:
        """Record `event` on the current stream, behind the kernels launched so far."""
        _cuda_event(event).record_on(torch.cuda.current_stream(self._device))

    def on_host(
        self, label: str, *, reads: Sequence[Access] = (), writes: Sequence[Access] = ()
    ) -> None:
        """Nothing; see `base.Device.on_host`."""

    def anchor(self) -> ClockAnchor:
        """The tightest of a few records on an idle stream, each between two looks at the clock."""
        self.synchronize()
        stream = self.stream(COMPUTE)
        best: ClockAnchor | None = None
        for _ in range(NUM_ANCHORS):
            event = self.event(timing=True)
            before_ns = time.perf_counter_ns()
            stream.record(event)
            self.synchronize()
            half_ns = (time.perf_counter_ns() - before_ns) // 2
            anchor = ClockAnchor(event, before_ns + half_ns, half_ns)
            if best is None or half_ns < best.error_ns:
                best, anchor = anchor, best or anchor
            if anchor is not best:
                self.recycle(anchor.event)
        assert best is not None, "at least one was tried"
        return best

    def synchronize(self) -> None:
        """Block the host until the GPU has nothing to do, torch's default stream included.

        Raises DeviceError if a stream or the device has failed. Spins, whatever `blocking_wait`.
        """
        if self._closed:
            raise Failure.of_closing(self.name).error()
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as cause:
            raise _device_failure(cause) from cause
        for stream in self._streams.values():
            if stream.failure is not None:
                raise stream.failure.error()

    def memory(self) -> DeviceMemory:
        """Bytes of the GPU (all processes) and of torch's allocator (this process)."""
        free, total = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(
            total_bytes=total,
            free_bytes=free,
            reserved_bytes=torch.cuda.memory_reserved(self._device),
            allocated_bytes=torch.cuda.memory_allocated(self._device),
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self._device),
        )

    def close(self) -> None:
        """Finish queued work, refuse any more, let go of the staging buffers. Idempotent.

        Raises nothing for work that failed: a `finally` block must not hide the first error.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError, DeviceError):
            if all(event.query() for event in self._given_up):
                torch.cuda.synchronize(self._device)
                self._staging.clear()  # not under a copy that may still run
        for stream in self._streams.values():
            stream.failure = stream.failure or Failure.of_closing(self.name)
