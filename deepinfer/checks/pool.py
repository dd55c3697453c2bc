"""Conservation in one pool: ids, owners, fences and free order add up after every call.

Books of its own (`ledger`, `free_order`) are held against three things that do not know of one
another: the pool's counters, the holders that somebody else counts (`holders`), and its release
queue. Knows no policy, and not what the ids are. Invariant: a contradiction that persists is one
finding; the books are then set right, so it makes no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from deepinfer.block_manager import BlockManager
from deepinfer.checks.findings import Findings
from deepinfer.checks.free_order import ExpectedFreeList, PendingLifts, in_order
from deepinfer.checks.host import FenceQueue, Host
from deepinfer.checks.ledger import Index, Ledger
from deepinfer.checks.plans import Contradiction, first_of
from deepinfer.observer import BlockIds


class PoolChecker(Ledger):
    """Follows every change of one pool.

    Args:
        thing: what an id is, for messages.
    """

    def __init__(self, findings: Findings, thing: str) -> None:
        self._findings = findings
        self._thing = thing
        self._standing: dict[str, set[tuple[object, ...]]] = {}  # reported, and not yet gone
        self._lifts = PendingLifts()

    def watch(self, host: Host, pool: BlockManager, release: FenceQueue, size: int) -> None:
        """Whose ids these are. What the pool does not offer is not checked."""
        self.host = host
        self.open(size)
        self._pool, self._release = pool, release
        self._all = np.arange(size, dtype=np.int32)
        self._free_order: str | None = getattr(pool, "free_order", None)
        discipline: str | None = getattr(pool, "discipline", None)
        self._free = ExpectedFreeList(size, discipline) if discipline else None
        self._keyed, self._was_hit = set[int](), set[int]()

    # -- what changes ----------------------------------------------------------------------------

    def allocated(self, ids: BlockIds) -> None:
        """Only free blocks are handed out, each once, and the next ones of the free list."""
        index = np.asarray(ids, np.intp)
        usable = self.usable(ids)
        if len(usable) < len(index):
            self._add(f"handed out {index.tolist()}; ids run from 1 to {self.num_blocks - 1}")
        if len(np.unique(index)) < len(index):
            self._add(f"handed out {index.tolist()}: one {self._thing} twice at once")
        kept = usable[(self.refs[usable] > 0) | (self.fences[usable] > 0)]
        owners = self.names.of(kept)
        for block_id in np.unique(kept).tolist():
            state = "withheld" if not self.refs[block_id] else "owned"
            if block_id in owners:
                state += f" by {owners[block_id]}"
            release = self.releases[block_id]
            history = f"; {release}" if release is not None else ""
            self._add(f"{self._thing} {block_id} was handed out while {state}{history}")
        if self._free is not None:
            expected = self._free.leave(index.tolist())
            if expected is not None and not len(kept):
                self._add(f"handed out {index.tolist()}; next in the free list were {expected}")
        self._keyed.difference_update(index.tolist())
        self._was_hit.difference_update(index.tolist())
        super().allocated(ids)

    def pinned(self, ids: BlockIds) -> None:
        """Only owned blocks gain owners."""
        index = self.usable(ids)
        without = np.unique(index[self.refs[index] == 0])
        if len(without):
            self._add(f"{self._thing}s {first_of(without)} were pinned, and nobody owns them")
        super().pinned(ids)

    def published(self, block_id: int) -> None:
        """Only an owned block begins to be found."""
        if not self.refs[block_id]:
            self._add(f"{self._thing} {block_id} was published, and nobody owns it")
        self._keyed.add(block_id)

    def hit(self, ids: BlockIds) -> None:
        """Only blocks that hold something are found; free ones leave the free list."""
        found = listed(ids)
        without = np.array([block_id for block_id in found if block_id not in self._keyed], np.intp)
        if len(without):
            self._add(f"{self._thing}s {first_of(without)} were hit, and hold nothing")
        if self._free is not None:
            index = self.usable(ids)
            came = set(index[(self.refs[index] == 0) & (self.fences[index] == 0)].tolist())
            self._free.ids = [block_id for block_id in self._free.ids if block_id not in came]
        self._was_hit.update(found)
        super().hit(ids)

    def released(self, table: BlockIds, ids: BlockIds, fenced: bool) -> None:
        """Only owned blocks are released, in the free order."""
        visited, in_table = listed(ids), listed(table)
        order = self._free_order
        if order is not None and not in_order(order, in_table, visited, self._keyed):
            self._add(f"table {in_table} was released as {visited}, not {order}")
        index = self.usable(ids)
        times = np.bincount(index, minlength=self.num_blocks)[index]
        for block_id in np.unique(index[times > self.refs[index]]).tolist():
            self._add(
                f"{self._thing} {block_id} of {self.refs[block_id]} owners was released; before "
                f"that {self.releases[block_id] or 'never'}"
            )
        super().released(table, ids, fenced)
        if fenced:
            self._lifts.add(visited)
        else:
            self._join(index[self.refs[index] == 0])

    def lifted(self, ids: BlockIds) -> None:
        """Fences come off in the order in which they were put on."""
        problem = self._lifts.lift(listed(ids))
        if problem:
            self._add(problem)
        super().lifted(ids)
        index = self.usable(ids)
        self._join(index[self.refs[index] == 0])

    # -- what must hold --------------------------------------------------------------------------

    def _counters(self) -> Iterator[Contradiction]:
        """free + owned + withheld + 1 = num_blocks, by the books, the counters and a walk."""
        blocks = self._pool
        owned = int(np.count_nonzero(self.refs))
        withheld = int(np.count_nonzero((self.refs == 0) & (self.fences > 0)))
        free = self.num_blocks - 1 - owned - withheld
        for name, expected in (("free", free), ("held", owned), ("withheld", withheld)):
            counted = getattr(blocks, f"num_{name}", expected)
            if counted != expected:
                yield (
                    (name,),
                    f"the manager counts {counted} {self._thing}s {name}, the books {expected}",
                )
        if hasattr(blocks, "ref_counts"):
            refs = blocks.ref_counts(self._all)
            for block_id in np.flatnonzero(refs != self.refs).tolist():
                yield (
                    ("ref_count", block_id),
                    f"the manager counts {int(refs[block_id])} owners of {self._thing} {block_id}, "
                    f"the books {int(self.refs[block_id])}",
                )
        if hasattr(blocks, "free_ids"):
            yield from self._free_list(blocks.free_ids())

    def _free_list(self, found: list[int]) -> Iterator[Contradiction]:
        if self._free is not None and found == self._free.ids:
            return
        ids = np.asarray(found, np.intp)
        twice = np.flatnonzero(np.bincount(ids[ids >= 0]) > 1)
        if len(twice):
            yield ("twice",), f"{self._thing}s {first_of(twice)} are in the free list twice"
        expected = np.flatnonzero((self.refs == 0) & (self.fences == 0))[1:]
        lost, extra = np.setdiff1d(expected, ids), np.setdiff1d(ids, expected)
        if len(lost):
            yield ("lost",), f"free {self._thing}s {first_of(lost)} are not in the free list"
        if len(extra):
            yield ("extra",), f"the free list holds {first_of(extra)}, which are not free"
        if self._free is not None:
            if not (len(twice) or len(lost) or len(extra)):
                at = int(np.flatnonzero(ids != self._free.ids)[0])
                yield (
                    ("order", at),
                    f"the free list has {self._thing} {found[at]} at place {at}; in the order "
                    f"in which {self._thing}s came free it is {self._free.ids[at]}",
                )
            self._free.ids = found

    def _held(self, parts: Sequence[BlockIds]) -> Iterator[Contradiction]:
        """Each id has as many owners as these lists name it."""
        ids = self.usable(np.concatenate([np.asarray(part, np.int32) for part in parts]))
        holders = np.bincount(ids, minlength=self.num_blocks)
        for number in np.flatnonzero(holders != self.refs).tolist():
            named = self.names.of(np.array([number], np.intp)).get(number, "nobody by name")
            yield (
                ("holders", number),
                f"{self._thing} {number} has {int(self.refs[number])} owners and is in "
                f"{int(holders[number])} tables; it was taken by {named}; last "
                f"{self.releases[number] or 'never given up'}",
            )

    def _fences(self) -> Iterator[Contradiction]:
        """Each fence on a block is in the release queue, and can pass."""
        waiting = self._release.fenced()
        idle = self.host.in_flight is None
        if not waiting and not self.fences.any():
            return
        ids = [np.asarray(ids, np.int32) for ids, _ in waiting] or [np.empty(0, np.int32)]
        queued = np.bincount(self.usable(np.concatenate(ids)), minlength=self.num_blocks)
        for block_id in np.flatnonzero(queued != self.fences).tolist():
            yield (
                ("fences", block_id),
                f"{self._thing} {block_id} has {int(self.fences[block_id])} fences, and "
                f"{queued[block_id]} releases of it wait; {self.releases[block_id]}",
            )
        for stuck, fence in waiting:
            if idle and fence.event is None and not fence.passed:
                yield (
                    ("stuck", *listed(stuck)),
                    f"{self._thing}s {listed(stuck)} wait for the result of a step, and none is "
                    f"in flight",
                )
        left = np.flatnonzero(self.fences)
        if idle and len(left) and not self.host.running and not self.host.waiting:
            yield (
                ("idle",),
                f"no request is live, and {self._thing}s {first_of(left)} are still withheld",
            )

    # -- small change ----------------------------------------------------------------------------

    def _join(self, came_free: Index) -> None:
        """Blocks without an owner, and some of them without a fence, in order."""
        if self._free is None:
            return
        ids = came_free[self.fences[came_free] == 0].tolist()
        if len(set(ids)) < len(ids):  # released twice in one table: free at the second
            ids = list(dict.fromkeys(reversed(ids)))[::-1]
        if self._free_order == "reverse_unhashed_head":
            self._free.ids[:0] = [i for i in reversed(ids) if i not in self._keyed]
            ids = [i for i in ids if i in self._keyed]
        elif self._free_order == "never_hit_first":
            never = [i for i in ids if i not in self._was_hit]
            self._free.join_before(never, self._was_hit)
            ids = [i for i in ids if i in self._was_hit]
        self._free.join(ids)

    def _report(self, what: str, step: int, contradictions: Iterable[Contradiction]) -> None:
        """Report what was not wrong the last time."""
        before, now = self._standing.get(what, set()), set()
        for key, message in contradictions:
            if key not in before and key not in now:
                self._findings.add("conservation", step, message)
            now.add(key)
        self._standing[what] = now

    def _add(self, message: str) -> None:
        self._findings.add("conservation", self.host.num_steps, message)


def listed(ids: BlockIds) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else [int(block_id) for block_id in ids]
