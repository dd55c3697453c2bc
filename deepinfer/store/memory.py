"""Entries in host memory: saved in two steps, held while copied, and evicted to stay in a budget.

    begin_save   room is made, a buffer is there to be filled     nobody finds the entry yet
    commit       its bytes are there                              `open` finds it
    abandon      they will not be                                 the room is free again
    open, pin    the bytes stay where they are until `close`

A handle is one holder's right to a buffer. Whoever copies ends it (`commit`, `abandon`, `close`)
when the copy has ended and not when it was queued: that is all that keeps a buffer from being
handed to the next save under a copy that is still running. Eviction passes over what is held.

Called from one thread; the bytes in a buffer may be moved by any. Knows keys, not tokens; bytes,
not rows; no device and no files. Invariant: the bytes of all entries, those being saved included,
are within the budget; a call that is refused changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import OwnershipError, check_int
from deepinfer.store.chains import Chains, Evictions
from deepinfer.store.keys import check_key

Bytes = NDArray[np.uint8]


class HostMemory(Protocol):
    """Where buffers come from."""

    def allocate(self, num_bytes: int) -> Bytes:
        """A buffer, uint8 [num_bytes], its content anything. Raises MemoryError without room."""
        ...

    def free(self, buffer: Bytes) -> None:
        """Take back a buffer that nobody reads or writes any more."""
        ...


class PageableMemory:
    """Ordinary memory of the process. Implements `HostMemory`."""

    def allocate(self, num_bytes: int) -> Bytes:
        """As the protocol's."""
        return np.empty(num_bytes, np.uint8)

    def free(self, buffer: Bytes) -> None:
        """Nothing: it is gone with its last reference."""


@dataclass(slots=True)
class HostCounters(Evictions):
    """What a store did so far.

    Attributes:
        num_hits, num_misses: calls of `open` that found an entry, and that did not.
        bytes_saved: of entries that were committed.
        bytes_loaded: of entries that were opened.
        num_refused_saves: saves that there was no room for.
    """

    num_hits: int = 0
    num_misses: int = 0
    bytes_saved: int = 0
    bytes_loaded: int = 0
    num_refused_saves: int = 0


@dataclass(slots=True, eq=False)
class Handle:
    """One holder's right to the bytes of an entry, until it is committed, abandoned or closed.

    Attributes:
        key, parent: of the entry.
        saving: whether it is there to fill the entry. Otherwise its bytes are not to be written.
    """

    key: int
    parent: int | None
    saving: bool
    _buffer: Bytes | None = field(repr=False)

    @property
    def ended(self) -> bool:
        """Whether it gives no right to the bytes any more."""
        return self._buffer is None

    @property
    def buffer(self) -> Bytes:
        """The bytes, uint8 [num_bytes]. Raises OwnershipError if the handle has ended."""
        if self._buffer is None:
            raise OwnershipError(f"the handle of entry {self.key:032x} has ended")
        return self._buffer


@dataclass(slots=True)
class _Entry:
    parent: int | None
    buffer: Bytes
    visible: bool = False


