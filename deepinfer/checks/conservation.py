"""Conservation: blocks, owners, fences, free order and tables add up after every call.

Books of its own (`ledger`, `free_order`) are held against three things that do not know of one
another: the block manager's counters, the holders counted from tables, and the plan. Knows no
policy. Invariant: a contradiction that persists is one finding; the books are then set right, so it
makes no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from deepinfer.checks.findings import Findings
from deepinfer.checks.free_order import ExpectedFreeList, PendingLifts, in_order
from deepinfer.checks.host import Host
from deepinfer.checks.ledger import Index, Ledger
from deepinfer.checks.plans import Contradiction, PlanCheck, first_of
from deepinfer.observer import KV, Access, BlockIds
from deepinfer.plan import Int32, StepPlan
from deepinfer.sequence import Sequence as Request
from deepinfer.sequence import blocks_for

Holder = Callable[[], Iterable[BlockIds]]


class ConservationChecker(Ledger):
    """Follows every change, looks at every plan (`planned`) and after every call (`settled`).

    Attributes:
        others: clients that hold pins of their own; each gives the blocks it holds now. A hook: an
            engine has no such clients itself.
    """

    def __init__(self, block_size: int, findings: Findings) -> None:
        self.others: list[Holder] = []
        self._block_size = block_size
        self._findings = findings
        self._standing: dict[str, set[tuple[object, ...]]] = {}  # reported, and not yet gone
        self._lifts = PendingLifts()
        self._newest = -1  # arrival of the last request looked at

    def bind(self, host: Host) -> None:
        """Whose requests and blocks these are. What the manager does not offer is not checked."""
        super().bind(host)
        self._filled = np.zeros(self.num_blocks, np.int32)  # rows written in this epoch
        self._sees_writes = False
        self._all = np.arange(self.num_blocks, dtype=np.int32)
        self._free_order: str | None = getattr(host.blocks, "free_order", None)
        discipline: str | None = getattr(host.blocks, "discipline", None)
        self._free = ExpectedFreeList(self.num_blocks, discipline) if discipline else None

    # -- what changes ----------------------------------------------------------------------------

    def allocated(self, ids: BlockIds) -> None:
        """Only free blocks are handed out, each once, and the next ones of the free list."""
        index = np.asarray(ids, np.intp)
        usable = self.usable(ids)
        if len(usable) < len(index):
            self._add(f"handed out {index.tolist()}; ids run from 1 to {self.num_blocks - 1}")
        if len(np.unique(index)) < len(index):
            self._add(f"handed out {index.tolist()}: a block twice at once")
        kept = usable[(self.refs[usable] > 0) | (self.fences[usable] > 0)]
        owners = self.names.of(kept)
        for block_id in np.unique(kept).tolist():
            state = "withheld" if not self.refs[block_id] else "owned"
            if block_id in owners:
                state += f" by {owners[block_id]}"
            release = self.releases[block_id]
            history = f"; {release}" if release is not None else ""
            self._add(f"block {block_id} was handed out while {state}{history}")
        if self._free is not None:
            expected = self._free.leave(index.tolist())
            if expected is not None and not len(kept):
                self._add(f"handed out {index.tolist()}; next in the free list were {expected}")
        super().allocated(ids)
        self._filled[usable] = 0

    def pinned(self, ids: BlockIds) -> None:
        """Only owned blocks gain owners."""
        index = self.usable(ids)
        without = np.unique(index[self.refs[index] == 0])
        if len(without):
            self._add(f"blocks {first_of(without)} were pinned, and nobody owns them")
        super().pinned(ids)

    def released(self, table: BlockIds, ids: BlockIds, fenced: bool) -> None:
        """Only owned blocks are released, in the free order."""
        visited, in_table = _listed(ids), _listed(table)
        if self._free_order is not None and not in_order(self._free_order, in_table, visited):
            self._add(f"table {in_table} was released as {visited}, not {self._free_order}")
        index = self.usable(ids)
        times = np.bincount(index, minlength=self.num_blocks)[index]
        for block_id in np.unique(index[times > self.refs[index]]).tolist():
            self._add(
                f"block {block_id} of {self.refs[block_id]} owners was released; before that "
                f"{self.releases[block_id] or 'never'}"
            )
        super().released(table, ids, fenced)
        if fenced:
            self._lifts.add(visited)
        else:
            self._join(index[self.refs[index] == 0])

    def lifted(self, ids: BlockIds) -> None:
        """Fences come off in the order in which they were put on."""
        problem = self._lifts.lift(_listed(ids))
        if problem:
            self._add(problem)
        super().lifted(ids)
        index = self.usable(ids)
        self._join(index[self.refs[index] == 0])

    def submitted(
        self, stream: str, label: str, reads: Sequence[Access], writes: Sequence[Access]
    ) -> None:
        """Rows written count as filled, up to the last one."""
        for access in writes:
            if access.kind == KV:
                self._sees_writes = True
                inside = (access.ids > 0) & (access.ids < self.num_blocks)
                end = self._block_size if access.end is None else access.end[inside]
                np.maximum.at(self._filled, access.ids[inside].astype(np.intp), end)

    # -- what must hold --------------------------------------------------------------------------

    def planned(self, plan: StepPlan) -> None:
        """The plan stays inside what its requests own."""
        filled = self._filled if self._sees_writes else None
        check = PlanCheck(plan, self.host.seqs, self.refs, filled, self._name)
        self._report("plan", plan.step, check.contradictions())
        self._report("holders", plan.step, self._holders(plan.copy_sources))

    def settled(self, step: int) -> None:
        """Everything adds up."""
        self._report("counters", step, self._counters())
        self._report("holders", step, self._holders(()))
        self._report("fences", step, self._fences())
        self._report("requests", step, self._requests())

    def _counters(self) -> Iterator[Contradiction]:
        """free + owned + withheld + 1 = num_blocks, by the books, the counters and a walk."""
        blocks = self.host.blocks
        owned = int(np.count_nonzero(self.refs))
        withheld = int(np.count_nonzero((self.refs == 0) & (self.fences > 0)))
        free = self.num_blocks - 1 - owned - withheld
        for name, expected in (("free", free), ("held", owned), ("withheld", withheld)):
            counted = getattr(blocks, f"num_{name}", expected)
            if counted != expected:
                yield (name,), f"the manager counts {counted} blocks {name}, the books {expected}"
        if hasattr(blocks, "ref_counts"):
            refs = blocks.ref_counts(self._all)
            for block_id in np.flatnonzero(refs != self.refs).tolist():
                yield (
                    ("ref_count", block_id),
                    f"the manager counts {int(refs[block_id])} owners of block {block_id}, "
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
            yield ("twice",), f"blocks {first_of(twice)} are in the free list twice"
        expected = np.flatnonzero((self.refs == 0) & (self.fences == 0))[1:]
        lost, extra = np.setdiff1d(expected, ids), np.setdiff1d(ids, expected)
        if len(lost):
            yield ("lost",), f"free blocks {first_of(lost)} are not in the free list"
        if len(extra):
            yield ("extra",), f"the free list holds {first_of(extra)}, which are not free"
        if self._free is not None:
            if not (len(twice) or len(lost) or len(extra)):
                at = int(np.flatnonzero(ids != self._free.ids)[0])
                yield (
                    ("order", at),
                    f"the free list has block {found[at]} at place {at}; in the order in which "
                    f"blocks came free it is {self._free.ids[at]}",
                )
            self._free.ids = found

    def _holders(self, pending: Sequence[Int32]) -> Iterator[Contradiction]:
        """Each block has as many owners as there are tables and pins that name it; no table has a
        hole in it, or an id behind its end."""
        host, seqs = self.host, self.host.seqs
        rows = np.array([seq.row for seq in host.running], np.intp)
        lengths = seqs.num_blocks[rows]
        tables = seqs.block_tables[rows, : int(lengths.max(initial=0)) + 1]
        inside = np.arange(tables.shape[1]) < lengths[:, None]
        held = tables[inside]
        wrong = np.where(inside, (tables <= 0) | (tables >= self.num_blocks), tables != 0).any(1)
        for row in rows[wrong].tolist():
            yield (
                ("table", row),
                f"the table of {self._name(row)}, {int(seqs.num_blocks[row])} blocks long, is "
                f"{seqs.block_tables[row].tolist()}",
            )
        parts = [held, *pending, *(ids for other in self.others for ids in other())]
        parts += [seq.forked_table for seq in host.waiting if len(seq.forked_table)]
        ids = self.usable(np.concatenate([np.asarray(part, np.int32) for part in parts]))
        holders = np.bincount(ids, minlength=self.num_blocks)
        for block_id in np.flatnonzero(holders != self.refs).tolist():
            named = self.names.of(np.array([block_id], np.intp)).get(block_id, "nobody by name")
            yield (
                ("holders", block_id),
                f"block {block_id} has {int(self.refs[block_id])} owners and is in "
                f"{int(holders[block_id])} tables; it was taken by {named}; last "
                f"{self.releases[block_id] or 'never given up'}",
            )

    def _fences(self) -> Iterator[Contradiction]:
        """Each fence on a block is in the release queue, and can pass."""
        waiting = self.host.release.fenced()
        idle = self.host.in_flight is None
        if not waiting and not self.fences.any():
            return
        ids = [np.asarray(ids, np.int32) for ids, _ in waiting] or [np.empty(0, np.int32)]
        queued = np.bincount(self.usable(np.concatenate(ids)), minlength=self.num_blocks)
        for block_id in np.flatnonzero(queued != self.fences).tolist():
            yield (
                ("fences", block_id),
                f"block {block_id} has {int(self.fences[block_id])} fences, and {queued[block_id]} "
                f"releases of it wait; {self.releases[block_id]}",
            )
        for stuck, fence in waiting:
            if idle and fence.event is None and not fence.passed:
                yield (
                    ("stuck", *_listed(stuck)),
                    f"blocks {_listed(stuck)} wait for the result of a step, and none is in flight",
                )
        left = np.flatnonzero(self.fences)
        if idle and len(left) and not self.host.running and not self.host.waiting:
            yield ("idle",), f"no request is live, and blocks {first_of(left)} are still withheld"

    def _requests(self) -> Iterator[Contradiction]:
        """Counters of requests fit together, and whoever waits can run some day."""
        seqs, waiting = self.host.seqs, self.host.waiting
        rows = np.array([seq.row for seq in self.host.running], np.intp)
        counters = seqs.gather(rows)
        wrong = counters.num_computed_tokens > counters.num_tokens
        wrong |= counters.num_in_flight_tokens < 0
        if self.host.in_flight is None:
            wrong |= counters.num_in_flight_tokens != 0
        for i in np.flatnonzero(wrong).tolist():
            row = int(rows[i])
            yield (
                ("counters", row),
                f"{self._name(row)} has {int(counters.num_tokens[i])} tokens, "
                f"{int(counters.num_computed_tokens[i])} committed rows and "
                f"{int(counters.num_in_flight_tokens[i])} tokens in flight",
            )
        for seq in waiting:
            if seq.num_computed_tokens > len(seq.forked_table) * self._block_size:
                yield (
                    ("computed", seq.request_id),
                    f"{seq.request_id!r} waits with {seq.num_computed_tokens} committed rows in "
                    f"{len(seq.forked_table)} blocks",
                )
        for seq in reversed(waiting):  # by arrival; who was accepted once stays so
            if seq.arrival <= self._newest:
                break
            if self._never_fits(seq):
                self._add(f"{seq.request_id!r} waits, and can never fit this pool")
        self._newest = max(self._newest, waiting[-1].arrival if waiting else -1)

    # -- small change ----------------------------------------------------------------------------

    def _never_fits(self, seq: Request) -> bool:
        longest = max(seq.num_tokens, seq.max_total_tokens - 1)
        too_many = blocks_for(longest, self._block_size) > self.num_blocks - 1
        return too_many or seq.max_total_tokens > self.host.config.max_model_len

    def _join(self, came_free: Index) -> None:
        """Blocks without an owner, and some of them without a fence, in order."""
        if self._free is None:
            return
        ids = came_free[self.fences[came_free] == 0].tolist()
        if len(set(ids)) < len(ids):  # released twice in one table: free at the second
            ids = list(dict.fromkeys(reversed(ids)))[::-1]
        self._free.join(ids)

    def _name(self, row: int) -> str:
        return next((repr(seq.request_id) for seq in self.host.running if seq.row == row), "nobody")

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


def _listed(ids: BlockIds) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else [int(block_id) for block_id in ids]
