"""The CPU devices: real torch arithmetic, on threads behind the host or step by step when asked.

Job: run submitted operations in order per stream. `ThreadedCpuDevice` has a worker thread per
stream, so the host really runs ahead and events are really waited for. `SteppedCpuDevice` has no
thread: it runs what a wait needs, or any order its caller picks among those that streams and events
allow. Neither knows what an operation computes; `tickets` has what they share.

Invariant: `passed` of a stream moves by one, after the entry has run and before anybody who waits
for it goes on.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from queue import SimpleQueue

from deepinfer.device.base import COMPUTE
from deepinfer.device.openmp import use_one_thread
from deepinfer.device.tickets import Entry, Stamp, TicketDevice, TicketStream, Wait, Work
from deepinfer.errors import DeviceError

# Python hands the interpreter from thread to thread every 5 ms: a stream that needs it between two
# torch calls would lag behind a busy host by that much. With 0.1 ms a round trip to a stream takes
# 0.2 ms instead of 11 ms beside a host that never sleeps.
SWITCH_INTERVAL_S = 1e-4


class _ThreadedStream(TicketStream):
    """A stream whose entries a thread of its own runs.

    Who waits for a ticket adds a locked lock to `_waiters` and locks it again, to sleep; the worker
    unlocks it as it passes the ticket. The order of the steps is what makes this safe: the waiter
    looks at `passed` again after adding the lock, the worker looks at `_waiters` after moving
    `passed`, so at least one of them sees the other. If both do, a lock stays behind on which
    nobody sleeps; the worker, which alone removes locks, drops it after its next entry.
    """

    runs_on_host = False

    def __init__(self, name: str, threads: set[threading.Thread]) -> None:
        self._queue: SimpleQueue[Entry | None] = SimpleQueue()
        super().__init__(name, self._queue.put)
        self._waiters: list[tuple[int, threading.Lock]] = []
        self._threads = threads  # those of the whole device
        self._owns_cores = name == COMPUTE
        self._thread = threading.Thread(target=self._work, name=f"stream-{name}", daemon=True)
        threads.add(self._thread)
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end behind what is queued."""
        self._queue.put(None)

    def reach(self, ticket: int, timeout_s: float | None = None) -> bool:
        """Sleep until this stream has passed `ticket`, at most `timeout_s`; whether it has."""
        if self.passed >= ticket:
            return True
        lock = threading.Lock()
        lock.acquire()
        self._waiters.append((ticket, lock))
        if self.passed >= ticket:
            return True
        return lock.acquire(timeout=-1 if timeout_s is None else timeout_s)

    def inside_operation(self) -> bool:
        """Whether the calling thread is one of the device's."""
        return threading.current_thread() in self._threads

    def _work(self) -> None:
        alone = self._owns_cores
        while True:
            entry = self._queue.get()
            if entry is None:
                return
            if not alone and "torch" in sys.modules:
                use_one_thread()
                alone = True
            work, label = entry
            if isinstance(work, Wait):
                self.current = work
                if self.failure is None:
                    work.stream.reach(work.ticket)
            else:
                self.current = label
            self.pass_entry(work, label)
            # While the thread sleeps in get(), the tensors of its last operation must not live on.
            del entry, work
            if self._waiters:
                self._wake()

    def _wake(self) -> None:
        for waiter in tuple(self._waiters):
            ticket, lock = waiter
            if ticket <= self.passed:
                self._waiters.remove(waiter)
                lock.release()


