"""Host memory with a directory behind it: what is saved gets a file, what is missing is read back.

    engine's thread                                  worker, one thread
    commit   the entry is in memory, and pinned  ->  save its bytes
    open     there at once, or a buffer for it   ->  read into it, before any save that waits
    poll     takes in what has ended             <-  whether it went well

The worker moves bytes between buffers that handles keep in place and the directory; every entry,
handle and counter is the engine thread's. Nothing here waits for bytes of a file but `drain` and
`close`. What is in files is known from the directory's last listing: what another process has saved
since is found late, and a file that is bad or has gone is a miss once, when it is read.

What is being saved to a file cannot be evicted. So only a share of the memory's budget is with the
worker at a time; other entries get their files in turn, or none if they are evicted before.

A key stands for all tokens up to it, so it has one parent. Knows keys and bytes; no device, no
rows, no requests. Invariant: each read and each save under way has one handle, which ends in
`poll`; a fetch becomes ready once; no fault of a file raises.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event

from deepinfer.errors import DeviceTimeoutError, OwnershipError
from deepinfer.store.directory import DirectoryStore
from deepinfer.store.memory import Handle, HostStore

# When a quarter of the memory's budget waits for the disk, nothing more is handed over: enough for
# a disk from one `poll` to the next, and the rest can be evicted however slow it is.
WAITING_SHARE = 4
MAX_KEYS = 1 << 16  # that are owed a file: some 10 MB


@dataclass(slots=True)
class TierCounters:
    """What became of fetches and files so far. Each fetch is counted once, when it is ready.

    Attributes:
        num_memory_hits: fetches of entries that were in host memory.
        num_file_hits: fetches of entries that were read from a file; several may share a read.
        num_misses: fetches without an entry.
        num_given_up: fetches that were closed before they were ready.
        num_reads, bytes_read: files that were read and right. Memory counts them as saves, too.
        num_writes, bytes_written: entries that have a file since they were committed.
        num_dropped_writes: entries that got no file: evicted before their turn, or with `MAX_KEYS`
            others behind them.
        num_refused_writes: entries that the directory did not save.
    """

    num_memory_hits: int = 0
    num_file_hits: int = 0
    num_misses: int = 0
    num_given_up: int = 0
    num_reads: int = 0
    bytes_read: int = 0
    num_writes: int = 0
    bytes_written: int = 0
    num_dropped_writes: int = 0
    num_refused_writes: int = 0


@dataclass(slots=True, eq=False)
class Fetch:
    """One holder's wait for one entry, to be closed once, at any time.

    Attributes:
        key: of the entry.
        ready: whether the outcome is known. It becomes so in `TieredStore.open` or `poll`.
        handle: of the entry, once ready; None: a miss. To end it by itself
            (`HostStore.close`) is to close the fetch.
    """

    key: int
    _store: TieredStore = field(repr=False)
    ready: bool = False
    handle: Handle | None = None
    _closed: bool = False

    def close(self) -> None:
        """Give the bytes up, or the wait for them. A read that has begun goes on.

        Raises:
            OwnershipError: it is closed, or its handle has ended.
        """
        if self._closed:
            raise OwnershipError(f"cannot close: the fetch of entry {self.key:032x} has ended")
        self._store._give_up(self)
        self._closed = True

    cancel = close


@dataclass(slots=True, eq=False)
class _Job:
    """What the worker does with the buffer of a handle: fill it if it is saving, else write it.

    Attributes:
        fetches: that wait for a read; without any, it need not begin.
        outcome: whether it went well; None: not done, or left out.
    """

    handle: Handle
    fetches: list[Fetch] = field(default_factory=list)
    outcome: bool | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.handle.buffer)


class TieredStore:
    """A `HostStore`, with a `DirectoryStore` behind it if there is one.

    Args:
        host: used by this thread only; others may use it beside.
        directory: with one, there is a worker thread from the first file to `close`.

    Attributes:
        counters: `TierCounters`; `host` and `directory` have their own.
    """

    def __init__(self, host: HostStore, directory: DirectoryStore | None = None) -> None:
        self.host = host
        self.directory = directory
        self.counters = TierCounters()
        self._worker: ThreadPoolExecutor | None = None
        if directory is not None:
            # An executor's thread also ends with the process, and when nobody has the store any
            # more: an error that passes `close` by leaves no process that hangs.
            self._worker = ThreadPoolExecutor(1, "store")
        self._reads: dict[int, _Job] = {}  # by key, until `poll`
        self._writes: dict[int, _Job] = {}
        self._num_waiting_bytes = 0  # of the writes
        self._owed: dict[int, None] = {}  # entries that are to get a file, in order of commits
        # Between the threads: one job goes in at the right and out at the left.
        self._reads_to_do: deque[_Job] = deque()
        self._writes_to_do: deque[_Job] = deque()
        self._done: deque[_Job] = deque()
        self._ended = Event()  # set behind each that is appended to it

    # -- looking and loading ---------------------------------------------------------------------

    def has(self, key: int, parent: int | None) -> bool:
        """Whether an entry is in memory or, as far as known, in a file that `open` would read.

        Nothing is kept for the caller, or counted; looks at no file.
        """
        if key in self.host:
            return True
        being_saved = self.host.is_saving(key) and key not in self._reads
        return not being_saved and self._in_file(key, parent) is not None

    def lacks(self, key: int, parent: int | None) -> bool:
        """Whether saving an entry is of use: it is not there, and not being saved or read."""
        return not (self.has(key, parent) or self.host.is_saving(key))

    def open(self, key: int, parent: int | None) -> Fetch:
        """Hold an entry for a load: ready at once, unless it must be read first.

        It has the size it was saved with. A read makes room in memory as `begin_save` does, but
        needs no parent there. It is a miss if that is refused, or if the entry is being saved.
        """
        fetch = Fetch(key, self)
        if key in self.host:
            self.counters.num_memory_hits += 1
            self._settle(fetch, self.host.open(key))
        elif (job := self._reads.get(key)) is not None:
            job.fetches.append(fetch)
        elif (handle := self._begin_read(key, parent)) is not None:
            job = self._reads[key] = _Job(handle, [fetch])
            self._hand_over(job)
        else:
            self._settle(fetch, None)
        return fetch

    # -- saving ----------------------------------------------------------------------------------

    def begin_save(
        self, key: int, parent: int | None, num_bytes: int, *, on_demand: bool = False
    ) -> Handle | None:
        """As `HostStore.begin_save`. An entry that is being read counts as being saved."""
        return self.host.begin_save(key, parent, num_bytes, on_demand=on_demand)

    def commit(self, handle: Handle) -> None:
        """As `HostStore.commit`; with a directory, the entry is to get a file, too."""
        self.host.commit(handle)
        if self._worker is None:
            return
        self._owed[handle.key] = None
        if len(self._owed) > MAX_KEYS:
            self._drop(next(iter(self._owed)))
        self._hand_over_owed()

    def abandon(self, handle: Handle) -> None:
        """As `HostStore.abandon`."""
        self.host.abandon(handle)

    # -- what the worker has ended ---------------------------------------------------------------

    def poll(self) -> None:
        """Take in what has ended: fetches become ready, entries that were saved can be evicted."""
        while self._done:
            job = self._done.popleft()
            if job.handle.saving:
                self._take_in_read(job)
            else:
                self._take_in_write(job)
        self._hand_over_owed()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until a file was read or written, if any is to be; `poll` takes it in.

        Reads go first, so a fetch waits for one write at most. Raises DeviceTimeoutError if nothing
        ends within `timeout_s` seconds (None: no limit).
        """
        if not (self._reads or self._writes):
            return
        self._ended.clear()
        if not self._done and not self._ended.wait(timeout_s):
            raise DeviceTimeoutError(f"store: no file was read or written within {timeout_s:g} s")

    def drain(self) -> None:
        """Wait until every read has ended and no entry is owed a file; take it all in."""
        self.poll()
        while self._worker is not None and (self._reads or self._writes):
            self._worker.submit(int).result()  # it comes last
            self.poll()

    def close(self) -> None:
        """Drain and end the thread. Memory can be used on, the directory not; again is no matter.

        Fetches and handles stay with their holders.
        """
        self.drain()
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    # -- proof -----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise OwnershipError unless jobs, their handles, fetches and sizes agree."""
        self.host.check_integrity()
        handles = self.host.handles
        for saving, jobs in ((True, self._reads), (False, self._writes)):
            for key, job in jobs.items():
                handle = job.handle
                if handle not in handles or handle.key != key or handle.saving != saving:
                    raise OwnershipError(f"store: the job of {key:032x} has not its handle")
                for fetch in job.fetches:
                    if fetch.key != key or fetch.ready or fetch._closed:
                        raise OwnershipError(f"store: a fetch of {key:032x} does not wait for it")
        if sum(job.num_bytes for job in self._writes.values()) != self._num_waiting_bytes:
            raise OwnershipError(f"store: not {self._num_waiting_bytes} bytes wait for the disk")
        if self._worker is None and (self._reads or self._writes or self._owed):
            raise OwnershipError("store: jobs are left, and nobody does them")

    # -- inside, engine's thread -----------------------------------------------------------------

    def _in_file(self, key: int, parent: int | None) -> int | None:
        """Bytes of an entry that is known to be in a file, if memory can ever have that many."""
        if self.directory is None or self._worker is None:
            return None
        num_bytes = self.directory.known(key, parent) or 0
        return num_bytes if 0 < num_bytes <= self.host.budget_bytes else None

    def _begin_read(self, key: int, parent: int | None) -> Handle | None:
        num_bytes = self._in_file(key, parent)
        if num_bytes is None:
            return None
        return self.host.begin_save(key, parent, num_bytes, on_demand=True)

    def _hand_over_owed(self) -> None:
        while self._owed and self._num_waiting_bytes * WAITING_SHARE < self.host.budget_bytes:
            key = next(iter(self._owed))
            pin = self.host.pin(key)
            if pin is None:
                self._drop(key)
            else:
                del self._owed[key]
                job = self._writes[key] = _Job(pin)
                self._num_waiting_bytes += job.num_bytes
                self._hand_over(job)

    def _drop(self, key: int) -> None:
        del self._owed[key]
        self.counters.num_dropped_writes += 1

    def _hand_over(self, job: _Job) -> None:
        assert self._worker is not None
        (self._reads_to_do if job.handle.saving else self._writes_to_do).append(job)
        self._worker.submit(self._do_next)

    def _take_in_read(self, job: _Job) -> None:
        handle, num_bytes = job.handle, job.num_bytes
        if job.outcome is None and job.fetches:  # opened again just after it was left out
            self._hand_over(job)
            return
        del self._reads[handle.key]
        if job.outcome:
            self.host.commit(handle)
            self.counters.num_reads += 1
            self.counters.bytes_read += num_bytes
            self.counters.num_file_hits += len(job.fetches)
        else:
            self.host.abandon(handle)
        for fetch in job.fetches:
            self._settle(fetch, self.host.pin(handle.key))

    def _take_in_write(self, job: _Job) -> None:
        handle, num_bytes = job.handle, job.num_bytes
        del self._writes[handle.key]
        self._num_waiting_bytes -= num_bytes
        if job.outcome:
            self.counters.num_writes += 1
            self.counters.bytes_written += num_bytes
        else:
            self.counters.num_refused_writes += 1
        self.host.close(handle)

    def _settle(self, fetch: Fetch, handle: Handle | None) -> None:
        fetch.ready, fetch.handle = True, handle
        self.counters.num_misses += handle is None

    def _give_up(self, fetch: Fetch) -> None:
        if not fetch.ready:
            self._reads[fetch.key].fetches.remove(fetch)
            self.counters.num_given_up += 1
        elif fetch.handle is not None:
            self.host.close(fetch.handle)

    # -- inside, worker --------------------------------------------------------------------------

    def _do_next(self) -> None:
        """One job: called once for each that was handed over, and only here they are taken out."""
        job = (self._reads_to_do or self._writes_to_do).popleft()
        handle, directory = job.handle, self.directory
        assert directory is not None
        move = directory.read if handle.saving else directory.save
        try:
            if job.fetches or not handle.saving:
                job.outcome = move(handle.key, handle.parent, handle.buffer)
        except Exception as error:  # it is the fault of a file and not of a request
            directory.distrust(handle.key, handle.parent, error)
            job.outcome = False
        self._done.append(job)
        self._ended.set()
