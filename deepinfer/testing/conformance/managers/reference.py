"""A block manager of a deque and two lists: what the words of the kit mean, readable at a glance.

Knows nothing of speed. Invariant: a block is in `free` once, or has an owner, or has a fence.
"""

from __future__ import annotations

from collections import deque


class Reference:
    """Every optional member, in the plainest form; `fifo`, last block of a table first."""

    free_order = "reverse"
    discipline = "fifo"

    def __init__(self, num_blocks: int) -> None:
        self.owners = [0] * num_blocks
        self.fences = [0] * num_blocks
        self.free = deque(range(1, num_blocks))

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        ids = [self.free.popleft() for _ in range(count)]
        for block_id in ids:
            self.owners[block_id] = 1
        return ids

    def pin(self, table: list[int]) -> None:
        for block_id in table:
            if not self.owners[block_id]:
                raise ValueError(f"pin of block {block_id}, which nobody owns")
        for block_id in table:
            self.owners[block_id] += 1

    def release(self, table: list[int]) -> None:
        self._give_up(table, fences=0)

    def withhold(self, table: list[int]) -> tuple[int, ...]:
        self._give_up(table, fences=1)
        return tuple(table)

    def lift(self, fence: tuple[int, ...]) -> None:
        for block_id in reversed(fence):
            self.fences[block_id] -= 1
            self._free_if_done(block_id)

    def num_free(self) -> int:
        return len(self.free)

    def free_ids(self) -> list[int]:
        return list(self.free)

    def ref_count(self, block_id: int) -> int:
        return self.owners[block_id]

    def can_allocate(self, count: int) -> str:
        if count <= len(self.free):
            return "OK"
        return "LATER" if count < len(self.owners) else "NEVER"

    def _give_up(self, table: list[int], fences: int) -> None:
        for block_id in table:
            if table.count(block_id) > self.owners[block_id]:
                raise ValueError(f"block {block_id} has {self.owners[block_id]} owners")
        for block_id in reversed(table):
            self.owners[block_id] -= 1
            self.fences[block_id] += fences
            self._free_if_done(block_id)

    def _free_if_done(self, block_id: int) -> None:
        if not self.owners[block_id] and not self.fences[block_id]:
            self.free.append(block_id)
