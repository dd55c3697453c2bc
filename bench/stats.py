"""Numbers out of lists of numbers: percentiles, intervals, and whether a difference is one.

Knows no records, no columns and no units. Invariant: every result is a function of its arguments
alone, and what is not defined is None, never 0.

Rounds are paired, so under "no difference" a round's log ratio is as likely `d` as `-d`: the two
cells could have changed places, whatever the noise looks like. The interval is the one that belongs
to that symmetry (Hodges and Lehmann 1963; Wilcoxon's signed ranks), exact for every number of
rounds. A percentile bootstrap of the median is not: see docs/statistics.md for both, measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np

# Not 0.95: a table of eight cells has seven verdicts, and at 0.95 each third table a false one.
CONFIDENCE = 0.98
MARGIN = 0.03  # ratios closer to 1 than this are SAME
# Of an outlier, in robust standard deviations: in 1 of 100 runs of 7 rounds with 2 % of noise one
# lies beyond though nothing happened.
OUTLIER_DEVIATIONS = 6.0
MIN_OUTLIER = 0.05  # and as a share of the median: five alike values make any sixth far
_MAD_TO_DEVIATION = 1.4826  # of a normal distribution


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


def outliers(values: Mapping[int, float]) -> tuple[int, ...]:
    """Keys of the values far from the median, ascending: to be marked, not to be dropped.

    Far is more than `OUTLIER_DEVIATIONS` robust standard deviations (1.4826 times the median
    absolute deviation) and more than `MIN_OUTLIER` of the median. Fewer than five values have no
    outlier: two of four can be far from the other two.
    """
    middle = median(list(values.values()))
    if middle is None or len(values) < 5 or not math.isfinite(middle):
        return ()
    distances = {key: abs(value - middle) for key, value in values.items()}
    spread = median(list(distances.values()))
    assert spread is not None, "there are values"
    far = max(OUTLIER_DEVIATIONS * _MAD_TO_DEVIATION * spread, MIN_OUTLIER * abs(middle))
    return tuple(sorted(key for key, distance in distances.items() if distance > far))


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval, both ends included."""

    low: float
    high: float

    def covers(self, value: float) -> bool:
        """Whether `value` lies inside."""
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Estimate:
    """The typical one of some positive values, as their geometric centre.

    Attributes:
        center: the Hodges-Lehmann estimate: median of the geometric means of all pairs of values,
            each value with itself among them. All but as efficient as the mean; a quarter of the
            values may be spikes.
        interval: of the true centre; None for a single value.
        confidence: of the interval, at least `CONFIDENCE` from seven values on; 0 without one.
        num_values: how many there were.
    """

    center: float
    interval: Interval | None
    confidence: float
    num_values: int

    @property
    def half_width(self) -> float | None:
        """Half the interval's width, as a share of the centre: 0.02 is 2 %. None without one."""
        if self.interval is None:
            return None
        return math.sqrt(self.interval.high / self.interval.low) - 1


def estimate(values: Sequence[float]) -> Estimate | None:
    """The centre of `values` and its interval; None if there are none.

    The interval is as wide as `CONFIDENCE` demands, or the whole range where few values do not
    reach it: 50 % for 2 values, 75 % for 3, 97 % for 6. Raises ValueError unless all values are
    positive and finite.
    """
    if not all(0 < value < math.inf for value in values):
        raise ValueError("not every value is positive and finite")
    if not values:
        return None
    count = len(values)
    logs = np.log(np.asarray(values, dtype=np.float64))
    first, second = np.triu_indices(count)
    means = np.exp(np.sort((logs[first] + logs[second]) / 2))
    # exp(log(x)) is not always x, and values that are all alike must get an interval without width.
    means[0], means[-1] = min(values), max(values)
    means = np.clip(means, means[0], means[-1])
    center = float(np.median(means))
    if count < 2:
        return Estimate(center, None, 0.0, count)
    rank, confidence = signed_rank_cut(count)
    interval = Interval(float(means[rank]), float(means[-1 - rank]))
    return Estimate(center, interval, confidence, count)


