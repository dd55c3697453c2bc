"""Percentiles, intervals of paired ratios, and the verdict they give."""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
import pytest

from bench.stats import (
    CONFIDENCE,
    Estimate,
    Interval,
    Verdict,
    Why,
    estimate,
    judge,
    median,
    outliers,
    paired_ratio,
    percentile,
    rank_sum_cut,
    signed_rank_cut,
    unpaired_ratio,
)


@pytest.mark.parametrize("percent", [0, 1, 50, 99, 100])
def test_one_value_is_every_percentile(percent):
    """With n = 1 each quantile is that value (HF inference-benchmarker#45)."""
    assert percentile([7.0], percent) == 7.0


def test_no_values_have_no_percentile_and_no_median():
    """Nothing measured is None, not 0 and not a crash (sglang#35005)."""
    assert percentile([], 99) is None
    assert median([]) is None
    assert estimate([]) is None


@pytest.mark.parametrize(
    ("percent", "rank"), [(0, 1), (1, 1), (7, 7), (50, 50), (99, 99), (99.5, 100), (100, 100)]
)
def test_percentiles_are_values_of_the_sample_by_nearest_rank(percent, rank):
    """The p-th of 1..100 is p; no interpolation, no slip of a rank by rounding."""
    values = list(np.random.default_rng(0).permutation(np.arange(1.0, 101.0)))
    assert percentile(values, percent) == rank


def test_infinities_are_ranked_like_values():
    """An infinite value is the largest, and does not spoil the rest."""
    assert percentile([math.inf, 1.0, 2.0], 50) == 2.0
    assert percentile([math.inf, 1.0, 2.0], 99) == math.inf
    assert median([1.0, math.inf, math.inf, math.inf]) == math.inf
    assert median([-math.inf, 1.0, 3.0, math.inf]) == 2.0


def test_nan_and_bad_percents_are_refused():
    """A NaN has no rank; silently sorting it would give any answer."""
    with pytest.raises(ValueError, match="NaN"):
        percentile([1.0, math.nan], 50)
    with pytest.raises(ValueError, match="NaN"):
        median([math.nan])
    with pytest.raises(ValueError, match="101"):
        percentile([1.0], 101)


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two():
    """2 and 3 of 1..4 give 2.5."""
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5


# -- the interval ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 6, 7, 8, 10])
def test_the_cut_is_what_counting_all_signs_gives(count):
    """Over all 2**n patterns of signs, the tail of the rank sum is as large as the cut says."""
    sums = [
        sum(rank for rank, negative in enumerate(signs, 1) if negative)
        for signs in product((False, True), repeat=count)
    ]
    cut, confidence = signed_rank_cut(count)
    assert confidence == pytest.approx(1 - 2 * sum(s <= cut for s in sums) / 2**count)
    if count >= 7:
        assert confidence >= CONFIDENCE
        assert 2 * sum(s <= cut + 1 for s in sums) / 2**count > 1 - CONFIDENCE


def test_few_values_give_their_whole_range_and_say_how_little_it_is_worth():
    """Five rounds give a range with less than the confidence asked for, one gives nothing."""
    found = estimate([5.0, 1.0, 3.0, 2.0, 4.0])
    assert found.interval == Interval(1.0, 5.0)
    assert found.confidence == 0.9375
    assert estimate([1.0]) == Estimate(1.0, None, 0.0, 1)


def test_ten_values_survive_one_that_contradicts_them_a_little():
    """A small deviation may point the other way; the largest of all may not."""
    values = [1.04, 1.05, 1.05, 1.06, 1.06, 1.07, 1.04, 1.05, 1.06]
    assert estimate([*values, 0.99]).interval.low > 1
    assert estimate([*values, 0.60]).interval.low < 1
    assert estimate([*values[:6], 0.99]).interval.low < 1


def test_equal_values_have_an_interval_without_width():
    """Logarithms and back leave no dust behind."""
    for value in (1.1, 1 / 3, 7e-9):
        assert estimate([value] * 7).interval == Interval(value, value)
        assert estimate([value] * 7).half_width == 0


def test_an_estimate_and_its_inverse_agree():
    """Who is the baseline must not matter: the interval of 1/x is 1 by the interval of x."""
    values = list(np.random.default_rng(3).lognormal(0.02, 0.05, 9))
    found, inverse = estimate(values), estimate([1 / value for value in values])
    assert found.center == pytest.approx(1 / inverse.center)
    assert found.interval.low == pytest.approx(1 / inverse.interval.high)


@pytest.mark.parametrize("spikes", [0.0, 0.1])
def test_the_interval_holds_the_truth_as_often_as_it_says(spikes):
    """Over 1000 samples of 9 paired ratios, 97 to 99.5 % of the intervals cover, spikes or not."""
    rng = np.random.default_rng(2)
    logs = rng.normal(0, 0.02, (1000, 9, 2)) + 0.4 * (rng.random((1000, 9, 2)) < spikes)
    ratios = np.exp(logs[..., 0] - logs[..., 1])
    covered = np.mean([estimate(list(sample)).interval.covers(1.0) for sample in ratios])
    assert 0.97 <= covered <= 0.995


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_what_has_no_logarithm_is_refused(bad):
    """A ratio of 0 or infinity has no geometric centre."""
    with pytest.raises(ValueError, match="positive"):
        estimate([1.0, bad])


def test_ratios_are_paired_by_round():
    """A drift that hits both cells of a round alike leaves no trace in the ratio."""
    baseline = {0: 100.0, 1: 50.0, 2: 10.0}
    ratio = paired_ratio({0: 200.0, 1: 100.0, 2: 20.0, 3: 999.0}, baseline)
    assert (ratio.center, ratio.interval, ratio.num_values) == (2.0, Interval(2.0, 2.0), 3)


