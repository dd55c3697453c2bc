"""Percentiles, medians and the interval of a paired ratio."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.stats import (
    Interval,
    bootstrap_median_interval,
    median,
    paired_ratio,
    percentile,
)


@pytest.mark.parametrize("percent", [0, 1, 50, 99, 100])
def test_one_value_is_every_percentile(percent):
    """With n = 1 each quantile is that value (HF inference-benchmarker#45)."""
    assert percentile([7.0], percent) == 7.0


def test_no_values_have_no_percentile_and_no_median():
    """Nothing measured is None, not 0 and not a crash (sglang#35005)."""
    assert percentile([], 99) is None
    assert median([]) is None


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


def test_an_interval_needs_two_values():
    """One round says nothing of the spread between rounds."""
    assert bootstrap_median_interval([1.0]) is None
    assert bootstrap_median_interval([1.0, 2.0]) == Interval(1.0, 2.0)


def test_few_values_give_their_whole_range():
    """With five rounds the 95 % interval may not be narrower than the range."""
    assert bootstrap_median_interval([5.0, 1.0, 3.0, 2.0, 4.0]) == Interval(1.0, 5.0)


def test_the_interval_is_reproducible_and_narrows_with_more_values():
    """A seed gives the same interval again; a hundred rounds give a narrower one than ten."""
    values = list(np.random.default_rng(1).normal(10.0, 1.0, 100))
    wide, narrow = (bootstrap_median_interval(v, seed=3) for v in (values[:10], values))
    assert bootstrap_median_interval(values, seed=3) == narrow
    assert narrow.high - narrow.low < wide.high - wide.low


def test_the_interval_holds_the_true_median_as_often_as_it_says():
    """Over 300 samples of 15 values at least 90 % of the 95 % intervals cover the truth."""
    rng = np.random.default_rng(2)
    covered = sum(
        bootstrap_median_interval(rng.normal(1.0, 0.1, 15), num_resamples=500).covers(1.0)
        for _ in range(300)
    )
    assert covered >= 270


def test_ratios_are_paired_by_round():
    """A drift that hits both cells of a round alike leaves no trace in the ratio."""
    baseline = {0: 100.0, 1: 50.0, 2: 10.0}
    ratio = paired_ratio({0: 200.0, 1: 100.0, 2: 20.0, 3: 999.0}, baseline)
    assert (ratio.ratio, ratio.interval, ratio.num_rounds) == (2.0, Interval(2.0, 2.0), 3)
    assert not ratio.is_noise


def test_a_difference_inside_its_interval_is_noise():
    """0.9 and 1.1 around the baseline are no difference; one round never is called noise."""
    assert paired_ratio({0: 9.0, 1: 11.0}, {0: 10.0, 1: 10.0}).is_noise
    assert not paired_ratio({0: 10.0}, {0: 10.0}).is_noise


def test_rounds_without_a_partner_have_no_ratio():
    """No common round, or a baseline of 0, is None."""
    assert paired_ratio({0: 1.0}, {1: 1.0}) is None
    assert paired_ratio({0: 1.0}, {0: 0.0}) is None
