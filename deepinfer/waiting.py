"""The requests without a row, in order of arrival.

A waiting fork may hold pins on blocks of its parent (`Sequence.forked_table`). Knows no pool: what
it takes from a fork is the caller's to give up. Invariant: `num_pinned_forks` counts the requests
here that hold pins.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

import numpy as np

from deepinfer.plan import Int32
from deepinfer.sequence import Sequence

NO_BLOCKS = np.empty(0, np.int32)


class WaitingQueue:
    """Requests by arrival; one that comes back after a preemption takes its old place.

    Attributes:
        num_pinned_forks: requests that hold pins.
    """

    def __init__(self) -> None:
        self.num_pinned_forks = 0
        self._seqs: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    @property
    def head(self) -> Sequence:
        """The request that is next."""
        return self._seqs[0]

    @property
    def newest_fork(self) -> Sequence | None:
        """The last arrival that holds pins."""
        return next((seq for seq in reversed(self._seqs) if len(seq.forked_table)), None)

    def add(self, seq: Sequence) -> None:
        """Queue a request, with the pins it holds."""
        insort(self._seqs, seq, key=lambda waiting: waiting.arrival)
        self.num_pinned_forks += len(seq.forked_table) > 0

    def remove(self, seq: Sequence) -> Int32:
        """A request waits no longer; returns the blocks it has pinned."""
        self._seqs.remove(seq)
        return self.unpin(seq)

    def unpin(self, seq: Sequence) -> Int32:
        """Take a request's pins from it; returns the blocks."""
        table, seq.forked_table = seq.forked_table, NO_BLOCKS
        self.num_pinned_forks -= len(table) > 0
        return table