def test_rounds_without_a_ratio_are_left_out():
    """No common round, a baseline of 0, an infinite speed: None, not a NaN."""
    assert paired_ratio({0: 1.0}, {1: 1.0}) is None
    assert paired_ratio({0: 1.0}, {0: 0.0}) is None
    assert paired_ratio({0: math.inf}, {0: math.inf}) is None
    assert paired_ratio({0: 3.0, 1: math.inf}, {0: 1.0, 1: 1.0}).center == pytest.approx(3.0)


# -- verdicts -------------------------------------------------------------------------------------


def found(low: float, high: float, confidence: float = 0.99) -> Estimate:
    """An estimate with this interval."""
    return Estimate(math.sqrt(low * high), Interval(low, high), confidence, 7)


@pytest.mark.parametrize(
    ("ratio", "verdict", "why"),
    [
        (found(1.01, 1.08), Verdict.FASTER, Why.EXCLUDES_1),
        (found(0.92, 0.99), Verdict.SLOWER, Why.EXCLUDES_1),
        (found(0.98, 1.02), Verdict.SAME, Why.WITHIN_MARGIN),
        (found(1.01, 1.02), Verdict.SAME, Why.WITHIN_MARGIN),
        (found(1 / 1.03, 1.03), Verdict.SAME, Why.WITHIN_MARGIN),
        (found(0.98, 1.05), Verdict.UNCLEAR, Why.TOO_WIDE),
        (found(1.5, 1.6, 0.97), Verdict.UNCLEAR, Why.TOO_FEW_ROUNDS),
        (Estimate(2.0, None, 0.0, 1), Verdict.UNCLEAR, Why.ONE_ROUND),
        (None, Verdict.UNCLEAR, Why.NO_COMMON_ROUND),
    ],
)
def test_the_verdict_is_read_off_the_interval(ratio, verdict, why):
    """Each of the reasons, at least once."""
    judged = judge(ratio)
    assert (judged.verdict, judged.why) == (verdict, why)


def test_the_margin_decides_what_is_the_same():
    """An interval beside 1 but within 3 % of it is SAME, and FASTER where 1 % matters."""
    assert judge(found(1.012, 1.02), margin=0.01).verdict is Verdict.FASTER


def test_the_smallest_visible_difference_is_half_the_interval():
    """[0.98, 1.02] could not have told 1 % from nothing, but 2 %; without an interval, nothing."""
    assert judge(found(0.98, 1.02)).detectable == pytest.approx(0.02, abs=3e-4)
    assert judge(Estimate(2.0, None, 0.0, 1)).detectable is None
    assert judge(None).detectable is None


# -- outliers -------------------------------------------------------------------------------------


def test_a_round_far_from_the_others_is_an_outlier():
    """One speed at a third of the others is marked, by its round."""
    speeds = {0: 629.0, 1: 623.0, 2: 241.0, 3: 634.0, 4: 628.0, 5: 617.0}
    assert outliers(speeds) == (2,)


def test_ordinary_noise_has_no_outliers():
    """Of 500 runs of 7 rounds with 2 % of noise no more than 3 % have one."""
    rng = np.random.default_rng(5)
    runs = rng.normal(100, 2, (500, 7))
    assert np.mean([bool(outliers(dict(enumerate(run)))) for run in runs]) <= 0.03


def test_alike_values_do_not_make_a_small_step_an_outlier():
    """With a spread of 0 everything is far; less than 5 % off is still none. Nor are few values."""
    assert outliers({0: 100.0, 1: 100.0, 2: 100.0, 3: 100.0, 4: 100.0, 5: 103.0}) == ()
    assert outliers({0: 1.0, 1: 1.0, 2: 1.0, 3: 50.0}) == ()
    assert outliers({}) == ()


# -- unpaired samples ------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(2, 2), (3, 3), (3, 5), (4, 4), (6, 7), (10, 10)])
def test_the_cut_of_two_samples_is_that_of_all_their_orders(first, second):
    """Counted one by one: in how many orders the first sample has at most so many pairs below."""
    orders = combinations(range(first + second), first)
    pairs = np.array([sum(order) - first * (first - 1) // 2 for order in orders])
    cut, confidence = rank_sum_cut(first, second)
    assert confidence == pytest.approx(1 - 2 * np.mean(pairs <= cut))
    assert 2 * np.mean(pairs <= cut + 1) > 1 - CONFIDENCE, "the next one would be too many"


def test_the_unpaired_ratio_is_the_median_of_all_pairs():
    """[2, 4] by [1]: 2 and 4, their median 3; no single round has an interval."""
    found = unpaired_ratio([2.0, 4.0], [1.0])
    assert (found.center, found.num_values) == (3.0, 1)
    assert found.interval == Interval(2.0, 4.0)
    assert unpaired_ratio([2.0], [1.0]).interval is None
    assert unpaired_ratio([], [1.0]) is None
    assert unpaired_ratio([1.0], [0.0, math.inf]) is None


def test_alike_samples_are_told_apart_in_one_of_twenty_at_most():
    """Also where the noise has spikes; and the interval covers a true ratio of 1.2 as often."""
    rng = np.random.default_rng(8)
    misses = 0
    for _ in range(1000):
        first, second = np.exp(0.05 * rng.standard_t(2, (2, 5)))
        found = unpaired_ratio((1.2 * first).tolist(), second.tolist())
        misses += not found.interval.covers(1.2)
    assert misses / 1000 <= 0.05