class HostStore:
    """Entries by key, within `budget_bytes`.

    Args:
        budget_bytes: most bytes of all entries together.
        memory: where their buffers come from; ordinary memory if not given.
    """

    def __init__(self, budget_bytes: int, memory: HostMemory | None = None) -> None:
        check_int("budget_bytes", budget_bytes, 1)
        self.budget_bytes = budget_bytes
        self.counters = HostCounters()
        self._memory = PageableMemory() if memory is None else memory
        self._entries: dict[int, _Entry] = {}
        self._handles: set[Handle] = set()
        self._chains = Chains[int]()

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries, those being saved included."""
        return self._chains.num_bytes

    @property
    def num_entries(self) -> int:
        """Entries that can be found."""
        return len(self._entries) - sum(handle.saving for handle in self._handles)

    @property
    def handles(self) -> frozenset[Handle]:
        """Handles that have not ended: what somebody may be copying from or to."""
        return frozenset(self._handles)

    def __contains__(self, key: int) -> bool:
        """Whether `open` would find the entry now. Nothing is kept for the caller, or counted."""
        entry = self._entries.get(key)
        return entry is not None and entry.visible

    def is_saving(self, key: int) -> bool:
        """Whether the entry has a buffer that is being filled, so that nobody else can save it."""
        entry = self._entries.get(key)
        return entry is not None and not entry.visible

    # -- saving ----------------------------------------------------------------------------------

    def begin_save(
        self, key: int, parent: int | None, num_bytes: int, *, on_demand: bool = False
    ) -> Handle | None:
        """Make room for an entry that will continue `parent`, None if it begins its chain.

        Entries that nobody holds go, the last of the least recently used chain first; neither
        `parent` nor what it continues is among them. Nothing goes for an entry whose parent is not
        there, because nobody would find it.

        Args:
            on_demand: it is of use without its parent: somebody waits for this very entry, or its
                parent is saved next.

        Returns:
            The handle to fill its buffer by; None if the entry is there or being saved, if there is
            no room, or if the host turns out, after all, to have no memory.
        """
        check_key("key", key)
        if parent is not None:
            check_key("parent", parent)
        check_int("num_bytes", num_bytes, 1)
        if key in self._entries:
            return None
        victims = self._victims(parent, num_bytes, on_demand)
        if victims is None:
            self.counters.num_refused_saves += 1
            return None
        for victim in victims:
            self.counters.count(self._chains.remove(victim))
            self._memory.free(self._entries.pop(victim).buffer)
        try:
            buffer = self._memory.allocate(num_bytes)
        except MemoryError:
            self.counters.num_refused_saves += 1
            return None
        self._entries[key] = _Entry(parent, buffer)
        self._chains.add(key, parent, num_bytes)
        return self._handle(key, saving=True)

    def commit(self, handle: Handle) -> None:
        """The bytes are there: from now on the entry is found.

        Raises:
            OwnershipError: not the handle of a save of this store that is under way.
        """
        buffer = self._end(handle, "commit", saving=True)
        self._entries[handle.key].visible = True
        self._chains.use(handle.key)
        self.counters.bytes_saved += len(buffer)

    def abandon(self, handle: Handle) -> None:
        """The bytes will not be there, and nobody writes them any more. Raises as `commit` does."""
        buffer = self._end(handle, "abandon", saving=True)
        del self._entries[handle.key]
        self._chains.remove(handle.key)
        self._memory.free(buffer)

    # -- loading ---------------------------------------------------------------------------------

    def open(self, key: int) -> Handle | None:
        """Hold an entry to load it, which counts as a use; None if it is not there."""
        handle = self.pin(key)
        if handle is None:
            self.counters.num_misses += 1
            return None
        self._chains.use(key)
        self.counters.num_hits += 1
        self.counters.bytes_loaded += len(handle.buffer)
        return handle

    def pin(self, key: int) -> Handle | None:
        """Hold an entry for something else than a load, such as writing it to a file."""
        check_key("key", key)
        return self._handle(key, saving=False) if key in self else None

    def close(self, handle: Handle) -> None:
        """Give up what `open` or `pin` gave; nobody reads the bytes by this handle any more.

        Raises:
            OwnershipError: not a handle of this store that is open.
        """
        self._end(handle, "close", saving=False)

    # -- proof -----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise OwnershipError unless entries, handles, sizes and the budget agree."""
        self._chains.check_integrity()
        if len(self._chains) != len(self._entries):
            raise OwnershipError("store: entries and chains do not agree")
        num_bytes = sum(len(entry.buffer) for entry in self._entries.values())
        if not num_bytes == self.num_bytes <= self.budget_bytes:
            raise OwnershipError(
                f"store: {num_bytes} bytes in buffers, {self.num_bytes} counted, "
                f"{self.budget_bytes} allowed"
            )
        holds = dict.fromkeys(self._entries, 0)
        for handle in self._handles:
            holds[handle.key] += 1
            entry = self._entries[handle.key]
            if handle.buffer is not entry.buffer or handle.saving == entry.visible:
                raise OwnershipError(f"store: a handle of {handle.key:032x} is not of its entry")
        for key, count in holds.items():
            expected = count if self._entries[key].visible else 1
            if not count == expected == self._chains.num_holds(key):
                raise OwnershipError(f"store: {count} handles of {key:032x}, held otherwise")

    # -- inside ----------------------------------------------------------------------------------

    def _victims(self, parent: int | None, num_bytes: int, on_demand: bool) -> list[int] | None:
        """What goes for an entry of `num_bytes` behind `parent`; None: there is no room for it."""
        over = self.num_bytes + num_bytes - self.budget_bytes
        if over <= 0:
            return []
        of_use = on_demand or parent is None or parent in self._entries
        if not of_use or num_bytes > self.budget_bytes:
            return None
        return self._chains.choose(over, spare=parent)

    def _handle(self, key: int, *, saving: bool) -> Handle:
        entry = self._entries[key]
        handle = Handle(key, entry.parent, saving, entry.buffer)
        self._handles.add(handle)
        self._chains.hold(key)
        return handle

    def _end(self, handle: Handle, action: str, *, saving: bool) -> Bytes:
        if handle not in self._handles or handle.saving != saving:
            what = "has ended" if handle.ended else "is not of this kind, or of another store"
            raise OwnershipError(f"cannot {action}: the handle of {handle.key:032x} {what}")
        buffer = handle.buffer
        self._handles.remove(handle)
        handle._buffer = None
        self._chains.let_go(handle.key)
        return buffer
