"""A stepped device that asks, wherever the order of events can matter, what happens next.

Submitted work may run at any time that its stream and the events before it allow. But nobody can
tell when it ran, except where the host looks at an event or waits for one, and by the order of two
operations that touch the same rows. So operations run only when the host looks or waits, and what
is asked there is who comes next:

    a look    at an event that has not passed: answer so, or let a stream go on first
    a wait    which stream goes on, until the event has passed
    a pause   between two calls of the user: which stream goes on, if any

Each `Chooser` answers in its own way: the search in `search`, at random, or from a record. Knows no
block and no request: rows are bits of a mask, from the accesses that operations declare.

Invariant: what ran is an order that streams and events allow; the chooser alone decides which.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deepinfer.device.base import Event, Stream
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.device.tickets import TicketEvent, own_event
from deepinfer.device.wrapper import DeviceWrapper, EventWrapper, StreamWrapper, inner_event
from deepinfer.observer import KV, STATE, Access

NOT_YET = "not yet"  # the answer that lets no stream go on
MAX_SLOTS = 64  # state slots; in a mask of what is touched they come before the rows


@dataclass(slots=True)
class Op:
    """A queued operation, and the rows it reads and writes, one bit each."""

    stream: str
    ticket: int
    reads: int
    writes: int

    def conflicts(self, other: Op) -> bool:
        """Whether it matters which of the two runs first."""
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


@dataclass(slots=True)
class _Hold:
    """A stream waits for a ticket of another one."""

    ticket: int
    stream: str
    until: int


@dataclass(slots=True)
class _Queue:
    """What is queued on one stream and has not passed."""

    entries: deque[Op | _Hold] = field(default_factory=deque)

    def drop_passed(self, passed: int) -> None:
        while self.entries and self.entries[0].ticket <= passed:
            self.entries.popleft()


@dataclass(slots=True)
class Question:
    """What is asked.

    Attributes:
        needed: the operation that must run first for the event to pass; None in a pause.
        may_refuse: whether `NOT_YET` is an answer: the host does not wait.
        started: whether a stream went on already for the same event.
    """

    needed: Op | None
    may_refuse: bool
    started: bool = False


class Chooser(Protocol):
    """Decides what happens next."""

    def choose(self, device: ChoiceDevice, question: Question) -> str:
        """The stream to advance by one operation, one of `device.runnable()`; or `NOT_YET`."""
        ...

    def pick(self, names: Sequence[str]) -> str:
        """Which of several users calls next."""
        ...


class _ChoiceEvent(EventWrapper):
    __slots__ = ("_device",)

    def __init__(self, inner: Event, device: ChoiceDevice) -> None:
        super().__init__(inner)
        self._device = device

    def query(self) -> bool:
        event = own_event(self.inner)
        return event.query() or self._device.reach(event, may_refuse=True)

    def synchronize(self, timeout_s: float | None = None) -> None:
        event = own_event(self.inner)
        if not event.query():
            self._device.reach(event, may_refuse=False)
        event.synchronize(timeout_s)  # raises if the stream failed


class _ChoiceStream(StreamWrapper):
    def __init__(self, inner: Stream, device: ChoiceDevice) -> None:
        super().__init__(inner)
        self._device = device

    def submit(
        self,
        fn: Callable[[], None],
        *,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        cost: float | None = None,
        label: str = "",
    ) -> None:
        super().submit(fn, reads=reads, writes=writes, cost=cost, label=label)
        self._device.note_op(self.name, label, reads, writes)

    def wait(self, event: Event) -> None:
        super().wait(event)
        self._device.note_wait(self.name, own_event(inner_event(event)))


class ChoiceDevice(DeviceWrapper):
    """A stepped device whose order of events a chooser decides.

    Args:
        block_size: rows per block, of the accesses that operations declare.

    Attributes:
        num_ops: operations queued so far.
        answers: the chooser's, since somebody last emptied the list.
        log: what happened, in order: lines of the caller's, and operations as they ran.
    """

    def __init__(self, block_size: int, chooser: Chooser) -> None:
        self.stepped = SteppedCpuDevice()
        super().__init__(self.stepped)
        self.num_ops = 0
        self.answers: list[str] = []
        self.log: list[str] = []
        self._chooser = chooser
        self._block_size = block_size
        self._queues: dict[str, _Queue] = {}
        self._labels: dict[tuple[str, int], str] = {}

    # -- as a device -----------------------------------------------------------------------------

    def wrap_stream(self, stream: Stream) -> Stream:
        """A stream that notes what is queued."""
        self._queues[stream.name] = _Queue()
        return _ChoiceStream(stream, self)

    def event(self, *, timing: bool = False) -> Event:
        """An event whose looks and waits are choices."""
        return _ChoiceEvent(self.inner.event(timing=timing), self)

    def synchronize(self) -> None:
        """Run everything, in the order chosen."""
        for name in self._queues:
            stream = self.stepped.stream(name)
            self._reach(name, stream.queued, may_refuse=False)
        self.inner.synchronize()

    def note_op(
        self, stream: str, label: str, reads: Sequence[Access], writes: Sequence[Access]
    ) -> None:
        """An operation was queued."""
        self.num_ops += 1
        ticket = self.stepped.stream(stream).queued
        op = Op(stream, ticket, self._mask(reads), self._mask(writes))
        self._queues[stream].entries.append(op)
        self._labels[stream, ticket] = label

    def note_wait(self, stream: str, event: TicketEvent) -> None:
        """A stream was told to wait."""
        other = event.stream
        if other is not None and other.name != stream and other.passed < event.ticket:
            ticket = self.stepped.stream(stream).queued
            self._queues[stream].entries.append(_Hold(ticket, other.name, event.ticket))

    # -- what a chooser may ask ------------------------------------------------------------------

    def runnable(self) -> list[str]:
        """Streams whose next operation may run now."""
        return self.stepped.runnable()

    def next_op(self, stream: str) -> Op:
        """The operation that comes first on a runnable stream."""
        first = self._queue(stream).entries[0]
        assert isinstance(first, Op)
        return first

    def rivals(self, needed: Op) -> list[Op]:
        """What else may have to run now: whatever leads to an operation that conflicts.

        Operations that may run at once, `needed` first. Anything else can as well run later: it
        conflicts neither with one of these nor with what must run before one of these.
        """
        found = [needed]
        for op in found:
            for name in self._queues:
                if name == op.stream:
                    continue
                for entry in self._queue(name).entries:
                    if isinstance(entry, Op) and entry.conflicts(op):
                        first = self._first_for(name, entry.ticket)
                        if first.stream != op.stream and first not in found:
                            found.append(first)
                        break  # it comes before all others of its stream
        return found

    def pause(self) -> None:
        """Let streams go on between two calls of the user."""
        question = Question(None, may_refuse=True)
        while self.runnable():
            answer = self._chooser.choose(self, question)
            self.answers.append(answer)
            if answer == NOT_YET:
                return
            self.advance(answer)

    def advance(self, stream: str) -> None:
        """Run the next operation of a runnable stream."""
        op = self.next_op(stream)
        self.log.append(f"{stream}: {self._labels.pop((stream, op.ticket))}")
        self.stepped.advance(stream)

    # -- inside ----------------------------------------------------------------------------------

    def reach(self, event: TicketEvent, *, may_refuse: bool) -> bool:
        """Let streams go on, as chosen, until an event has passed; whether it has."""
        assert event.stream is not None
        return self._reach(event.stream.name, event.ticket, may_refuse=may_refuse)

    def _reach(self, name: str, ticket: int, *, may_refuse: bool) -> bool:
        stream = self.stepped.stream(name)
        started = False
        while stream.passed < ticket:
            question = Question(self._first_for(name, ticket), may_refuse, started)
            answer = self._chooser.choose(self, question)
            self.answers.append(answer)
            if answer == NOT_YET:
                assert may_refuse, "a wait ends when the event has passed"
                return False
            self.advance(answer)
            started = True
        return True

    def _first_for(self, name: str, ticket: int) -> Op:
        """The operation that must run first for a stream to pass a ticket."""
        while True:
            first = self._queue(name).entries[0]
            assert first.ticket <= ticket, "the stream has passed it"
            if isinstance(first, Op):
                return first
            name, ticket = first.stream, first.until

    def _queue(self, name: str) -> _Queue:
        queue = self._queues[name]
        queue.drop_passed(self.stepped.stream(name).passed)
        return queue

    def _mask(self, accesses: Sequence[Access]) -> int:
        mask, size = 0, self._block_size
        for access in accesses:
            if access.kind == STATE:
                for slot in access.ids.tolist():
                    mask |= 1 << slot
            if access.kind != KV:
                continue
            if access.start is None or access.end is None:
                for block_id in access.ids.tolist():
                    mask |= ((1 << size) - 1) << MAX_SLOTS + block_id * size
                continue
            ends = access.end.tolist()
            spans = zip(access.ids.tolist(), access.start.tolist(), ends, strict=True)
            for block_id, start, end in spans:
                mask |= ((1 << end - start) - 1) << MAX_SLOTS + block_id * size + start
        return mask
