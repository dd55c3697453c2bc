"""Managers with one bug each, for every invariant of the kit at least one that breaks it.

All but the last differ from `Reference` by the few lines of their bug.
"""

from __future__ import annotations

from deepinfer.testing.conformance.managers.reference import Reference


class HandsOutBlockZero(Reference):
    """Block 0 is in the free list."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.free.append(0)


class KeepsTheLast(Reference):
    """Of several blocks, the last stays in the free list."""

    def allocate(self, count):
        ids = super().allocate(count)
        if ids and count > 1:
            self.free.append(ids[-1])
        return ids


class ForgetsPins(Reference):
    """A fork becomes no owner, and what nobody owns may be released."""

    def pin(self, table):
        pass

    def release(self, table):
        super().release([i for i in table if self.owners[i]])


class CountsOwnersUpToTwo(Reference):
    """The third owner is not counted."""

    def ref_count(self, block_id):
        return min(super().ref_count(block_id), 2)


class OneShort(Reference):
    """The last block of a table is not released."""

    def release(self, table):
        super().release(table[:-1] if len(table) > 1 else table)


class LeaksOnLift(Reference):
    """A block that had two fences never becomes free."""

    def lift(self, fence):
        for block_id in reversed(fence):
            self.fences[block_id] -= 1
            if not self.fences[block_id] and not self.owners[block_id] and len(fence) == 1:
                self.free.append(block_id)


class FreesWithFenceAndAgain(Reference):
    """A withheld block joins the free list, and joins it again when the fence is lifted."""

    def _free_if_done(self, block_id):
        if not self.owners[block_id]:
            self.free.append(block_id)


class CountsOnItsOwn(Reference):
    """The counter of free blocks is not told of those that come back behind a fence."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.count = num_blocks - 1

    def allocate(self, count):
        ids = super().allocate(count)
        self.count -= len(ids or ())
        return ids

    def release(self, table):
        before = len(self.free)
        super().release(table)
        self.count += len(self.free) - before

    def num_free(self):
        return self.count


class IgnoresFences(Reference):
    """A block is free as soon as nobody owns it."""

    def withhold(self, table):
        super().release(table)
        return ()


class OneFenceForAll(Reference):
    """The first fence that is lifted lifts the others of its blocks."""

    def lift(self, fence):
        for block_id in reversed(fence):
            if self.fences[block_id]:
                self.fences[block_id] = 0
                self._free_if_done(block_id)


class ReleasesTwice(Reference):
    """Nobody asks whether there is an owner to take away."""

    def _give_up(self, table, fences):
        for block_id in reversed(table):
            self.owners[block_id] = max(0, self.owners[block_id] - 1)
            self.fences[block_id] += fences
            self._free_if_done(block_id)


class TwoPasses(Reference):
    """All counts go down first; then every entry of the list without owners becomes free."""

    def release(self, table):
        for block_id in table:
            self.owners[block_id] -= 1
        for block_id in reversed(table):
            self._free_if_done(block_id)


class RefusesHalfway(Reference):
    """A release is refused at its first bad block, with those before it already given up."""

    def release(self, table):
        for block_id in reversed(table):
            super().release([block_id])


class PinsAnything(Reference):
    """Nobody asks whether a pinned block has an owner."""

    def pin(self, table):
        for block_id in table:
            self.owners[block_id] += 1


class TakesThenRefuses(Reference):
    """What there is has left the free list before the allocation is refused."""

    def allocate(self, count):
        ids = [self.free.popleft() for _ in range(min(count, len(self.free)))]
        if len(ids) < count:
            return None
        for block_id in ids:
            self.owners[block_id] = 1
        return ids


class WantsPinsUndone(Reference):
    """A block with two owners cannot be released."""

    def release(self, table):
        if any(self.owners[i] > 1 for i in table):
            raise RuntimeError("pinned")
        super().release(table)


class WantsARun(Reference):
    """Several blocks must have consecutive ids."""

    def allocate(self, count):
        free = sorted(self.free)
        for first in range(len(free) - count + 1):
            ids = free[first : first + count]
            if ids[-1] - ids[0] == count - 1:
                for block_id in ids:
                    self.free.remove(block_id)
                    self.owners[block_id] = 1
                return ids
        return None


class ForgetsBlockZero(Reference):
    """The limit counts block 0 as if it could be used."""

    def can_allocate(self, count):
        if count <= len(self.free):
            return "OK"
        return "LATER" if count <= len(self.owners) else "NEVER"


class KeepsOneBack(Reference):
    """The validator wants one block more than the allocator."""

    def can_allocate(self, count):
        verdict = super().can_allocate(count)
        return "LATER" if verdict == "OK" and count == len(self.free) else verdict


class PromisesLifo(Reference):
    """It says that the block freed last is used first, and is a queue."""

    discipline = "lifo"


class PromisesForward(Reference):
    """It says that the first block of a table is free first."""

    free_order = "forward"


class OtherOrderOnLift(Reference):
    """Behind a fence, the first block of a table is free first."""

    def lift(self, fence):
        super().lift(fence[::-1])


class Bare:
    """Allocates and releases, and promises and shows nothing else; its bug is a double free."""

    def __init__(self, num_blocks):
        self.free = list(range(1, num_blocks))

    def allocate(self, count):
        if count > len(self.free):
            raise IndexError("not so many")
        return [self.free.pop() for _ in range(count)]

    def release(self, table):
        self.free += table
