"""Axes of plots: from values to positions, and the round values to write beside them.

Knows numbers; knows nothing of what is drawn. Invariant: every tick lies inside its scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps `low..high` to `start..end` in pixels, linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (
            (math.log(self.low), math.log(self.high), math.log(value))
            if self.log
            else (self.low, self.high, value)
        )
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values inside the scale, about one per 90 pixels."""
        num = max(2, int(abs(self.end - self.start) // 90))
        return log_ticks(self.low, self.high, num) if self.log else ticks(self.low, self.high, num)


def ticks(low: float, high: float, num: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from `low` to `high`, at most about `num`."""
    step = 10 ** math.floor(math.log10((high - low) / num))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step * num >= (high - low) * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float, num: int) -> list[float]:
    """Ticks for a logarithmic scale: powers of ten with 2 and 5 between while they are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high]
        if len(found) <= num + 1:
            break
    return found if len(found) >= 2 else ticks(low, high, num)
