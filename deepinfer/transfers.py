"""Rows on their way between the pools and a store: the streams, events and buffers of it.

    save    copy     [behind what was committed]      copy out     record(event)
            host     the blocks' pins go back through the release queue, behind the event
    load    load     wait(fences of the new blocks)   copy in      record(event)
            host     the request runs when a look finds the event passed; others do not wait

A state is copied out on stream `copy` between two steps, like the state of a fork: behind the step
that wrote it, before the step that writes it next.

Knows no keys and no order of requests. Invariants: a host buffer is held from before its copy is
queued until the copy's event has passed, whatever becomes of the request; an entry can be found
only when its bytes are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from deepinfer.cache_engine import gib
from deepinfer.config import EngineConfig
from deepinfer.device.base import Device, Event, Stream
from deepinfer.entry_bytes import Bytes, EntryBytes
from deepinfer.errors import UserError
from deepinfer.observer import BUFFER, KV, NO_STEP, STATE, Access
from deepinfer.plan import Int32
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.store.directory import DirectoryStore
from deepinfer.store.keys import fingerprint
from deepinfer.store.memory import HostStore
from deepinfer.store.tiers import TieredStore
from deepinfer.store_reuse import STORE, Load, LoadPart, Save
from deepinfer.transfer_times import TransferTimes
from deepinfer.worker import InFlightStep


class HostBuffers:
    """Host memory that a device copies from and to. Implements `store.memory.HostMemory`."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def allocate(self, num_bytes: int) -> Bytes:
        """As the protocol's."""
        return self._device.host_buffer(num_bytes)

    def free(self, buffer: Bytes) -> None:
        """Nothing: it is gone with its last reference."""


def open_store(model: object, config: EngineConfig, device: Device, *, tags: bool) -> TieredStore:
    """The store that `config` asks for, for the rows of `model`. Raises UserError as it does."""
    import psutil

    available = psutil.virtual_memory().available
    if config.store_bytes > available:
        raise UserError(
            f"store_bytes: {gib(config.store_bytes)}, and the host has {gib(available)} available"
        )
    host = HostStore(config.store_bytes, HostBuffers(device))
    if config.store_directory is None:
        return TieredStore(host)
    rows_depend_on = (model, config.block_size, config.uses_draft_layers, tags, device.name)
    directory = DirectoryStore(
        config.store_directory, fingerprint(*rows_depend_on), config.store_directory_bytes
    )
    return TieredStore(host, directory)


@dataclass(slots=True)
class TransferCounters:
    """What was moved.

    Attributes:
        num_saves: entries copied out and kept.
        bytes_saved, bytes_loaded: of copies that have ended.
        num_refused_saves: entries for which the store had no room.
    """

    num_saves: int = 0
    bytes_saved: int = 0
    bytes_loaded: int = 0
    num_refused_saves: int = 0


@dataclass(slots=True, eq=False)
class _Copy:
    """A transfer that was queued: what is to be done when it has ended."""

    fence: Fence
    start: Event
    end: Event
    ended: Callable[[], None]
    is_load: bool


