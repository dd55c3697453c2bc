"""Which ownership is at each place of a pool, while a run is recorded.

Knows neither operations nor files. Invariant: a place has the name that it was given last, also
when it is given up: what is queued may still touch it.
"""

from __future__ import annotations

import numpy as np

from deepinfer.observer import BlockIds, Ints
from deepinfer.testing.oplog.operations import Blocks


class Places:
    """Whose the places of one pool are.

    Attributes:
        pool: as an allocation names it.
        names: int64 [size + 1], of what is at each place; 0 where nothing is, as at the last one,
            which is no place.
        previous: who gave up a place, behind which step.
        fences: by place the event behind which it was given up last; empty without one.
    """

    def __init__(self, pool: str, size: int) -> None:
        self.pool = pool
        self.names = np.zeros(size + 1, np.int64)
        self.previous: dict[int, tuple[str, int | None]] = {}
        self.fences: dict[int, str] = {}

    def named(self, places: BlockIds | Ints) -> Blocks:
        """The names of what is at these places."""
        return tuple(self.names[np.asarray(places, np.intp)].tolist())
