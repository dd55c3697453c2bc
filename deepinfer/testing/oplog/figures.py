"""What a replay is asked for, and what it counts: plain values.

Knows nothing of how either comes about. Invariant: an undefined figure is None, never 0.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from deepinfer.errors import UserError

LATE, RECORDED, RANDOM = "late", "recorded", "random"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the device runs: `late`, only as far as the host waits; `recorded`, also as far as
    the recorded host saw it; `random`, also here and there, drawn from `seed`."""

    kind: str = LATE
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Progress:
        """`late`, `recorded` or `random:7`. Raises UserError for anything else."""
        kind, _, seed = text.partition(":")
        if kind in (LATE, RECORDED) and text == kind:
            return cls(kind)
        if kind == RANDOM and seed.isdecimal():
            return cls(kind, int(seed))
        raise UserError(f"progress: {text!r}; expected {LATE}, {RECORDED} or {RANDOM}:SEED")


@dataclass(slots=True)
class Figures:
    """What one replay counted.

    Attributes:
        withheld_block_steps: blocks withheld as each step's work was queued, summed over steps.
        host_waits: on fences; those of allocations that found too few blocks are among them.
        reuse_distances: for each reused block, how many blocks were handed out between its release
            and its reuse; as often as each distance occurred.
    """

    operations: int = 0
    allocations: int = 0
    blocks_allocated: int = 0
    withheld_peak: int = 0
    withheld_block_steps: int = 0
    refused_while_withheld: int = 0
    host_waits: int = 0
    stream_waits: int = 0
    reuse_distances: Counter[int] = field(default_factory=Counter)
    blocks_touched: int = 0

    @property
    def reuse_distance(self) -> float | None:
        """The median, or None if no block was reused."""
        total, seen, low = self.reuse_distances.total(), 0, None
        for distance in sorted(self.reuse_distances):
            seen += self.reuse_distances[distance]
            if low is None and 2 * seen >= total:
                low = distance
            if 2 * seen > total:
                assert low is not None
                return (low + distance) / 2
        return None
