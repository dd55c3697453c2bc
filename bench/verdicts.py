"""The verdict on each cell of a run, against its baseline.

Knows the metrics and what makes a speed no result; `bench.stats.judge` knows the numbers.
Invariant: a cell is called FASTER, SLOWER or SAME only if it did the baseline's work, and did it
right, on a GPU that was not held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.metrics import CellMetrics
from bench.stats import Judgement, Verdict, Why, judge, paired_ratio


def judge_cells(metrics: Sequence[CellMetrics]) -> list[Judgement]:
    """One judgement per cell, of its tok/s by the baseline's of the same round."""
    baseline = next((m for m in metrics if m.cell.baseline), None)
    return [_judge_cell(m, baseline) for m in metrics]


def _judge_cell(m: CellMetrics, baseline: CellMetrics | None) -> Judgement:
    if baseline is None:
        return judge(None)
    ratio = paired_ratio(m.tok_per_s_by_round, baseline.tok_per_s_by_round)
    if m is baseline:
        return Judgement(None, Why.BASELINE, ratio)
    judged = judge(ratio)
    doubt = _doubt(m, baseline)
    return judged if doubt is None else replace(judged, verdict=Verdict.UNCLEAR, why=doubt)


def _doubt(m: CellMetrics, baseline: CellMetrics) -> Why | None:
    """What the ratio does not show and a verdict must not hide, the gravest first."""
    if m.wrong_requests.value or baseline.wrong_requests.value:
        return Why.WRONG_ANSWERS
    if m.num_findings or baseline.num_findings:
        return Why.FINDINGS
    if m.cell.unsafe:
        return Why.UNSAFE
    # Per round: an interrupted run may have one round more of the one than of the other.
    if m.num_failed * baseline.num_rounds != baseline.num_failed * m.num_rounds:
        return Why.FAILED_REQUESTS
    if m.slowed_rounds or baseline.slowed_rounds:
        return Why.THROTTLED
    return None