@lru_cache(maxsize=256)
def signed_rank_cut(count: int, confidence: float = CONFIDENCE) -> tuple[int, float]:
    """How many of the sorted pair means lie below the interval, and the confidence this gives.

    With `count` values the sum W of the ranks of the negative ones is, by symmetry, distributed as
    that of a random subset of 1..count; the interval from the (k + 1)-th smallest pair mean to the
    (k + 1)-th largest has confidence 1 - 2 P(W <= k).

        count   2   3   4   5   6   7   8   9  10
        k       0   0   0   0   0   0   1   3   5
    """
    subsets = np.zeros(count * (count + 1) // 2 + 1)
    subsets[0] = 1.0
    for rank in range(1, count + 1):
        added = subsets.copy()
        added[rank:] += subsets[:-rank]
        subsets = added / 2  # probabilities all along: counts would overflow
    tails = 2 * np.cumsum(subsets)
    allowed = np.flatnonzero(tails <= 1 - confidence + 1e-12)
    cut = int(allowed[-1]) if len(allowed) else 0
    return cut, float(1 - tails[cut])


def paired_ratio(values: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate | None:
    """`values / baseline` paired by key (the round); None without a common round.

    Pairing takes out what a whole round has in common, such as a slow minute of the machine. Rounds
    in which one of the two is not positive and finite have no ratio and are left out.
    """
    common = sorted(values.keys() & baseline.keys())
    ratios = [
        values[key] / baseline[key]
        for key in common
        if 0 < values[key] < math.inf and 0 < baseline[key] < math.inf
    ]
    return estimate(ratios)


def unpaired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Estimate | None:
    """`values / baseline` for samples without a common round; None without a ratio.

    The median of the ratios of all pairs, and the interval that belongs to the exchange of the two
    samples (Hodges and Lehmann 1963; Mann and Whitney's U): exact whatever the noise looks like, as
    long as both have the same. What is not positive and finite is left out. `num_values` is the
    size of the smaller sample.
    """
    above, below = (
        np.log([value for value in sample if 0 < value < math.inf]) for sample in (values, baseline)
    )
    if not len(above) or not len(below):
        return None
    ratios = np.exp(np.sort(np.subtract.outer(above, below).ravel()))
    center, count = float(np.median(ratios)), min(len(above), len(below))
    if len(ratios) < 2:
        return Estimate(center, None, 0.0, count)
    cut, confidence = rank_sum_cut(len(above), len(below))
    return Estimate(
        center, Interval(float(ratios[cut]), float(ratios[-1 - cut])), confidence, count
    )


@lru_cache(maxsize=256)
def rank_sum_cut(first: int, second: int, confidence: float = CONFIDENCE) -> tuple[int, float]:
    """As `signed_rank_cut`, for the sorted ratios of all pairs of two samples of these sizes.

    sizes   2 2   3 3   4 4   5 5   6 6   7 7
    cut       0     0     0     1     3     6
    conf.   67%   90%   97%   98%   98%   98%
    """
    # ways[k, u]: how k values of the first sample can stand among those seen so far, u pairs of
    # them with one of the second before it.
    ways = np.zeros((first + 1, first * second + 1))
    ways[0, 0] = 1.0
    for seen in range(first + second):
        grown = ways.copy()
        for k in range(min(seen, first - 1) + 1):
            before = seen - k
            if before <= second:
                grown[k + 1, before:] += ways[k, : ways.shape[1] - before]
        ways = grown
    tails = 2 * np.cumsum(ways[first]) / math.comb(first + second, first)
    allowed = np.flatnonzero(tails <= 1 - confidence + 1e-12)
    cut = int(allowed[-1]) if len(allowed) else 0
    return cut, float(1 - tails[cut])


class Verdict(str, Enum):
    """What a ratio to the baseline says of speed."""

    SAME = "SAME"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    UNCLEAR = "UNCLEAR"


class Why(str, Enum):
    """The reason of a verdict; the last six are for what the numbers alone do not show."""

    EXCLUDES_1 = "interval_excludes_1"
    WITHIN_MARGIN = "within_margin"
    TOO_WIDE = "interval_too_wide"
    ONE_ROUND = "one_round"
    TOO_FEW_ROUNDS = "too_few_rounds"
    NO_COMMON_ROUND = "no_common_round"
    BASELINE = "baseline"
    UNSAFE = "unsafe"
    WRONG_ANSWERS = "wrong_answers"
    FINDINGS = "findings"
    FAILED_REQUESTS = "failed_requests"
    THROTTLED = "throttled"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and the ratio it is about.

    Attributes:
        verdict: None for what is not compared: the baseline itself.
        ratio: higher is faster; None without a common round.
    """

    verdict: Verdict | None
    why: Why
    ratio: Estimate | None

    @property
    def detectable(self) -> float | None:
        """The smallest difference this could have seen, 0.02 for 2 %: half the interval's width.

        A true difference of that size is seen in half of such runs, one twice as large in nearly
        all of them.
        """
        return None if self.ratio is None else self.ratio.half_width


def judge(ratio: Estimate | None, *, margin: float = MARGIN) -> Judgement:
    """The verdict on a ratio of speeds, from its interval and nothing else.

        within 1 / (1 + margin) .. 1 + margin      SAME, even where it does not cover 1
        else all of it above 1, or below           FASTER, SLOWER
        else                                       UNCLEAR: no difference seen, none excluded

    UNCLEAR too where the rounds are too few for an interval of `CONFIDENCE`.
    """
    if ratio is None:
        return Judgement(Verdict.UNCLEAR, Why.NO_COMMON_ROUND, None)
    interval = ratio.interval
    if interval is None:
        return Judgement(Verdict.UNCLEAR, Why.ONE_ROUND, ratio)
    if ratio.confidence < CONFIDENCE:
        return Judgement(Verdict.UNCLEAR, Why.TOO_FEW_ROUNDS, ratio)
    if interval.low * (1 + margin) >= 1 and interval.high <= 1 + margin:
        return Judgement(Verdict.SAME, Why.WITHIN_MARGIN, ratio)
    if interval.covers(1.0):
        return Judgement(Verdict.UNCLEAR, Why.TOO_WIDE, ratio)
    faster = interval.low > 1
    return Judgement(Verdict.FASTER if faster else Verdict.SLOWER, Why.EXCLUDES_1, ratio)


def _refuse_nan(values: Sequence[float]) -> None:
    if any(math.isnan(value) for value in values):
        raise ValueError("NaN has no rank")
