"""Where free blocks wait: three disciplines behind one small interface.

    fifo    pushed at the tail, taken from the head   (the engine of the book)
    lifo    pushed at the head, taken from the head   (the block freed last is used first)
    by_id   always the smallest id

A fourth list, of pools that find blocks by what they hold, lets any id leave: `LinkedFreeList`.

Knows ids only: not who owned a block nor why it came back. Several ids are pushed one by one in the
order given, so pushing [7, 5, 4] under `lifo` leaves 4 at the head. Invariant: what was pushed and
not yet taken is in the list exactly as often as it was pushed (uniqueness is the block manager's
invariant, checked there).
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]

SCALAR_LIMIT = 32  # up to here a loop over an array("i") beats the call overhead of numpy


class FreeList(Protocol):
    """A pool of ids with an order of its own; the caller never takes more than `len()`."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """The ids in the order in which they would be taken."""
        ...

    def take_one(self) -> int: ...

    def take(self, count: int) -> Ids:
        """The next `count` ids, int32 [count], a fresh array."""
        ...

    def push(self, ids: Sequence[int] | Ids) -> None:
        """Add ids one by one, first to last."""
        ...


class RingFreeList:
    """`fifo` and `lifo` over one ring buffer, so neither ever moves the rest of the list.

    The same memory is an `array('i')` for single ids and a numpy view for slices.
    """

    def __init__(self, capacity: int, *, lifo: bool) -> None:
        self._array = array("i", bytes(4 * capacity))
        self._ring = np.frombuffer(self._array, dtype=np.int32)
        self._capacity = capacity
        self._lifo = lifo
        self._head = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        for offset in range(self._size):
            yield self._array[(self._head + offset) % self._capacity]

    def take_one(self) -> int:
        block_id = self._array[self._head]
        head = self._head + 1
        self._head = head if head < self._capacity else 0
        self._size -= 1
        return block_id

    def take(self, count: int) -> Ids:
        head, end = self._head, self._head + count
        self._size -= count
        if end < self._capacity:
            self._head = end
            return self._ring[head:end].copy()
        self._head = end - self._capacity
        return np.concatenate((self._ring[head:], self._ring[: self._head]))

    def push(self, ids: Sequence[int] | Ids) -> None:
        count = len(ids)
        if self._lifo:
            self._write((self._head - count) % self._capacity, ids[::-1])
            self._head = (self._head - count) % self._capacity
        else:
            self._write((self._head + self._size) % self._capacity, ids)
        self._size += count

    def _write(self, start: int, ids: Sequence[int] | Ids) -> None:
        end = start + len(ids)
        if len(ids) <= SCALAR_LIMIT and isinstance(ids, list):
            ring, capacity = self._array, self._capacity
            for block_id in ids:
                ring[start] = block_id
                start += 1
                if start == capacity:
                    start = 0
        elif end <= self._capacity:
            self._ring[start:end] = ids
        else:
            split = self._capacity - start
            self._ring[start:] = ids[:split]
            self._ring[: end - self._capacity] = ids[split:]


class SortedFreeList:
    """`by_id`: a heap, kept a sorted list where many ids are taken at once."""

    def __init__(self) -> None:
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._heap))

    def take_one(self) -> int:
        return heapq.heappop(self._heap)

    def take(self, count: int) -> Ids:
        if count <= SCALAR_LIMIT:
            return np.array([heapq.heappop(self._heap) for _ in range(count)], dtype=np.int32)
        self._heap.sort()  # a sorted list is a heap
        taken = np.array(self._heap[:count], dtype=np.int32)
        del self._heap[:count]
        return taken

    def push(self, ids: Sequence[int] | Ids) -> None:
        values = ids.tolist() if isinstance(ids, np.ndarray) else ids
        if len(values) <= SCALAR_LIMIT:
            for block_id in values:
                heapq.heappush(self._heap, block_id)
        else:
            self._heap.extend(values)
            heapq.heapify(self._heap)


class LinkedFreeList:
    """Two queues, one behind the other, from whose middle any id leaves in O(1): a linked list.

        head  -> [ front: ... ] -> [ back: ... ] ->  tail

    An id joins the back queue at its tail, or, if `joins_front(id)` is true at that moment, the
    front queue: at its tail, or with `stack` at its head. Ids leave at the head of the front queue
    and, where that is empty, at the head of the back queue.
    """

    def __init__(
        self,
        capacity: int,
        *,
        joins_front: Callable[[int], bool] | None = None,
        stack: bool = False,
    ) -> None:
        # Each queue is a ring through a node that is no id: 0, as in a table, and the capacity.
        self._front, self._back = 0, capacity
        self._next, self._prev = list(range(capacity + 1)), list(range(capacity + 1))
        self._joins_front, self.is_stack = joins_front, stack
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        for end in (self._front, self._back):
            block_id = self._next[end]
            while block_id != end:
                yield block_id
                block_id = self._next[block_id]

    def take_one(self) -> int:
        block_id = self._next[self._front] or self._next[self._back]
        self.remove(block_id)
        return block_id

    def take(self, count: int) -> Ids:
        return np.array([self.take_one() for _ in range(count)], dtype=np.int32)

    def remove(self, block_id: int) -> None:
        """Take out an id that is in the list, wherever it stands."""
        before, behind = self._prev[block_id], self._next[block_id]
        self._next[before], self._prev[behind] = behind, before
        self._size -= 1

    def push(self, ids: Sequence[int] | Ids) -> None:
        values = ids.tolist() if isinstance(ids, np.ndarray) else ids
        after, before, joins_front = self._next, self._prev, self._joins_front
        for block_id in values:
            end = self._front if joins_front is not None and joins_front(block_id) else self._back
            left = end if self.is_stack and end == self._front else before[end]
            right = after[left]
            after[left] = before[right] = block_id
            before[block_id], after[block_id] = left, right
        self._size += len(values)


def make_free_list(discipline: str, capacity: int) -> FreeList:
    """An empty free list of the named discipline for ids below `capacity`."""
    if discipline == "by_id":
        return SortedFreeList()
    return RingFreeList(capacity, lifo=discipline == "lifo")
