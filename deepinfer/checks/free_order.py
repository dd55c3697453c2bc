"""The free list as it must be: a second one, kept from what was told.

Knows the free orders and the three disciplines by their one-line definitions. Invariant: a
table's blocks join in the same order whether they waited for a fence or not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container


def in_order(free_order: str, table: list[int], ids: list[int], keyed: Container[int] = ()) -> bool:
    """Whether `ids` is `table` in the named free order; `keyed` blocks have a key."""
    if free_order in ("reverse", "reverse_unhashed_head", "never_hit_first"):
        return ids == table[::-1]
    if free_order == "reverse_unhashed_first":
        last_first = table[::-1]
        return ids == sorted(last_first, key=lambda block_id: block_id in keyed)
    if free_order == "forward":
        return ids == table
    if free_order == "by_id":
        return ids == sorted(table)
    return sorted(ids) == sorted(table)


class ExpectedFreeList:
    """Free ids in the order in which they are to be handed out.

    Attributes:
        ids: the list, first out first.
    """

    def __init__(self, num_blocks: int, discipline: str) -> None:
        self.ids = list(range(1, num_blocks))
        self._discipline = discipline

    def join(self, ids: list[int]) -> None:
        """`ids` came free, one after the other."""
        if self._discipline == "lifo":
            self.ids[:0] = ids[::-1]
        else:
            self.ids += ids
            if self._discipline == "by_id":
                self.ids.sort()

    def join_before(self, ids: list[int], last: Container[int]) -> None:
        """`ids` came free, and go behind all but `last` and what is behind the first of those."""
        at = next((at for at, block_id in enumerate(self.ids) if block_id in last), len(self.ids))
        self.ids[at:at] = ids

    def leave(self, ids: list[int]) -> list[int] | None:
        """`ids` were handed out. Gives what should have been instead, if they are others."""
        expected = self.ids[: len(ids)]
        if expected == ids:
            del self.ids[: len(ids)]
            return None
        out = set(ids)
        self.ids = [block_id for block_id in self.ids if block_id not in out]
        return expected


class PendingLifts:
    """Fenced releases whose fences are still on, oldest first."""

    def __init__(self) -> None:
        self._pending: deque[list[int]] = deque()

    def add(self, ids: list[int]) -> None:
        """A release put a fence on each of `ids`."""
        self._pending.append(ids)

    def lift(self, ids: list[int]) -> str | None:
        """The fences of one release are lifted, in this order. Gives what is wrong, if anything."""
        if self._pending and self._pending[0] == ids:
            self._pending.popleft()
            return None
        if ids in self._pending:
            older = self._pending[0]
            self._pending.remove(ids)
            return f"the fences of blocks {ids} were lifted before those of {older}, released first"
        for released in self._pending:
            if sorted(released) == sorted(ids):
                self._pending.remove(released)
                return f"the fences of blocks {ids} were lifted in this order, not in {released}"
        return f"fences of blocks {ids} were lifted that no release put there"
