"""The yardstick of the host profile: the simplest block pool one would write in Python.

A deque of free ids and a list of owner counts, written with care for speed but without a second
idea. Knows nothing of what it is compared with. Invariant: a free block is in the deque once and
has no owner; a block with owners is not in it.
"""

from __future__ import annotations

from collections import deque


class PlainPool:
    """`num_blocks` block ids with owner counts; block 0 is never handed out, tables are lists.

    Like `deepinfer.block_manager` it hands out from the front, takes back a table's last block
    first, and refuses (RuntimeError) what would break ownership; unlike it, a refused call may have
    changed something, and nothing can be withheld.
    """

    def __init__(self, num_blocks: int) -> None:
        self.free = deque(range(1, num_blocks))
        self.ref_counts = [0] * num_blocks

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one owner each."""
        free, ref_counts = self.free, self.ref_counts
        if count > len(free):
            raise RuntimeError(f"asked for {count} of {len(free)} free blocks")
        ids = []
        for _ in range(count):
            block_id = free.popleft()
            ref_counts[block_id] = 1
            ids.append(block_id)
        return ids

    def pin(self, ids: list[int]) -> None:
        """Add one owner to each block."""
        ref_counts = self.ref_counts
        for block_id in ids:
            if block_id < 1 or ref_counts[block_id] < 1:
                raise RuntimeError(f"block {block_id} has no owner")
            ref_counts[block_id] += 1

    def release(self, ids: list[int]) -> None:
        """Drop one owner of each block, last block first."""
        free, ref_counts = self.free, self.ref_counts
        for block_id in reversed(ids):
            count = ref_counts[block_id]
            if block_id < 1 or count < 1:
                raise RuntimeError(f"block {block_id} has no owner")
            ref_counts[block_id] = count - 1
            if count == 1:
                free.append(block_id)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless free and owned blocks make up the pool."""
        num_owned = sum(count > 0 for count in self.ref_counts)
        if len(set(self.free)) + num_owned + 1 != len(self.ref_counts):
            raise RuntimeError("the plain pool lost a block")
