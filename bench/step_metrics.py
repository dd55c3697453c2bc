"""What the steps of a cell add up to: their times, what they held, how their drafts fared.

Knows step records, what each figure means, and the kind of value that all figures have. Invariant:
a pure function of the records; what they do not say is undefined with its reason, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench import stats
from bench.samples import StepRecord
from deepinfer.config import MAX_DRAFTS


@dataclass(frozen=True, slots=True)
class Metric:
    """A value, or None and the reason why there is none."""

    value: float | None
    reason: str = ""

    @classmethod
    def of(cls, value: float | None, reason: str) -> Metric:
        """`value` where there is one, else undefined because of `reason`."""
        return cls(None, reason) if value is None else cls(value)


def step_metrics(steps: Sequence[StepRecord]) -> dict[str, Metric]:
    """All figures of the steps, by key."""
    return {**_time_metrics(steps), **_ahead_metrics(steps), **_draft_metrics(steps)}


def host_gap(steps: Sequence[StepRecord]) -> tuple[Metric, Metric]:
    """How long the device waited for the host between two steps: the median, and the share.

    In microseconds, and in percent of all steps' time with the gaps before them.
    """
    gaps = [
        (s.gap_us, s.device_ms * 1e3)
        for s in steps
        if s.gap_us is not None and s.device_ms is not None
    ]
    idle_us, all_us = sum(gap for gap, _ in gaps), sum(gap + busy for gap, busy in gaps)
    reason = "no step followed another"
    median_us = stats.median([gap for gap, _ in gaps])
    share = 100 * idle_us / all_us if all_us else None
    return Metric.of(median_us, reason), Metric.of(share, reason)


def _time_metrics(steps: Sequence[StepRecord]) -> dict[str, Metric]:
    host_us = [sum(s.host_us.values()) for s in steps]
    step_ms = [
        (host + s.wait_us + s.result_wait_us) / 1e3 for host, s in zip(host_us, steps, strict=True)
    ]
    held_slots = [s.slots_held for s in steps if s.slots_held is not None]
    mean_wait_us = sum(s.wait_us for s in steps) / len(steps) if steps else None
    reason = "no step in a measured round"
    return {
        "step_ms_p50": Metric.of(stats.percentile(step_ms, 50), reason),
        "host_us_per_step": Metric.of(stats.median(host_us), reason),
        "wait_us_per_step": Metric.of(mean_wait_us, reason),
        "held_blocks_peak": Metric.of(largest([s.blocks_held for s in steps]), reason),
        "held_slots_peak": Metric.of(largest(held_slots), "no step held a state slot"),
    }


def _ahead_metrics(steps: Sequence[StepRecord]) -> dict[str, Metric]:
    """What the device waited for the host, and blocks held for tokens that were not known."""
    gap_us, gap_percent = host_gap(steps)
    ahead = [s.blocks_ahead for s in steps if s.blocks_ahead is not None]
    for_drafts = [s.blocks_for_drafts for s in steps if s.blocks_for_drafts is not None]
    no_count = "no step counted blocks held ahead"
    return {
        "gap_us": gap_us,
        "gap_percent": gap_percent,
        "ahead_blocks_peak": Metric.of(largest(ahead), no_count),
        "ahead_blocks_mean": Metric.of(sum(ahead) / len(ahead) if ahead else None, no_count),
        "draft_blocks_peak": Metric.of(largest(for_drafts), no_count),
    }


def _draft_metrics(steps: Sequence[StepRecord]) -> dict[str, Metric]:
    """How many of the verified drafts were accepted, in all and by position in the proposal."""
    proposed, accepted = [0] * MAX_DRAFTS, [0] * MAX_DRAFTS
    for step in steps:
        for position, count in enumerate(step.drafts_proposed[:MAX_DRAFTS]):
            proposed[position] += count
        for position, count in enumerate(step.drafts_accepted[:MAX_DRAFTS]):
            accepted[position] += count
    num_drafting = sum(step.num_drafting for step in steps)
    length, no_draft = None, "no step verified a draft"
    if num_drafting:
        length = 1 + sum(accepted) / num_drafting
    rates = {
        f"acceptance_{k}": Metric.of(
            right / asked if asked else None,
            f"no draft at position {k}" if num_drafting else no_draft,
        )
        for k, (right, asked) in enumerate(zip(accepted, proposed, strict=True), 1)
    }
    return {"acceptance_length": Metric.of(length, no_draft), **rates}


def largest(values: Sequence[float]) -> float | None:
    """The largest value; None of none."""
    return max(values, default=None)
