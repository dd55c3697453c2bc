"""The test of the verdicts: it holds for the verdicts there are, and fails for bad ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import instrument
from bench.instrument import (
    Bound,
    Noise,
    SlowedRound,
    check_fake,
    fake_comparison,
)
from bench.runner import Round, Target
from bench.stats import Estimate, Interval, Judgement, Verdict, Why
from tests.bench.tiny import PLAIN, requests_of, tiny, workload


def test_the_verdicts_hold_on_the_fake_target():
    """60 comparisons of each kind, at the default settings, meet the bounds."""
    alike, slowed = check_fake(60, 0)
    assert alike.passed, alike
    assert slowed.passed, slowed
    assert sum(alike.verdicts.values()) == alike.num_trials == 60
    assert slowed.mean_ratio == pytest.approx(1 / 1.05, abs=0.005)


def test_a_verdict_that_is_too_sure_fails_the_check(monkeypatch):
    """An interval that is never wide enough: false alarms and lost coverage are both seen."""

    def too_sure(metrics):
        speeds = [next(iter(m.tok_per_s_by_round.values())) for m in metrics]
        ratio = speeds[1] / speeds[0]
        verdict = Verdict.FASTER if ratio > 1 else Verdict.SLOWER
        estimate = Estimate(ratio, Interval(ratio, ratio), 1.0, 1)
        return [None, Judgement(verdict, Why.EXCLUDES_1, estimate)]

    monkeypatch.setattr(instrument, "judge_cells", too_sure)
    alike, slowed = check_fake(20, 0)
    assert not alike.passed
    assert not slowed.passed


def test_the_fake_is_a_function_of_its_seed():
    """The same seed gives the same judgement, another one another ratio."""
    assert fake_comparison((1, 2), 0.05) == fake_comparison((1, 2), 0.05)
    assert fake_comparison((1, 2), 0.05).ratio != fake_comparison((1, 3), 0.05).ratio


def test_without_noise_the_ratio_is_the_one_planted():
    """The slowed cell is the second, by exactly the factor, and the drift is nobody's."""
    quiet = Noise(deviation=0.0, drift=0.0, spike_share=0.0)
    judged = fake_comparison((0,), 0.05, quiet)
    assert judged.verdict is Verdict.SLOWER
    assert judged.ratio.center == pytest.approx(1 / 1.05)


def test_bounds_are_met_at_the_limit():
    """At most and at least include the limit itself."""
    assert Bound("x", 0.05, 0.05, is_most=True).is_met
    assert not Bound("x", 0.06, 0.05, is_most=True).is_met
    assert Bound("x", 0.9, 0.9, is_most=False).is_met
    assert not Bound("x", 0.89, 0.9, is_most=False).is_met


class Clock:
    """Time that passes when it is told to, and a nanosecond with each look."""

    def __init__(self):
        self.now = 0

    def perf_counter_ns(self):
        self.now += 1
        return self.now


def test_the_planted_slowdown_slows_the_second_cell_alone(monkeypatch):
    """Steps of a microsecond last three in cell 1, and one in cell 0, by the clock they wait on."""
    clock = Clock()

    def take(self, output):
        clock.now += 1000

    monkeypatch.setattr(instrument, "time", clock)
    monkeypatch.setattr(Round, "_take", take)
    resolved = replace(tiny(workload(PLAIN)), device="cpu-stepped")
    target, lasted = Target(resolved), {}
    try:
        for cell in (0, 1):
            specs = requests_of(resolved)
            played = SlowedRound(
                resolved, target, specs, slowdown=2.0, cell=cell, index=0, warmup=False
            )
            played._start_ns = clock.now
            begun = clock.now
            for _ in range(5):
                played._take(None)
            lasted[cell] = (clock.now - begun) / 5
    finally:
        target.close()
    assert lasted[0] == pytest.approx(1000, rel=0.01)
    assert lasted[1] == pytest.approx(3000, rel=0.01)
