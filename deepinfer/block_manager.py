"""Who owns which block, and which block is handed out next. Ids only: no torch, no tokens.

A block is in exactly one of three states, read off two counters:

    owned      ref_count > 0                     somebody may still read or write it
    withheld   ref_count == 0, num_fences > 0    given up, but queued device work may touch it
    free       ref_count == 0, num_fences == 0   in the free list, exactly once

Block 0 is never handed out, so 0 in a table means "no block". The manager does not know what a
fence is, only that one was put on a block (`release(fenced=True)`) and lifted (`lift`); which
fences, and when they are lifted, is `deepinfer.release`.

Invariant: free + owned + withheld + 1 = num_blocks. A refused call changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import OutOfBlocksError, OwnershipError, UserError, check_int, check_name
from deepinfer.free_list import SCALAR_LIMIT, Ids, make_free_list
from deepinfer.names import DISCIPLINES, FREE_ORDERS

BlockIds = Sequence[int] | Ids
Rows = NDArray[np.intp]


class Verdict(Enum):
    """Whether a number of blocks fits: now, after somebody gives some up, or never in this pool."""

    OK = "OK"
    LATER = "LATER"
    NEVER = "NEVER"


class BlockManager:
    """A pool of `num_blocks` block ids with owner counts.

    Args:
        num_blocks: pool size, block 0 included.
        free_order: in which order one table's blocks join the free list.
        discipline: where they join and leave it; see `deepinfer.free_list`.
        seed: of the `shuffled` order.

    The first allocations hand out 1, 2, 3, ... under every discipline.
    """

    free_orders = FREE_ORDERS  # those it can do

    def __init__(
        self,
        num_blocks: int,
        *,
        free_order: str = "reverse",
        discipline: str = "fifo",
        seed: int = 0,
    ) -> None:
        check_int("num_blocks", num_blocks, 0)
        check_int("seed", seed, 0)
        if num_blocks < 2:
            raise UserError(f"num_blocks: {num_blocks} leaves no usable block; needs at least 2")
        check_name("free_order", free_order, self.free_orders)
        check_name("discipline", discipline, DISCIPLINES)
        self.num_blocks = num_blocks
        self.free_order = free_order
        self.discipline = discipline
        self._ref_counts, self._refs = _counters(num_blocks)
        self._fence_counts, self._fences = _counters(num_blocks)
        self._stamps = np.zeros(num_blocks, dtype=np.int32)
        self._order = np.arange(num_blocks, dtype=np.int32)
        self._ones = np.ones(num_blocks, dtype=np.int32)
        self._order_rng = np.random.default_rng(seed)
        self._num_withheld = 0
        self._num_fences = 0
        self._free = make_free_list(discipline, num_blocks)
        first_ids = np.arange(1, num_blocks, dtype=np.int32)
        self._free.push(first_ids[::-1] if discipline == "lifo" else first_ids)

    # -- looking ---------------------------------------------------------------------------------

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be handed out: all but block 0."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def num_withheld(self) -> int:
        """Blocks given up by their last owner that a fence still keeps."""
        return self._num_withheld

    @property
    def num_held(self) -> int:
        """Blocks with at least one owner."""
        return self.num_usable - self.num_free - self._num_withheld

    def ref_count(self, block_id: int) -> int:
        """Owners of one block."""
        return self._ref_counts[block_id]

    def ref_counts(self, block_ids: Ids) -> Ids:
        """Owners of each block, int32 [n]."""
        return self._refs[block_ids]

    def free_ids(self) -> list[int]:
        """The free list, in the order in which it would be handed out."""
        return list(self._free)

    def can_allocate(self, count: int) -> Verdict:
        """OK: `count` blocks are free. LATER: they may become free. NEVER: the pool is smaller."""
        if count <= len(self._free):
            return Verdict.OK
        return Verdict.LATER if count <= self.num_usable else Verdict.NEVER

    # -- changing hands --------------------------------------------------------------------------

    def allocate(self, count: int) -> Ids:
        """Hand out `count` blocks with one owner each: int32 [count], a fresh array.

        Raises:
            OutOfBlocksError: fewer than `count` are free.
        """
        if not 0 <= count <= len(self._free):
            raise OutOfBlocksError(f"asked for {count} blocks, {self._describe()}")
        ids = self._free.take(count)
        self._refs[ids.astype(np.intp)] = (
            1  # numpy indexes by intp at a fifth of the price of int32
        )
        return ids

    def allocate_one(self) -> int:
        """Hand out one block; `allocate(1)[0]` at a third of the price."""
        if not len(self._free):
            raise OutOfBlocksError(f"asked for 1 block, {self._describe()}")
        block_id = self._free.take_one()
        self._ref_counts[block_id] = 1
        return block_id

    def pin(self, block_ids: BlockIds) -> None:
        """Add one owner to each block; an id named twice gains two.

        Raises:
            OwnershipError: a block is free, withheld or no block at all. No count has changed.
        """
        if len(block_ids) > SCALAR_LIMIT:
            ids = np.asarray(block_ids, dtype=np.int32)
            index, counts = self._owned_counts(ids, "pin")
            if self._all_different(index):
                self._refs[index] = counts + 1
                return
        counts_array, values = self._ref_counts, _as_list(block_ids)
        for block_id in values:
            self._check_id(block_id, "pin")
            if not counts_array[block_id]:
                raise OwnershipError(f"cannot pin block {block_id}: {self._state(block_id)}")
        for block_id in values:
            counts_array[block_id] += 1

    def in_free_order(self, table: BlockIds) -> BlockIds:
        """The blocks of one table in the order in which they are to join the free list."""
        if self.free_order == "reverse":
            return table[::-1]
        if self.free_order == "forward":
            return table
        if self.free_order == "by_id":
            return sorted(table) if isinstance(table, list) else np.sort(table)
        return self._order_rng.permutation(np.asarray(table, dtype=np.int32))

    def release(self, table: BlockIds, *, fenced: bool = False) -> BlockIds:
        """Drop one owner of each block, in the free order; those without owners become free.

        With `fenced` each block also gets a fence, and becomes free only when that and every
        other fence on it has been lifted.

        Returns:
            The ids in the order in which they were visited; `lift` wants them like this.

        Raises:
            OwnershipError: a block has fewer owners than it is named here. Nothing has changed.
        """
        ids = self.in_free_order(table)
        if len(ids) <= SCALAR_LIMIT:
            ids = _as_list(ids)
            without_owner: BlockIds = self._drop_owners(ids)
        else:
            ids = np.ascontiguousarray(ids, dtype=np.int32)
            without_owner = self._drop_owners_at_once(ids)
        if fenced:
            self._add_fences(ids)
            self._num_withheld += len(without_owner)
        elif self._num_fences:
            self._free_unfenced(without_owner)
        else:
            self._free.push(without_owner)
        return ids

    def lift(self, block_ids: BlockIds) -> None:
        """Take one fence off each block, in order; without fence and owner it becomes free.

        Raises:
            OwnershipError: a block has no fence left. Nothing has changed.
        """
        free = self._lift_at_once(block_ids) if len(block_ids) > SCALAR_LIMIT else None
        if free is None:
            free = self._lift_one_by_one(_as_list(block_ids))
        self._num_fences -= len(block_ids)
        self._num_withheld -= len(free)
        self._free.push(free)

    # -- proof -----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise OwnershipError unless every counter agrees with a walk over the whole pool."""
        free = self.free_ids()
        owned = int(np.count_nonzero(self._refs > 0))
        withheld = int(np.count_nonzero((self._refs == 0) & (self._fences > 0)))
        problems = []
        if len(set(free)) != len(free):
            problems.append("a block is in the free list twice")
        if len(free) != len(self._free):
            problems.append(f"the free list counts {len(self._free)} but holds {len(free)}")
        if any(self._refs[b] or self._fences[b] or not 0 < b < self.num_blocks for b in free):
            problems.append("the free list holds a block that is owned, withheld or no block")
        if self._refs.min() < 0 or self._fences.min() < 0:
            problems.append("a counter is negative")
        if self._refs[0] or self._fences[0]:
            problems.append("block 0 was handed out")
        if withheld != self._num_withheld or owned != self.num_held:
            problems.append("the counters of owned and withheld blocks are off")
        if len(free) + owned + withheld + 1 != self.num_blocks:
            problems.append(f"{len(free)} free + {owned} owned + {withheld} withheld + 1 is off")
        if problems:
            raise OwnershipError(f"pool of {self.num_blocks}: " + "; ".join(problems))

    # -- inside ----------------------------------------------------------------------------------

    def _drop_owners(self, ids: list[int]) -> list[int]:
        counts, without_owner = self._ref_counts, []
        for index, block_id in enumerate(ids):
            count = counts[block_id] if 0 < block_id < self.num_blocks else 0
            if count <= 0:
                for done in ids[:index]:
                    counts[done] += 1
                self._check_id(block_id, "release")
                raise OwnershipError(f"cannot release block {block_id}: {self._state(block_id)}")
            counts[block_id] = count - 1
            if count == 1:
                without_owner.append(block_id)
        return without_owner

    def _add_fences(self, ids: BlockIds) -> None:
        self._num_fences += len(ids)
        if len(ids) > SCALAR_LIMIT:
            index = np.asarray(ids).astype(np.intp)
            if self._all_different(index):
                self._fences[index] += 1
                return
        for block_id in _as_list(ids):
            self._fence_counts[block_id] += 1

    def _lift_at_once(self, block_ids: BlockIds) -> BlockIds | None:
        """The ids that became free; None, and nothing done, where only a walk is safe."""
        ids = np.asarray(block_ids, dtype=np.int32)
        if ids.min() < 0 or ids.max() >= self.num_blocks:
            return None
        index = ids.astype(np.intp)
        fences = self._fences.take(index)
        if fences.min() <= 0 or not self._all_different(index):
            return None
        fences -= 1
        self._fences[index] = fences
        fences |= self._refs.take(index)
        if not np.count_nonzero(fences):
            return ids
        free: Ids = ids[fences == 0]
        return free

    def _lift_one_by_one(self, ids: list[int]) -> list[int]:
        fences, refs = self._fence_counts, self._ref_counts
        free: list[int] = []
        for index, block_id in enumerate(ids):
            if (fences[block_id] if 0 < block_id < self.num_blocks else 0) <= 0:
                for done in ids[:index]:
                    fences[done] += 1
                self._check_id(block_id, "lift the fence of")
                raise OwnershipError(f"cannot lift a fence of block {block_id}: it has none")
            fences[block_id] -= 1
            if not fences[block_id] and not refs[block_id]:
                free.append(block_id)
        return free

    def _free_unfenced(self, without_owner: BlockIds) -> None:
        ids = np.asarray(without_owner, dtype=np.int32)
        unfenced = ids[self._fences[ids] == 0]
        self._num_withheld += len(ids) - len(unfenced)
        self._free.push(unfenced)

    def _drop_owners_at_once(self, ids: Ids) -> BlockIds:
        index, counts = self._owned_counts(ids, "release")
        if not self._all_different(index):
            return self._drop_owners(ids.tolist())
        if self._all_ones(counts):  # the usual table: nobody shares
            self._refs[index] = 0
            return ids
        counts -= 1
        self._refs[index] = counts
        without_owner: Ids = ids[counts == 0]
        return without_owner

    def _owned_counts(self, ids: Ids, verb: str) -> tuple[Rows, Ids]:
        """`ids` as numpy indexes best, intp [n], and their owner counts, all of them > 0."""
        index = ids.view(np.uint32).astype(np.intp)  # negative ids become huge ones
        try:
            counts = self._refs.take(index)
        except IndexError:
            for block_id in ids.tolist():
                self._check_id(block_id, verb)
            raise
        if not self._all_ones(counts) and counts.min() <= 0:
            block_id = int(ids[int(np.argmin(counts))])
            self._check_id(block_id, verb)
            raise OwnershipError(f"cannot {verb} block {block_id}: {self._state(block_id)}")
        return index, counts

    def _all_ones(self, counts: Ids) -> bool:
        # A memcmp costs a tenth of a numpy comparison and reduction.
        return counts.tobytes() == self._ones[: len(counts)].tobytes()

    def _all_different(self, index: Rows) -> bool:
        if len(index) > self.num_blocks:  # then some id is there twice
            return False
        order = self._order[: len(index)]
        self._stamps[index] = order  # of equal ids only the last keeps its stamp
        return self._stamps.take(index).tobytes() == order.tobytes()

    def _check_id(self, block_id: int, verb: str) -> None:
        if not 0 < block_id < self.num_blocks:
            raise OwnershipError(
                f"cannot {verb} block {block_id}: ids run from 1 to {self.num_usable}"
            )

    def _state(self, block_id: int) -> str:
        if self._ref_counts[block_id] > 0:
            return f"it has {self._ref_counts[block_id]} owners"
        return "it is withheld" if self._fence_counts[block_id] else "it is free"

    def _describe(self) -> str:
        return (
            f"{self.num_free} are free ({self.num_held} owned, {self._num_withheld} withheld, "
            f"{self.num_usable} usable in all)"
        )


def _counters(size: int) -> tuple[array[int], NDArray[np.int32]]:
    """One block of memory seen twice: fast for single ids, and fast for many."""
    memory = array("i", bytes(4 * size))
    return memory, np.frombuffer(memory, dtype=np.int32)


def _as_list(ids: BlockIds) -> list[int]:
    if isinstance(ids, list):
        return ids
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
