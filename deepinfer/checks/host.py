"""What the checkers look at from outside: the host side of an engine.

Knows no implementation: `deepinfer.scheduler.Scheduler` fits. Invariant: everything here is read
only, and reading it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from typing import Protocol

from deepinfer.block_manager import BlockIds, BlockManager
from deepinfer.checks.prefix_tags import PrefixTags
from deepinfer.config import EngineConfig
from deepinfer.sequence import Sequence, SequenceTable


class OpenFence(Protocol):
    """A point in submitted work that blocks wait for."""

    passed: bool

    @property
    def event(self) -> object | None:
        """What tells that the point was passed; None: the result of the step does."""
        ...


class FenceQueue(Protocol):
    """Where withheld blocks wait."""

    def fenced(self) -> Sequenced[tuple[BlockIds, OpenFence]]:
        """Every release that waits, oldest first: its ids, one fence on each, and the fence."""
        ...


class SlotPool(Protocol):
    """State slots and their queue."""

    slots: BlockManager

    @property
    def release(self) -> FenceQueue:
        """The queue through which slots go back."""
        ...

    @property
    def pinned(self) -> list[int]:
        """The slots that forks have pinned until they are copied, one for each fork."""
        ...


class Host(Protocol):
    """Requests, their tables, the pool and the release queue."""

    config: EngineConfig
    blocks: BlockManager
    seqs: SequenceTable

    @property
    def release(self) -> FenceQueue:
        """The queue through which blocks go back."""
        ...

    @property
    def states(self) -> SlotPool | None:
        """The pool of state slots; None for a model without state."""
        ...

    @property
    def prefix_tags(self) -> PrefixTags | None:
        """What every KV row must be tagged with; None where rows are not tagged."""
        ...

    @property
    def in_flight(self) -> object | None:
        """The step in flight; None without one."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps planned so far."""
        ...

    @property
    def running(self) -> list[Sequence]:
        """The requests that have a row."""
        ...

    @property
    def waiting(self) -> list[Sequence]:
        """The requests without a row, by arrival."""
        ...