class Transfers:
    """The transfers of one engine.

    Args:
        blocks, states: the pools as bytes; `states` None for a model without state.
        release: the queue through which blocks go back.
        load_stream: where rows come in.

    Attributes:
        counters: of what was moved.
        times: how long it took, and how much of that beside steps.
    """

    def __init__(
        self,
        store: TieredStore,
        blocks: EntryBytes,
        states: EntryBytes | None,
        device: Device,
        release: ReleaseQueue,
        load_stream: str,
    ) -> None:
        self.counters = TransferCounters()
        self.times = TransferTimes(device)
        self._store = store
        self._blocks, self._states = blocks, states
        self._device = device
        self._release = release
        self._copy_stream = device.stream("copy")
        self._load_stream = device.stream(load_stream)
        self._fetching: deque[Load] = deque()  # whose bytes are not all in host memory
        self._copies: list[_Copy] = []
        self._came: list[Load] = []
        self._failed: list[Load] = []

    # -- loading ---------------------------------------------------------------------------------

    def begin(self, load: Load) -> None:
        """Queue a load, as soon as all its bytes are in host memory.

        Its stream waits at once for who had the blocks before: if the load is given up first,
        nobody else knows any more that the next one must.
        """
        for fence in load.waits:
            fence.hold(self._load_stream)
        self._fetching.append(load)
        self._submit_fetched()

    def poll(self) -> tuple[list[Load], list[Load]]:
        """Look what has ended; returns the loads that have come since, and those that failed."""
        self._store.poll()
        self._end_passed()
        self._submit_fetched()
        came = [load for load in self._came if not load.given_up]
        failed = [load for load in self._failed if not load.given_up]
        self._came, self._failed = [], []
        return came, failed

    @property
    def any_open(self) -> bool:
        """Whether a load or a copy has not ended, or nobody was told that it has."""
        return bool(self._fetching or self._came or self._failed or self._copies)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the next load to come, or for a file that one needs; else for the oldest save.

        Raises what the wait for an event raises, also for a file that does not come in time.
        """
        loads = [copy for copy in self._copies if copy.is_load]
        if self._fetching and not loads:
            self._store.wait(timeout_s)
        elif self._copies:
            (loads or self._copies)[0].fence.wait(timeout_s)

    # -- saving ----------------------------------------------------------------------------------

    def save_blocks(self, saves: Sequence[Save]) -> None:
        """Queue copies of committed blocks; the pins of each go back behind its end."""
        for save in saves:
            access = Access(KV, save.ids)
            fence = self._save(save, self._blocks, access, "save_blocks")
            self._release.give_up(save.ids, fence, owner=STORE, path="save")

    def save_states(self, saves: Sequence[Save]) -> None:
        """Queue copies of state slots. Whoever writes them next waits for stream `copy`."""
        for save in saves:
            assert self._states is not None, "requests have state"
            access = Access(STATE, save.ids, holders=np.array([save.row]))
            self._save(save, self._states, access, "save_state")

    # -- moments ---------------------------------------------------------------------------------

    def ran(self, flight: InFlightStep) -> None:
        """A step was collected."""
        self.times.ran(flight.start, flight.end)

    def settle(self, timeout_s: float | None = None) -> None:
        """With no request left: wait until every copy has ended, and end what hangs on it."""
        self._submit_fetched()  # nothing any more, but what was given up is closed
        while self._copies:
            self.wait(timeout_s)
            self._end_passed()
        self._came.clear()
        self._failed.clear()

    # -- inside ----------------------------------------------------------------------------------

    def _save(self, save: Save, pool: EntryBytes, access: Access, name: str) -> Fence | None:
        num_bytes, is_state = len(save.ids) * pool.bytes_per_item, pool is self._states
        # With steps ahead a state is kept before the blocks it continues are committed.
        handle = self._store.begin_save(save.key, save.parent, num_bytes, on_demand=is_state)
        if handle is None:
            self.counters.num_refused_saves += self._store.lacks(save.key, save.parent)
            return None
        buffer, ids = handle.buffer, save.ids

        def ended() -> None:
            self._store.commit(handle)
            self.counters.num_saves += 1
            self.counters.bytes_saved += num_bytes

        with self._copying(self._copy_stream, ended) as fence:
            self._copy_stream.submit(
                lambda: pool.save(ids, buffer),
                reads=(access,),
                writes=(_address(buffer),),
                label=f"{name} {save.key:032x}"[:20],
            )
        return fence

    def _submit_fetched(self) -> None:
        """Queue the loads whose bytes are there, and give up those whose bytes will not be."""
        for load in list(self._fetching):
            if not load.given_up and not all(part.fetch.ready for part in load.parts):
                continue
            self._fetching.remove(load)
            if not load.given_up and all(self._is_whole(part) for part in load.parts):
                self._submit(load)
                continue
            for part in load.parts:
                part.fetch.close()
            if not load.given_up:
                self._failed.append(load)

    def _is_whole(self, part: LoadPart) -> bool:
        pool, handle = self._pool(part), part.fetch.handle
        num_items = part.first + len(part.ids)
        return handle is not None and len(handle.buffer) == num_items * pool.bytes_per_item

    def _submit(self, load: Load) -> None:
        num_bytes = sum(len(part.ids) * self._pool(part).bytes_per_item for part in load.parts)
        holder = np.array([load.seq.row])

        def ended() -> None:
            for part in load.parts:
                part.fetch.close()
            self.counters.bytes_loaded += num_bytes
            self._came.append(load)

        with self._copying(self._load_stream, ended) as fence:
            for part in load.parts:
                handle, pool = part.fetch.handle, self._pool(part)
                assert handle is not None, "it is whole"
                kind = STATE if part.is_state else KV
                self._load_stream.submit(
                    _load_into(pool, part.ids, handle.buffer, part.first),
                    reads=(_address(handle.buffer),),
                    writes=(Access(kind, part.ids, holders=holder.repeat(len(part.ids))),),
                    label=f"load {load.seq.request_id}",
                )
        load.fence = fence

    @contextmanager
    def _copying(self, stream: Stream, ended: Callable[[], None]) -> Iterator[Fence]:
        """What is submitted inside is one transfer; gives the fence behind it."""
        start, end = self._device.event(timing=True), self._device.event(timing=True)
        fence = Fence(NO_STEP, end)
        stream.record(start)
        yield fence
        stream.record(end)
        self._copies.append(_Copy(fence, start, end, ended, stream is self._load_stream))

    def _end_passed(self) -> None:
        passed = [copy for copy in self._copies if copy.fence.query()]
        for copy in passed:
            self._copies.remove(copy)
            self.times.moved(copy.start, copy.end)
            copy.ended()
            self._device.recycle(copy.start)
            self._device.recycle(copy.end)

    def _pool(self, part: LoadPart) -> EntryBytes:
        pool = self._states if part.is_state else self._blocks
        assert pool is not None, "requests have state"
        return pool


def _load_into(pool: EntryBytes, ids: Int32, source: Bytes, first: int) -> Callable[[], None]:
    return lambda: pool.load(ids, source, first)


def _address(buffer: Bytes) -> Access:
    return Access(BUFFER, np.array([buffer.__array_interface__["data"][0]]))