class _FastSwitching:
    """Keeps `SWITCH_INTERVAL_S` in force while anybody holds it, then restores what was before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_holders = 0
        self._interval_before_s = 0.0

    def hold(self) -> None:
        with self._lock:
            if self._num_holders == 0:
                self._interval_before_s = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH_INTERVAL_S)
            self._num_holders += 1

    def let_go(self) -> None:
        with self._lock:
            self._num_holders -= 1
            if self._num_holders == 0:
                sys.setswitchinterval(self._interval_before_s)


_fast_switching = _FastSwitching()


class ThreadedCpuDevice(TicketDevice[_ThreadedStream]):
    """The embedded default: a worker thread per stream, so the host runs ahead of the device.

    Stream `COMPUTE` has the machine's cores for its arithmetic, every other stream one.

    While one is open, Python switches threads every 0.1 ms (`SWITCH_INTERVAL_S`) in the whole
    process.
    """

    name = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self._threads: set[threading.Thread] = set()
        _fast_switching.hold()

    def _new_stream(self, name: str) -> _ThreadedStream:
        return _ThreadedStream(name, self._threads)

    def _finish(self) -> None:
        try:
            streams = self._streams.values()
            for stream in streams:
                stream.stop()
            # Another may wait for a stuck one, so none is waited for: they end with the process.
            if not any(stream.is_stuck for stream in streams):
                for thread in self._threads:
                    thread.join()
        finally:
            _fast_switching.let_go()


class _SteppedStream(TicketStream):
    """A stream whose entries run when its device is asked to.

    Invariant: the first entry queued is an operation, or a wait whose event has not passed.
    Everything else passes the moment it comes first (`settle`).
    """

    runs_on_host = True

    def __init__(self, name: str, device: SteppedCpuDevice) -> None:
        self._queue: deque[Entry] = deque()
        super().__init__(name, self._append)
        self._device = device

    @property
    def runnable(self) -> bool:
        """Whether an operation comes first."""
        return bool(self._queue) and not isinstance(self._queue[0][0], Wait)

    def run_next(self) -> None:
        """Run the operation that comes first."""
        self._device._run(self, *self._queue.popleft())

    def settle(self) -> bool:
        """Pass the leading entries that need no operation to run; whether there were any."""
        before = self.passed
        while self._queue and self._passes_at_once(self._queue[0][0]):
            self.pass_entry(*self._queue.popleft())
        return self.passed > before

    def reach(self, ticket: int, timeout_s: float | None = None) -> bool:
        """Run operations up to `ticket`, and first those of other streams that they wait for.

        They run right here, so no time-out can end them.
        """
        # Waits form no cycle, so the recursion visits a stream at most once.
        while self.passed < ticket:
            work = self._queue[0][0]
            if isinstance(work, Wait):
                work.stream.reach(work.ticket)
            else:
                self.run_next()
        return True

    def inside_operation(self) -> bool:
        """Whether an operation of the device is running: it is the only one who can be calling."""
        return self._device._running

    def _append(self, entry: Entry) -> None:
        self._queue.append(entry)
        self.settle()

    def _passes_at_once(self, work: Work) -> bool:
        if self.failure is not None or isinstance(work, Stamp):
            return True
        return isinstance(work, Wait) and work.stream.passed >= work.ticket


class SteppedCpuDevice(TicketDevice[_SteppedStream]):
    """A device without threads: deterministic, and run in any order its streams and events allow.

    `submit` only queues. `Event.synchronize` runs what that event needs and nothing else; `query`
    runs nothing. `runnable` and `advance` pick the order by hand:

        while names := device.runnable():
            device.advance(random.choice(names))

    Attributes:
        log: (stream name, label) of every operation run, in the order run.
    """

    name = "cpu-stepped"

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, str]] = []
        self._running = False

    def runnable(self) -> list[str]:
        """Names of the streams whose next operation may run now."""
        return [stream.name for stream in self._streams.values() if stream.runnable]

    def advance(self, stream_name: str, n: int = 1) -> int:
        """Run up to `n` operations of one stream; gives how many ran.

        Stops early at a wait whose event has not passed, and where the queue ends. An operation
        that raises counts; the next call that waits or submits raises its error. Raises DeviceError
        if there is no such stream.
        """
        if stream_name not in self._streams:
            there_are = ", ".join(map(repr, self._streams)) or "none"
            raise DeviceError(f"no stream {stream_name!r} on this device; there are: {there_are}")
        stream = self._streams[stream_name]
        num_run = 0
        while num_run < n and stream.runnable:
            stream.run_next()
            num_run += 1
        return num_run

    def _new_stream(self, name: str) -> _SteppedStream:
        return _SteppedStream(name, self)

    def _finish(self) -> None:
        for stream in self._streams.values():
            stream.reach(stream.queued)

    def _run(self, stream: _SteppedStream, work: Work, label: str) -> None:
        self.log.append((stream.name, label))
        self._running = True
        try:
            stream.pass_entry(work, label)
        finally:
            self._running = False
            # The operation may have let waits pass, and these the waits of other streams.
            while any(other.settle() for other in self._streams.values()):
                pass
