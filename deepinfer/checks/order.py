"""Happens-before: every access of a block is ordered before the next one that conflicts with it.

Two accesses of one thing conflict if one of them writes and their rows overlap. Within one
ownership of a block rows count: a stream may read rows 0..k while another writes row k + 1. Between
ownerships the block counts: nothing of the old one may be open when the new one writes.

An operation is compared with those operations alone that may still be running beside it, by vector
clocks (`clocks`); what the host knows to be over is forgotten. So a run in which everything is
ordered by streams and events costs next to nothing, and a hazard is found even where this run was
lucky. A step that verifies drafts declares all rows it may write; what is committed by now is none
of them. Also found: an operation queued on behalf of a request for a block that is not its own, or
for a block that nobody owns.

Knows no policy and no scheduler rule. Invariant: no false alarms; where the books do not say for
certain whose a block is (an owner without a name), nothing is reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.checks.clocks import Clock, Clocks
from deepinfer.checks.findings import Findings
from deepinfer.checks.host import Host
from deepinfer.checks.ledger import Index, Ledger
from deepinfer.observer import BUFFER, KV, RECORD, STAGING, STATE, Access, Ints

HOST = "host"
THINGS = {
    KV: "block",
    STATE: "state slot",
    STAGING: "the host arrays of step",
    RECORD: "the result of step",
    BUFFER: "the host buffer at",
}


@dataclass(slots=True)
class _Touch:
    """An `Access` as it was when queued: with the epoch of each block, and whose it was."""

    kind: str
    writes: bool
    ids: Index
    start: Ints | None
    end: Ints | None
    holders: Ints | None
    epochs: NDArray[np.int32] | None  # of what is owned only
    owners: dict[int, str]  # where nobody in particular is the holder

    def rows(self, block_id: int, block_size: int) -> tuple[Index, Ints, Ints]:
        """Where the block is named, and the rows it is named with: start and end."""
        index = np.flatnonzero(self.ids == block_id)
        if self.start is None or self.end is None:
            return index, np.zeros(len(index), np.intp), np.full(len(index), block_size)
        return index, self.start[index], self.end[index]


@dataclass(slots=True)
class _Operation:
    stream: str
    label: str
    index: int
    touches: list[_Touch]
    names: dict[int, str]  # request ids by row

    def owner(self, touch: _Touch, at: int) -> str:
        """On whose behalf entry `at` of one of its touches is."""
        if touch.holders is None:
            return touch.owners.get(int(touch.ids[at]), "nobody")
        row = int(touch.holders[at])
        return repr(self.names[row]) if row in self.names else "nobody"

    def __str__(self) -> str:
        return f"{self.label!r} on {self.stream}"


class OrderChecker(Ledger):
    """Reports every hazard once: per block, or state slot, and pair of operations.

    Attributes:
        states: the books of state slots.
    """

    states: Ledger

    def __init__(self, block_size: int, findings: Findings) -> None:
        self.states = Ledger()
        self._books: dict[str, Ledger] = {KV: self}  # of what is owned, by kind
        self._block_size = block_size
        self._findings = findings
        self._clocks = Clocks()
        self._logs: dict[str, deque[_Operation]] = {}  # by stream: what may still be running
        self._reported: set[tuple[object, ...]] = set()

    def bind(self, host: Host) -> None:
        """Whose requests and blocks these are."""
        super().bind(host)
        self._marks = np.zeros(self.num_blocks, bool)  # all False between two calls
        if host.states is not None:
            self.states.open(host.states.slots.num_blocks)
            self._books[STATE] = self.states
        rows = host.config.max_num_seqs
        self._owner_of_row = {kind: np.full(rows, -1, np.intp) for kind in self._books}

    # -- what orders operations ------------------------------------------------------------------

    def recorded(self, stream: str, event: int) -> None:
        """The event knows what the stream knows."""
        self._clocks.record(stream, event)

    def waited(self, stream: str, event: int) -> None:
        """The stream learns what the event knows."""
        self._clocks.wait(stream, event)

    def queried(self, event: int, passed: bool) -> None:
        """The host learns what a passed event knows."""
        if passed:
            self.synchronized(event)

    def synchronized(self, event: int | None) -> None:
        """The host learns what the event knows; whatever comes later comes after that."""
        self._clocks.synchronize(event)
        for stream, log in self._logs.items():
            over = self._clocks.host.get(stream, 0)
            while log and log[0].index <= over:
                log.popleft()

    def recycled(self, event: int) -> None:
        """The event knows nothing any more."""
        self._clocks.recycle(event)

    # -- what is committed -----------------------------------------------------------------------

    def committed(self, rows: Access) -> None:
        """What is committed is written by no step in flight."""
        ids = rows.ids.astype(np.intp)
        assert rows.end is not None, "so many rows of each block"
        end, holder = np.zeros(self.num_blocks, np.intp), np.full(self.num_blocks, -1, np.intp)
        end[ids] = rows.end
        if rows.holders is not None:
            holder[ids] = rows.holders
        for touch in (t for log in self._logs.values() for op in log for t in op.touches):
            if not touch.writes or touch.kind != KV or touch.epochs is None:
                continue
            if touch.start is None or touch.end is None:  # whole blocks: no step's
                continue
            if (touch.holders is None) != (rows.holders is None):
                continue
            is_same = touch.epochs == self.epochs[touch.ids]
            if touch.holders is not None:
                is_same &= touch.holders == holder[touch.ids]
            start = np.where(is_same, np.maximum(touch.start, end[touch.ids]), touch.start)
            keep = start < touch.end
            touch.ids, touch.start, touch.end = touch.ids[keep], start[keep], touch.end[keep]
            touch.holders = None if touch.holders is None else touch.holders[keep]
            touch.epochs = touch.epochs[keep]

    # -- what must be ordered --------------------------------------------------------------------

    def submitted(
        self, stream: str, label: str, reads: Sequence[Access], writes: Sequence[Access]
    ) -> None:
        """Compare a queued operation with all that may be running beside it."""
        clock = self._clocks.submit(stream)
        operation = self._operation(stream, label, clock[stream], reads, writes)
        self._look(operation, clock)
        if operation.touches:
            self._logs.setdefault(stream, deque()).append(operation)

    def on_host(self, label: str, reads: Sequence[Access], writes: Sequence[Access]) -> None:
        """Compare what the host does. No log has it: whatever is queued later comes after it."""
        self._look(self._operation(HOST, label, 0, reads, writes), self._clocks.host)

    def _look(self, operation: _Operation, clock: Clock) -> None:
        for stream, log in self._logs.items():
            over = clock.get(stream, 0)
            for earlier in reversed(log):
                if earlier.index <= over:
                    break
                self._compare(earlier, operation)

    def _compare(self, earlier: _Operation, later: _Operation) -> None:
        """Report what two operations that nothing orders do to the same thing, once for each."""
        seen: set[tuple[str, int]] = set()
        for old in earlier.touches:
            for new in later.touches:
                if old.kind != new.kind or not (old.writes or new.writes):
                    continue
                for number in self._common(old, new):
                    if (old.kind, number) not in seen:
                        conflict = self._conflict(number, earlier, old, later, new)
                        if conflict:
                            seen.add((old.kind, number))
                            self._add(conflict)

    def _common(self, old: _Touch, new: _Touch) -> list[int]:
        """What both touch."""
        if new.kind != KV:
            common = np.intersect1d(old.ids, new.ids)
        else:
            self._marks[new.ids] = True
            common = np.unique(old.ids[self._marks[old.ids]])
            self._marks[new.ids] = False
        numbers: list[int] = common.tolist()
        return numbers

    def _conflict(
        self, number: int, earlier: _Operation, old: _Touch, later: _Operation, new: _Touch
    ) -> str | None:
        """What is wrong between two accesses of one thing; None if they may overlap in time."""
        at_old, old_start, old_end = old.rows(number, self._block_size)
        at_new, new_start, new_end = new.rows(number, self._block_size)
        overlap = (old_start[:, None] < new_end) & (new_start < old_end[:, None])
        pairs = np.argwhere(overlap)
        next_epoch = False
        if old.epochs is not None and new.epochs is not None:
            next_epoch = bool(old.epochs[at_old[0]] != new.epochs[at_new[0]])
        if not len(pairs) and not (next_epoch and new.writes):
            return None
        i, j = pairs[0].tolist() if len(pairs) else (0, 0)
        what = f"{THINGS.get(new.kind, new.kind)} {number}"
        whose_new, whose_old = "", ""
        if new.kind in self._books:
            if len(pairs) and not (new.start is None and old.start is None):
                what += f" row {max(old_start[i], new_start[j])}"
            whose_new = f" for {later.owner(new, int(at_new[j]))}"
            whose_old = f" for {earlier.owner(old, int(at_old[i]))}"
        message = (
            f"{later} {'writes' if new.writes else 'reads'} {what}{whose_new}, and nothing orders "
            f"it behind {earlier}, which {'writes' if old.writes else 'reads'} it{whose_old}"
        )
        if next_epoch:
            release = self._books[new.kind].let_go[number]
            message += f"; {THINGS[new.kind]} {release}, policy {self.host.config.release}"
        return message

    # -- whose blocks they are -------------------------------------------------------------------

    def _operation(
        self,
        stream: str,
        label: str,
        index: int,
        reads: Sequence[Access],
        writes: Sequence[Access],
    ) -> _Operation:
        operation = _Operation(stream, label, index, [], {})
        if any(access.holders is not None for access in (*reads, *writes)):
            operation.names = {seq.row: seq.request_id for seq in self.host.running}
            for kind, owners in self._owner_of_row.items():
                owners.fill(-1)
                for row, name in operation.names.items():
                    owners[row] = self._books[kind].names.slot(name)
        for accesses, writing in ((reads, False), (writes, True)):
            for access in accesses:
                operation.touches.append(self._touch(operation, access, writing))
        return operation

    def _touch(self, operation: _Operation, access: Access, writes: bool) -> _Touch:
        ids = access.ids.astype(np.intp)
        touch = _Touch(access.kind, writes, ids, access.start, access.end, access.holders, None, {})
        books = self._books.get(access.kind)
        if books is None or not len(ids):
            return touch
        if ids.min() <= 0 or ids.max() >= books.num_blocks:  # id 0 is nobody's, and anybody's
            touch = self._inside(operation, touch, books)
        touch.epochs = books.epochs[touch.ids]
        if touch.holders is None:
            touch.owners = books.names.of(np.unique(touch.ids))
        self._check_owners(operation, touch, books)
        return touch

    def _inside(self, operation: _Operation, touch: _Touch, books: Ledger) -> _Touch:
        """The touch without what is no block, or slot, one can own."""
        outside, thing = (touch.ids < 0) | (touch.ids >= books.num_blocks), THINGS[touch.kind]
        for number in np.unique(touch.ids[outside]).tolist():
            self._once(
                (touch.kind, number, touch.writes),
                f"{operation} {'writes' if touch.writes else 'reads'} {thing} {number}; "
                f"{thing}s run from 0 to {books.num_blocks - 1}",
            )
        keep = ~outside & (touch.ids != 0)
        parts = (touch.ids, touch.start, touch.end, touch.holders)
        ids, start, end, holders = (None if part is None else part[keep] for part in parts)
        assert ids is not None
        return _Touch(touch.kind, touch.writes, ids, start, end, holders, None, {})

    def _check_owners(self, operation: _Operation, touch: _Touch, books: Ledger) -> None:
        ids, refs = touch.ids, books.refs[touch.ids]
        wrong = refs == 0
        if touch.holders is not None:
            slots = self._owner_of_row[touch.kind].take(touch.holders, mode="clip")
            all_named = books.names.counts[ids] == refs
            wrong |= all_named & ~books.names.hold(slots, ids)
        if not wrong.any():
            return
        owners = books.names.of(np.unique(ids[wrong]))
        for at in np.flatnonzero(wrong).tolist():
            block_id = int(ids[at])
            holder = "" if touch.holders is None else f" for {operation.owner(touch, at)}"
            state = f"belongs to {owners.get(block_id)}"
            if not refs[at]:
                state = f"belongs to nobody: {books.releases[block_id] or 'never handed out'}"
            self._once(
                (touch.kind, block_id, int(books.epochs[block_id]), bool(refs[at]), holder),
                f"{operation} {'writes' if touch.writes else 'reads'} "
                f"{THINGS[touch.kind]} {block_id}{holder}, "
                f"which {state}",
            )

    def _once(self, key: tuple[object, ...], message: str) -> None:
        if key not in self._reported:
            self._reported.add(key)
            self._add(message)

    def _add(self, message: str) -> None:
        self._findings.add("order", self.host.num_steps, message)
