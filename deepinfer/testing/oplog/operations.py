"""The operations of a log, as values: what one engine did with its blocks and its device.

A block is named by an ownership, not by its place: each allocation has new numbers that are never
used again. A state slot is named likewise and by the same numbers, so only its allocation says that
it is one. Events have names that last from one recycling to the next. `by` is `POLICY` where the
release policy of the recorded run did it, and empty where the engine did.

Knows neither text nor files. Invariant: the values are immutable, and `OPERATIONS` has them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

POLICY = "policy"
STATES = "states"  # the pool of state slots

Blocks = tuple[int, ...]  # or state slots, never both
Span = tuple[int, int, int | None]  # a block's number, its first row and the row after its last
Number = tuple[str, int]  # STAGING or RECORD, and a step
Touched = tuple[Span | Number, ...]


@dataclass(frozen=True, slots=True)
class Allocate:
    """New blocks, or with the pool `STATES` new state slots.

    `takers`: owner, path and how many of them, in order. `reuses` is for a reader: whose block was
    at the same place before, by the new block's name.
    """

    op: ClassVar[str] = "allocate"
    blocks: Blocks
    ids: Blocks
    takers: tuple[tuple[str, str, int], ...] = ()
    reuses: dict[str, str] = field(default_factory=dict)
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Pin:
    """One more owner of each block: a fork of `parent`, or somebody without a name."""

    op: ClassVar[str] = "pin"
    blocks: Blocks
    owner: str = ""
    parent: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """A table, or part of one, given up. With a `step` it has a fence:

    `event` is the fence, or, with `stream`, all that is queued on that stream is; `event` is then
    the one the recorded policy took for it, if it took one. An `event` without a step is a fence of
    a transfer, which passes with no step's result.
    """

    op: ClassVar[str] = "release"
    blocks: Blocks
    owner: str = ""
    path: str = ""
    step: int | None = None
    event: str = ""
    stream: str = ""


@dataclass(frozen=True, slots=True)
class Submit:
    """An operation of a stream."""

    op: ClassVar[str] = "submit"
    stream: str
    label: str = ""
    reads: Touched = ()
    writes: Touched = ()


@dataclass(frozen=True, slots=True)
class Copy:
    """An operation that copies whole blocks, or slots, `sources[i]` to `blocks[i]`."""

    op: ClassVar[str] = "copy"
    stream: str
    sources: Blocks
    blocks: Blocks
    label: str = ""
    reads: Touched = ()  # besides the blocks


@dataclass(frozen=True, slots=True)
class Record:
    """An event marks this point of a stream: the end of `step`, if that is given."""

    op: ClassVar[str] = "record"
    stream: str
    event: str
    step: int | None = None
    by: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """What follows on the stream waits for the event."""

    op: ClassVar[str] = "wait"
    stream: str
    event: str
    by: str = ""


@dataclass(frozen=True, slots=True)
class Query:
    """The host looked at an event."""

    op: ClassVar[str] = "query"
    event: str
    passed: bool
    by: str = ""


@dataclass(frozen=True, slots=True)
class Synchronize:
    """The host waited for an event; without one, for everything queued."""

    op: ClassVar[str] = "synchronize"
    event: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class Recycle:
    """An event went back to the pool; its name ends here."""

    op: ClassVar[str] = "recycle"
    event: str
    by: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """The host itself read or wrote what operations touch too."""

    op: ClassVar[str] = "host"
    label: str = ""
    reads: Touched = ()
    writes: Touched = ()


@dataclass(frozen=True, slots=True)
class ReleasePoint:
    """The pre-sampler point of a step."""

    op: ClassVar[str] = "release_point"


@dataclass(frozen=True, slots=True)
class Commit:
    """Rows are committed: no step in flight that may write them does."""

    op: ClassVar[str] = "commit"
    rows: Touched


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of a step reached the host."""

    op: ClassVar[str] = "collected"
    step: int


@dataclass(frozen=True, slots=True)
class Flush:
    """The host waited for all fences, since nothing else was left to do."""

    op: ClassVar[str] = "flush"
    by: str = ""


Operation = (
    Allocate | Pin | Release | Submit | Copy | Record | Wait | Query | Synchronize | Recycle | Host
) | (ReleasePoint | Collected | Commit | Flush)
OPERATIONS: dict[str, type[Operation]] = {
    kind.op: kind
    for kind in (
        *(Allocate, Pin, Release, Submit, Copy, Record, Wait, Query, Synchronize, Recycle, Host),
        *(ReleasePoint, Collected, Commit, Flush),
    )
}


def seen(notes: Iterable[Operation]) -> Iterator[tuple[str, bool]]:
    """Events that the recorded policy looked at or waited for, and whether they had passed."""
    for note in notes:
        if isinstance(note, Query):
            yield note.event, note.passed
        elif isinstance(note, Synchronize):
            yield note.event, True


def with_notes(
    operations: Iterable[tuple[int, Operation]],
) -> Iterator[tuple[int, Operation, list[Operation]]]:
    """Each operation of the engine, with those of its policy up to the next one."""
    current: tuple[int, Operation, list[Operation]] | None = None
    for line, operation in operations:
        if getattr(operation, "by", "") == POLICY:
            if current is not None:
                current[2].append(operation)
            continue
        if current is not None:
            yield current
        current = line, operation, []
    if current is not None:
        yield current
