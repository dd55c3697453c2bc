"""Numbers out of lists of numbers: percentiles, medians, the interval of a paired ratio.

Knows no records, no columns and no units. Invariant: every result is a function of its arguments
alone (the bootstrap is seeded), and what is not defined is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile: the smallest value with at least `percent` % at or below it.

    Always one of `values`, so infinities are ranked like any other value. None if there are none.
    Raises ValueError for a NaN, which has no rank, and for a percent outside 0..100.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"percent {percent} is not within 0..100")
    if not values:
        return None
    _refuse_nan(values)
    # Multiply first: 0.07 * 100 is 7.000000000000001 and would rank one too high.
    rank = max(1, math.ceil(percent * len(values) / 100))
    return float(sorted(values)[rank - 1])


def median(values: Sequence[float]) -> float | None:
    """The middle value, or the mean of the two in the middle. None if there are none."""
    if not values:
        return None
    _refuse_nan(values)
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 or ordered[middle - 1] == ordered[middle]:
        return float(ordered[middle])
    return float((ordered[middle - 1] + ordered[middle]) / 2)


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval, both ends included."""

    low: float
    high: float

    def covers(self, value: float) -> bool:
        """Whether `value` lies inside."""
        return self.low <= value <= self.high


def bootstrap_median_interval(
    values: Sequence[float],
    *,
    seed: int = 0,
    confidence: float = CONFIDENCE,
    num_resamples: int = NUM_RESAMPLES,
) -> Interval | None:
    """Percentile-bootstrap interval of the median; None for fewer than two values.

    Below six values the interval is all but their range, which holds the true median with
    probability 1 - 2 ** (1 - n): 75 % for 3 values, 94 % for 5. Few rounds give a wide interval,
    never a falsely narrow one.
    """
    if len(values) < 2:
        return None
    _refuse_nan(values)
    sample = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(sample), (num_resamples, len(sample)))
    medians = np.median(sample[picks], axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(medians, [tail, 1 - tail], method="inverted_cdf")
    return Interval(float(low), float(high))


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """How one cell compares with another, round by round.

    Attributes:
        ratio: median of the rounds' ratios.
        interval: of that median; None for a single round.
        num_rounds: rounds both cells have.
    """

    ratio: float
    interval: Interval | None
    num_rounds: int

    @property
    def is_noise(self) -> bool:
        """Whether the interval covers 1: no difference can be told from this run."""
        return self.interval is not None and self.interval.covers(1.0)


def paired_ratio(
    values: Mapping[int, float], baseline: Mapping[int, float], *, seed: int = 0
) -> PairedRatio | None:
    """`values / baseline` paired by key (the round); None without a common round.

    Pairing takes out what a whole round has in common, such as a slow minute of the machine.
    Rounds whose baseline is 0 have no ratio and are left out.
    """
    common = sorted(key for key in values.keys() & baseline.keys() if baseline[key] != 0)
    ratios = [values[key] / baseline[key] for key in common]
    middle = median(ratios)
    if middle is None:
        return None
    return PairedRatio(middle, bootstrap_median_interval(ratios, seed=seed), len(ratios))


def _refuse_nan(values: Sequence[float]) -> None:
    if any(math.isnan(value) for value in values):
        raise ValueError("NaN has no rank")
