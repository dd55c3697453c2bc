"""Writes the operation log of an engine that runs: an observer of everything, one line each.

What the engine did is told from what its release policy made of it by the calls beside it: a look
at an event is always the policy's, a host wait is the engine's if the host reads a result next, a
wait of a stream is the engine's if it follows the record of its event or precedes a submit on its
stream, and an event is the policy's if a fork source is given up right behind its record. A client
beside the engine has streams of its own: there a wait is the policy's if new blocks ask for it.

Knows the calls of `deepinfer.observer`; decides nothing. Invariant: the file always ends with whole
lines up to the last step collected, whatever ends the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO, cast

import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.device.base import COMPUTE, Event
from deepinfer.device.wrapper import inner_event
from deepinfer.errors import UserError
from deepinfer.observer import KV, NO_STEP, STATE, Access, BlockIds, Ints, Observer
from deepinfer.sizing import num_state_slots
from deepinfer.testing.oplog.log import END, encode, header, step_written
from deepinfer.testing.oplog.operations import (
    POLICY,
    STATES,
    Allocate,
    Collected,
    Commit,
    Copy,
    Flush,
    Host,
    Operation,
    Pin,
    Query,
    Record,
    Recycle,
    Release,
    ReleasePoint,
    Submit,
    Synchronize,
    Touched,
    Wait,
)
from deepinfer.testing.oplog.places import Places

FORK_SOURCE, COPY = "fork source", "copy"  # the engine's path, and the stream it is behind
MAX_BUFFERED = 4096  # lines


class OperationRecorder(Observer):
    """Writes `path`, replacing what is there. A context manager, or call `close()`.

    Attributes:
        states: hears of state slots what this hears of blocks; their lines are in the same file.

    Raises UserError if the file cannot be written, when made and at any later call.
    """

    def __init__(self, path: Path | str, config: EngineConfig) -> None:
        self.path = Path(path)
        self._block_size = config.block_size
        self._lines = [header(config)]
        self._failed = False
        self._blocks = Places("", config.num_blocks)
        self._slots = Places(STATES, num_state_slots(config.max_num_seqs, config.num_state_slots))
        self.states = _SlotRecorder(self, self._slots)
        self._num_names = 0  # given so far, to blocks and slots
        self._last_collected = 0
        self._allocated: Allocate | None = None  # whose takers are not all known
        self._behind_allocation: list[Operation] = []
        self._held: Operation | None = None  # whose author the next call tells
        self._policy_acts = False
        self._events: dict[int, str] = {}
        self._num_events = 0
        self._of_policy: set[str] = set()  # names of events
        self._seen_passed: set[str] = set()  # of events that only looks and policies know about
        self._fences: set[str] = set()  # of the places that were handed out last
        self._fork_fence = 0, ""  # the last step that took an event for its fork sources
        self._ending: dict[str, int] = {}  # by stream: the step whose end is recorded next
        self._ends: dict[int, str] = {}
        try:
            # SIM115 wants a `with`, but the file stays open for the life of the recorder.
            self._file: TextIO = open(self.path, "w", encoding="utf-8", newline="\n")  # noqa: SIM115
        except OSError as error:
            raise self._error(error) from error
        self._write_out()

    def close(self) -> None:
        """Write what is left and close the file; harmless when closed."""
        if self._file.closed:
            return
        self._settle()
        self._lines.append(END)
        try:
            if not self._failed:
                self._write_out()
        finally:
            with contextlib.suppress(OSError):  # it was reported when the write failed
                self._file.close()

    def __enter__(self) -> OperationRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- blocks ----------------------------------------------------------------------------------

    def allocated(self, ids: BlockIds, pool: Places | None = None) -> None:
        """New names; the line waits for its takers."""
        pool = pool or self._blocks
        self._begin()
        places = [int(i) for i in ids]
        if not places:
            return
        self._fences = {pool.fences[place] for place in places if place in pool.fences}
        names = tuple(range(self._num_names + 1, self._num_names + 1 + len(places)))
        reuses = {
            f"a{name}": self._described(pool.previous[place])
            for name, place in zip(names, places, strict=True)
            if place in pool.previous
        }
        self._num_names += len(places)
        pool.names[places] = names
        self._allocated = Allocate(names, tuple(places), (), reuses, pool.pool)

    def took(self, owner: str, ids: BlockIds, path: str) -> None:
        """One taker of the last allocation, or who pinned."""
        if isinstance(self._held, Pin):
            self._held = replace(self._held, owner=owner)
        if self._allocated is None or not len(ids):
            return
        takers = (*self._allocated.takers, (owner, path, len(ids)))
        self._allocated = replace(self._allocated, takers=takers)
        if sum(count for _, _, count in takers) >= len(self._allocated.blocks):
            self._settle()

    def pinned(self, ids: BlockIds, pool: Places | None = None) -> None:
        """The line waits for the fork that it may be."""
        self._begin()
        if len(ids):
            self._held = Pin((pool or self._blocks).named(ids))

    def forked(self, owner: str, parent: str, ids: BlockIds) -> None:
        """Who pinned, and of whom."""
        if isinstance(self._held, Pin):
            self._held = replace(self._held, owner=owner, parent=parent)

    def giving_up(
        self,
        table: BlockIds,
        step: int | None,
        owner: str,
        path: str,
        fence: object | None = None,
        pool: Places | None = None,
    ) -> None:
        """A release; the fence of a fork source is the stream it was queued on."""
        pool = pool or self._blocks
        event = stream = ""
        if path == FORK_SOURCE and step is not None:
            if isinstance(self._held, Record):
                self._of_policy.add(self._held.event)
                self._held = replace(self._held, by=POLICY)
                self._fork_fence = step, self._held.event
            stream, event = COPY, self._fork_fence[1] if self._fork_fence[0] == step else ""
        elif step == NO_STEP:
            event = self._event(id(inner_event(cast(Event, fence)))) if fence else ""
            step = None
        elif step is not None:
            event = self._ends.get(step, "")
        self._begin()
        self._add(Release(pool.named(table), owner, path, step, event, stream))
        for place in map(int, table):
            pool.previous[place] = (f"a{pool.names[place]} of {owner}, {path}", step)
            pool.fences[place] = event
        self._policy_acts = step is not None or event != ""

    # -- moments of a step -----------------------------------------------------------------------

    def release_point(self) -> None:
        """As it is; what the policy does comes next."""
        self._begin()
        self._add(ReleasePoint())
        self._policy_acts = True

    def collected(self, step: int) -> None:
        """As it is; everything up to here is written out."""
        self._begin()
        self._add(Collected(step))
        self._last_collected = step
        self._write_out()

    def committed(self, rows: Access) -> None:
        """As it is."""
        self._begin()
        touched = self._touched([rows])
        if touched:
            self._add(Commit(touched))

    def slots_release_point(self) -> None:
        """The queue of slots has its own right behind the blocks': still the policy's turn."""
        self._settle()
        self._policy_acts = True

    def flushed(self) -> None:
        """The policy's right behind a release or a release point, otherwise the engine's."""
        self._settle()
        self._add(Flush(by=POLICY if self._policy_acts else ""))

    # -- the device ------------------------------------------------------------------------------

    def submitted(
        self, stream: str, label: str, reads: Sequence[Access], writes: Sequence[Access]
    ) -> None:
        """A copy if whole blocks, or slots, are read and as many written, else any operation."""
        if isinstance(self._held, Wait) and self._held.stream == stream:
            self._held = replace(self._held, by="")
        self._begin()
        for kind, pool in ((KV, self._blocks), (STATE, self._slots)):
            if pairs := _copied(reads, writes, kind):
                sources, blocks = pool.named(pairs[0]), pool.named(pairs[1])
                others = self._touched([access for access in reads if access.kind != kind])
                self._add(Copy(stream, sources, blocks, label, others))
                return
        submit = Submit(stream, label, self._touched(reads), self._touched(writes))
        self._add(submit)
        step = step_written(submit.writes)
        if step is not None:
            self._ending[stream] = step

    def recorded(self, stream: str, event: int) -> None:
        """The end of a step behind the operation that writes its record."""
        self._begin()
        name, step = self._event(event), self._ending.pop(stream, None)
        record = Record(stream, name, step)
        if step is None:
            self._held = record
        else:
            self._ends[step] = name
            self._add(record)

    def waited(self, stream: str, event: int) -> None:
        """The engine's right behind the event's record; otherwise the next call tells.

        A client's stream that waits for who had its blocks does so for the policy.
        """
        wait = Wait(stream, self._event(event))
        held = self._held
        self._begin()
        if isinstance(held, Record) and held.event == wait.event:
            self._add(wait)
        elif stream not in (COPY, COMPUTE) and wait.event in self._fences:
            self._add(replace(wait, by=POLICY))
        else:
            self._held = replace(wait, by=POLICY)

    def queried(self, event: int, passed: bool) -> None:
        """Only policies look."""
        query = Query(self._event(event), passed, by=POLICY)
        if passed:
            self._seen_passed.add(query.event)
        if self._allocated is not None:
            self._behind_allocation.append(query)
        else:
            self._settle()
            self._add(query)

    def synchronized(self, event: int | None) -> None:
        """The engine's for everything queued, or if the host reads a result next."""
        self._settle()
        if event is None:
            self._add(Synchronize())
            self._seen_passed.clear()
        else:
            self._held = Synchronize(self._event(event), by=POLICY)
            self._seen_passed.add(self._held.event)

    def recycled(self, event: int) -> None:
        """The end of a name.

        Who recycles an event that was seen to pass goes on from there, so a replay waits for it.
        """
        self._begin()
        name = self._event(event)
        if name in self._seen_passed and name not in self._of_policy:
            self._add(Synchronize(name))
        self._seen_passed.discard(name)
        del self._events[event]
        self._ends = {step: end for step, end in self._ends.items() if end != name}
        self._add(Recycle(name, by=POLICY if name in self._of_policy else ""))
        self._of_policy.discard(name)

    def on_host(self, label: str, reads: Sequence[Access], writes: Sequence[Access]) -> None:
        """Reads a result, if the host waited for it just before."""
        if isinstance(self._held, Synchronize):
            self._held = replace(self._held, by="")
            self._seen_passed.discard(self._held.event)
        self._begin()
        self._add(Host(label, self._touched(reads), self._touched(writes)))

    # -- names -----------------------------------------------------------------------------------

    def _event(self, event: int) -> str:
        if event not in self._events:
            self._num_events += 1
            self._events[event] = f"e{self._num_events}"
        return self._events[event]

    def _described(self, previous: tuple[str, int | None]) -> str:
        """Whose block was at a place before, and whether the work behind it may still run."""
        what, step = previous
        in_flight = step is not None and step > self._last_collected
        return f"{what}, step {step} in flight" if in_flight else what

    def _touched(self, accesses: Sequence[Access]) -> Touched:
        parts: Touched = ()
        for access in accesses:
            if access.kind == STATE:
                names = self._slots.names.take(access.ids, mode="clip").tolist()
                parts += tuple((name, 0, None) for name in names if name)
            elif access.kind != KV:
                parts += tuple((access.kind, int(number)) for number in access.ids)
            elif access.start is None or access.end is None:
                parts += tuple((name, 0, None) for name in self._blocks.named(access.ids))
            else:
                parts += self._spans(access.ids, access.start, access.end)
        return parts

    def _spans(self, places: Ints, start: Ints, end: Ints) -> Touched:
        """Neighbouring rows of one block as one span, and equal spans once.

        Rows of what is nobody's block, as padding writes them, have no name and are left out.
        """
        if not len(places):
            return ()
        first = np.ones(len(places), bool)  # of a span
        first[1:] = (places[1:] != places[:-1]) | (start[1:] != end[:-1])
        firsts = first.nonzero()[0]
        lasts = np.append(firsts[1:], len(places)) - 1
        names = self._blocks.names.take(places[firsts], mode="clip")
        spans = np.stack((names, start[firsts], end[lasts]))[:, names > 0]
        size = self._block_size + 1
        _, once = np.unique((spans[0] * size + spans[1]) * size + spans[2], return_index=True)
        once.sort()  # a prefix that many tables share is named once, where it comes first
        return tuple(
            (name, a, None if b - a == self._block_size else b)
            for name, a, b in spans[:, once].T.tolist()
        )

    # -- lines -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Something else than a policy's consequence happens: what was held back is known."""
        self._settle()
        self._policy_acts = False

    def _settle(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._add(held)
        if self._allocated is not None:
            allocated, self._allocated = self._allocated, None
            self._add(allocated)
            behind, self._behind_allocation = self._behind_allocation, []
            for operation in behind:
                self._add(operation)

    def _add(self, operation: Operation) -> None:
        self._lines.append(encode(operation))
        if len(self._lines) >= MAX_BUFFERED:
            self._write_out()

    def _write_out(self) -> None:
        lines, self._lines = self._lines, []
        try:
            self._file.write("".join(line + "\n" for line in lines))
            self._file.flush()
        except OSError as error:
            self._failed = True
            raise self._error(error) from error

    def _error(self, error: OSError) -> UserError:
        return UserError(
            f"{self.path}: cannot write: {error.strerror or error}",
            hint="name a file in a folder that exists, on a disk with room",
        )


class _SlotRecorder(Observer):
    """Tells the recorder of it all what happens to state slots."""

    def __init__(self, recorder: OperationRecorder, slots: Places) -> None:
        self._recorder, self._slots = recorder, slots

    def allocated(self, ids: BlockIds) -> None:
        self._recorder.allocated(ids, self._slots)

    def took(self, owner: str, ids: BlockIds, path: str) -> None:
        self._recorder.took(owner, ids, path)

    def pinned(self, ids: BlockIds) -> None:
        self._recorder.pinned(ids, self._slots)

    def forked(self, owner: str, parent: str, ids: BlockIds) -> None:
        self._recorder.forked(owner, parent, ids)

    def giving_up(
        self,
        table: BlockIds,
        step: int | None,
        owner: str,
        path: str,
        event: object | None = None,
    ) -> None:
        self._recorder.giving_up(table, step, owner, path, event, self._slots)

    def release_point(self) -> None:
        self._recorder.slots_release_point()

    def flushed(self) -> None:
        self._recorder.flushed()


def _copied(
    reads: Sequence[Access], writes: Sequence[Access], kind: str
) -> tuple[Ints, Ints] | None:
    """Source and destination ids, if an operation copies whole things of a kind, and no more."""
    sources = [access for access in reads if access.kind == kind]
    if len(sources) != 1 or len(writes) != 1 or writes[0].kind != kind:
        return None
    source, target = sources[0], writes[0]
    if source.start is not None or target.start is not None or len(source.ids) != len(target.ids):
        return None
    return source.ids, target.ids
