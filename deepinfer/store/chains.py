"""Which entry goes next when room is needed: of the least recently used chain, its last one.

    a - b - c      used 1, 5, 2        goes next, and then:  c (2), d (3), b (5), a (1)
    d              used 3

An entry that another continues is of use to whoever uses that one, so it is never older than it:
it stays while the other is there, whenever it was used itself.

Knows names, sizes and order; no bytes. Invariant: nothing is chosen that is held, or that an entry
which is not chosen before it continues.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Generic, TypeVar

from deepinfer.errors import OwnershipError

Name = TypeVar("Name")

SPARE_ENTRIES = 64  # of the heap that may be out of date whatever its size
TAIL, HEAD, MIDDLE = "tail", "head", "middle"


@dataclass(slots=True)
class Evictions:
    """What was evicted, by its place in its chain.

    Attributes:
        num_evicted_tail: entries that nothing had continued: the chain became shorter than it was.
        num_evicted_head: first entries that something had continued: nothing is left of the chain.
        num_evicted_middle: others that something had continued.
    """

    num_evicted_head: int = 0
    num_evicted_middle: int = 0
    num_evicted_tail: int = 0

    @property
    def num_evictions(self) -> int:
        """All of them."""
        return self.num_evicted_head + self.num_evicted_middle + self.num_evicted_tail

    def count(self, place: str) -> None:
        """One more, at `place` (`TAIL`, `HEAD`, `MIDDLE`)."""
        name = f"num_evicted_{place}"
        setattr(self, name, getattr(self, name) + 1)


@dataclass(slots=True)
class _Entry(Generic[Name]):
    parent: Name | None
    num_bytes: int
    last_use: int
    num_holds: int = 0
    continued: bool = False  # at any time, by an entry that may be gone


class Chains(Generic[Name]):
    """Entries by name, with what they continue, their sizes, holds and uses.

    Attributes:
        num_bytes: of all entries.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._entries: dict[Name, _Entry[Name]] = {}
        self._num_children: dict[Name, int] = {}  # of names, whether or not they have an entry
        self._clock = 0
        # (last use, name) of every entry that can go, and some that cannot or are not any more.
        self._candidates: list[tuple[int, Name]] = []

    def __contains__(self, name: Name) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def num_holds(self, name: Name) -> int:
        """How often the entry is held."""
        return self._entries[name].num_holds

    def add(self, name: Name, parent: Name | None, num_bytes: int) -> None:
        """A new entry, used now. Its parent need not have one.

        Raises:
            OwnershipError: the name has an entry. Nothing has changed.
        """
        if name in self._entries:
            raise OwnershipError(f"cannot add {name!r}: it is there already")
        entry = _Entry(parent, num_bytes, self._tick(), continued=name in self._num_children)
        self._entries[name] = entry
        self.num_bytes += num_bytes
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
            if parent in self._entries:
                self._entries[parent].continued = True
        self._offer(name)

    def use(self, name: Name) -> None:
        """The entry is the most recently used."""
        self._entries[name].last_use = self._tick()
        self._offer(name)

    def hold(self, name: Name) -> None:
        """Keep the entry, and so all that it continues, from being chosen."""
        self._entries[name].num_holds += 1

    def let_go(self, name: Name) -> None:
        """One hold less.

        Raises:
            OwnershipError: nobody holds the entry.
        """
        entry = self._entries[name]
        if not entry.num_holds:
            raise OwnershipError(f"cannot let {name!r} go: nobody holds it")
        entry.num_holds -= 1
        self._offer(name)

    def remove(self, name: Name) -> str:
        """Forget an entry that nobody holds; its place in its chain, for `Evictions`."""
        entry = self._entries[name]
        if entry.num_holds:
            raise OwnershipError(f"cannot remove {name!r}: it is held")
        del self._entries[name]
        self.num_bytes -= entry.num_bytes
        if (parent := entry.parent) is not None:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                del self._num_children[parent]
                if parent in self._entries:
                    self._offer(parent)
        if not entry.continued:
            return TAIL
        return HEAD if parent is None else MIDDLE

    def choose(self, num_bytes: int, *, spare: Name | None = None) -> list[Name] | None:
        """The next entries to go that have `num_bytes` together, in order; None if all have less.

        Nothing is removed. What is to continue `spare` needs the room, so `spare` is not chosen,
        nor what it continues.
        """
        seen: list[tuple[int, Name]] = []
        chosen: dict[Name, None] = {}
        left: dict[Name, int] = {}  # entries that would still continue a name
        num_chosen = 0
        while num_chosen < num_bytes and self._candidates:
            last_use, name = heapq.heappop(self._candidates)
            if not self._can_go(last_use, name, left) or name in chosen:
                continue
            seen.append((last_use, name))
            if name == spare:
                continue
            chosen[name] = None
            entry = self._entries[name]
            num_chosen += entry.num_bytes
            if (parent := entry.parent) is not None:
                left[parent] = left.get(parent, self._num_children[parent]) - 1
                if parent in self._entries and not left[parent]:
                    candidate = (self._entries[parent].last_use, parent)
                    heapq.heappush(self._candidates, candidate)
        for candidate in seen:
            heapq.heappush(self._candidates, candidate)
        return list(chosen) if num_chosen >= num_bytes else None

    def check_integrity(self) -> None:
        """Raise OwnershipError unless sizes, children and candidates follow from the entries."""
        children: dict[Name, int] = {}
        for entry in self._entries.values():
            if entry.parent is not None:
                children[entry.parent] = children.get(entry.parent, 0) + 1
        if children != self._num_children:
            raise OwnershipError("chains: the counts of what continues an entry are off")
        if sum(entry.num_bytes for entry in self._entries.values()) != self.num_bytes:
            raise OwnershipError(f"chains: the entries do not have {self.num_bytes} bytes")
        candidates = set(self._candidates)
        for name, entry in self._entries.items():
            candidate = (entry.last_use, name)
            if self._can_go(entry.last_use, name, {}) and candidate not in candidates:
                raise OwnershipError(f"chains: {name!r} could go and is not among the candidates")

    # -- inside ----------------------------------------------------------------------------------

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _can_go(self, last_use: int, name: Name, left: dict[Name, int]) -> bool:
        entry = self._entries.get(name)
        if entry is None or entry.num_holds or entry.last_use != last_use:
            return False
        return not left.get(name, self._num_children.get(name, 0))

    def _offer(self, name: Name) -> None:
        last_use = self._entries[name].last_use
        if not self._can_go(last_use, name, {}):
            return
        heapq.heappush(self._candidates, (last_use, name))
        if len(self._candidates) > 2 * len(self._entries) + SPARE_ENTRIES:
            self._candidates = [
                (entry.last_use, own)
                for own, entry in self._entries.items()
                if self._can_go(entry.last_use, own, {})
            ]
            heapq.heapify(self._candidates)
