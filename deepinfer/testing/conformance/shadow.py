"""The pool as it should be: plain counting beside the manager under test, which it never asks.

Knows no manager and no invariant. Invariant: a block is free iff it has neither owner nor fence.
"""

from __future__ import annotations


class Shadow:
    """Owners, fences and, in order, the free ids: the pool as it should be."""

    def __init__(self, num_blocks: int, free_order: str | None, discipline: str | None) -> None:
        self.num_usable = num_blocks - 1
        self.owners = [0] * num_blocks
        self.fences = [0] * num_blocks
        self.queue: list[int] = []  # exact only once every block has been handed out
        self.free_order = free_order
        self.discipline = discipline

    def free_ids(self) -> list[int]:
        """Ids without owner and fence, ascending."""
        ids = range(1, self.num_usable + 1)
        return [i for i in ids if not self.owners[i] and not self.fences[i]]

    def hand_out(self, ids: list[int]) -> None:
        """The manager has handed these out."""
        for block_id in ids:
            self.owners[block_id] = 1
            if block_id in self.queue:
                self.queue.remove(block_id)

    def give_up(self, ids: list[int], *, fenced: bool = False) -> None:
        """One owner less for each, and one fence more if `fenced`."""
        for block_id in self._in_free_order(ids):
            self.owners[block_id] -= 1
            self.fences[block_id] += fenced
            self._join_if_free(block_id)

    def lift(self, ids: list[int]) -> None:
        """One fence less for each."""
        for block_id in self._in_free_order(ids):
            self.fences[block_id] -= 1
            self._join_if_free(block_id)

    def _in_free_order(self, ids: list[int]) -> list[int]:
        if self.free_order == "by_id":
            return sorted(ids)
        return ids[::-1] if self.free_order == "reverse" else ids

    def _join_if_free(self, block_id: int) -> None:
        if self.owners[block_id] or self.fences[block_id]:
            return
        self.queue.insert(0 if self.discipline == "lifo" else len(self.queue), block_id)
        if self.discipline == "by_id":
            self.queue.sort()
