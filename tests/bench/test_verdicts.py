"""The verdict on a cell: the numbers, and what they do not show."""

from __future__ import annotations

import pytest

from bench.metrics import compute_metrics
from bench.stats import Verdict, Why
from bench.verdicts import judge_cells

SLOW = {"torch_peak_allocated_bytes": 1, "gpu": {"slowdowns": ["hw_slowdown"]}}
DONE = (0.0, (0.1, 0.2, 0.4), "length")


def second_of(synthetic, cell=None, round_=None, base=None):
    """The judgement on a cell twice as fast as its baseline, over 7 rounds."""
    run = synthetic(rounds=7)
    cells = [run.cell(baseline=True), run.cell({"release": "polled"}, **(cell or {}))]
    for number in range(7):
        run.round(cells[0], number, **(base or {}))
        run.round(cells[1], number, wall_s=0.5, **(round_ or {}))
    baseline, judged = judge_cells(compute_metrics(run.end()))
    assert (baseline.verdict, baseline.why) == (None, Why.BASELINE)
    return judged


def test_a_cell_that_did_the_same_work_is_faster(synthetic):
    """Nothing is in doubt: the interval decides."""
    judged = second_of(synthetic)
    assert (judged.verdict, judged.why) == (Verdict.FASTER, Why.EXCLUDES_1)
    assert judged.ratio.center == 2.0


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"cell": {"unsafe": True}}, Why.UNSAFE),
        ({"round_": {"wrong": 1}}, Why.WRONG_ANSWERS),
        ({"base": {"wrong": 1}}, Why.WRONG_ANSWERS),
        ({"round_": {"counters": {"wrong_rows": 1}}}, Why.FINDINGS),
        ({"base": {"counters": {"hazards": 1}}}, Why.FINDINGS),
        ({"round_": {"requests": (DONE, (0.0, (), "never"))}}, Why.FAILED_REQUESTS),
        ({"round_": {"memory": SLOW}}, Why.THROTTLED),
        ({"base": {"memory": SLOW}}, Why.THROTTLED),
    ],
)
def test_a_doubtful_speed_has_no_verdict(synthetic, given, why):
    """Twice as fast, but unsafe, wrong, not the same work or throttled: UNCLEAR, and why."""
    judged = second_of(synthetic, **given)
    assert (judged.verdict, judged.why) == (Verdict.UNCLEAR, why)
    assert judged.ratio is not None


def test_without_a_baseline_nothing_is_compared(synthetic):
    """A single cell that is no baseline: no ratio, and the reason."""
    run = synthetic()
    run.round(run.cell())
    (judged,) = judge_cells(compute_metrics(run.end()))
    assert (judged.verdict, judged.why) == (Verdict.UNCLEAR, Why.NO_COMMON_ROUND)
