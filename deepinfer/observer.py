"""What a checker or a recorder is told: blocks that change hands, and what happens on the device.

An engine without observers has none of these calls. Whoever watches derives from `Observer` and
overrides what it wants to know; it decides nothing, so a watched engine does what it always does.

Knows ids, names and numbers only; no torch. Invariant: every call describes something that has
happened (`given_up` alone comes before its consequences, so that these can be traced back to it),
on the thread that drives the engine and in the order in which it happened there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]
BlockIds = Sequence[int] | NDArray[np.int32]

NO_STEP = sys.maxsize  # of a fence behind no step: nothing but its event tells that it has passed
# Kinds of `Access`.
KV, STATE, STAGING, RECORD, BUFFER = "kv", "state", "staging", "record", "buffer"


@dataclass(frozen=True, slots=True)
class Access:
    """Things of one kind that an operation, or the host, reads or writes.

    Attributes:
        kind: `KV`: block ids; `STATE`: state slots; `STAGING`: step numbers, whose host arrays the
            device reads; `RECORD`: step numbers, whose results the device writes for the host;
            `BUFFER`: addresses of host memory that rows are kept in.
        ids: int [n]; may repeat.
        start, end: int [n], the rows touched in each block, `end` excluded; None = all of it.
        holders: int [n], sequence-table rows on whose behalf; None = nobody in particular.
    """

    kind: str
    ids: Ints
    start: Ints | None = None
    end: Ints | None = None
    holders: Ints | None = None


class Observer:
    """Told of everything, does nothing.

    Attributes:
        states: who is told of state slots what this one is told of blocks; None: nobody.

    Events are known by a number that stays the same when an event is recorded again, also for its
    next user after it was recycled.
    """

    states: Observer | None = None

    # -- blocks, as the block manager changes them -----------------------------------------------

    def allocated(self, ids: BlockIds) -> None:
        """Blocks were handed out, with one owner each."""

    def pinned(self, ids: BlockIds) -> None:
        """Each block has one more owner."""

    def hit(self, ids: BlockIds) -> None:
        """Each block was found by what it holds and has one more owner, whatever its state was."""

    def published(self, block_id: int) -> None:
        """A block can be found by what it holds, until it is handed out again."""

    def released(self, table: BlockIds, ids: BlockIds, fenced: bool) -> None:
        """Each block of a table lost an owner, in the order `ids`; `fenced`: and got a fence."""

    def lifted(self, ids: BlockIds) -> None:
        """Each block lost a fence, in this order."""

    # -- requests, as scheduler and release queue see them ---------------------------------------

    def took(self, owner: str, ids: BlockIds, path: str) -> None:
        """A request put new blocks into its table.

        `path`: `admit`, `append`, `fork`, `copy-on-write`, `hit`, or `save` (a pin).
        """

    def forked(self, owner: str, parent: str, ids: BlockIds) -> None:
        """A waiting fork pinned blocks of its parent."""

    def giving_up(
        self,
        table: BlockIds,
        step: int | None,
        owner: str,
        path: str,
        event: object | None = None,
    ) -> None:
        """A table, or part of one, is about to be given up.

        Args:
            step: of the fence it is given up behind; None without one.
            event: of the fence; None if it has none, or has passed.
            path: `finish`, `abort`, `preempt`, `shrink`, `fork source`, `unpin`, `same rows`,
                `save`, or `load` (which failed).
        """

    def release_point(self) -> None:
        """The step's work is queued: the pre-sampler point."""

    def collected(self, step: int) -> None:
        """The result of a step reached the host, and is not committed yet."""

    def committed(self, rows: Access) -> None:
        """Rows up to these were committed, each for its holder, which goes on or ends with them.

        Told where steps verify drafts: one in flight declares rows that it writes only if others
        are rejected.
        """

    def flushed(self) -> None:
        """The host waited for all fences."""

    # -- the device ------------------------------------------------------------------------------

    def submitted(
        self, stream: str, label: str, reads: Sequence[Access], writes: Sequence[Access]
    ) -> None:
        """An operation was queued."""

    def recorded(self, stream: str, event: int) -> None:
        """An event marks this point of the stream."""

    def waited(self, stream: str, event: int) -> None:
        """What follows on the stream waits for the event as recorded now."""

    def queried(self, event: int, passed: bool) -> None:
        """The host looked at an event."""

    def synchronized(self, event: int | None) -> None:
        """The host waited for an event; None: for everything queued."""

    def recycled(self, event: int) -> None:
        """An event went back to the pool and counts as never recorded."""

    def on_host(self, label: str, reads: Sequence[Access], writes: Sequence[Access]) -> None:
        """The host itself read or wrote something that operations touch too."""


CALLS = tuple(name for name, value in vars(Observer).items() if callable(value))


class Observers(Observer):
    """Several observers as one, told in the order given."""

    def __init__(self, parts: Sequence[Observer]) -> None:
        for name in CALLS:
            setattr(self, name, _to_each([getattr(part, name) for part in parts]))


def _to_each(calls: list[Callable[..., None]]) -> Callable[..., None]:
    def call(*args: Any, **keys: Any) -> None:
        for one in calls:
            one(*args, **keys)

    return call
