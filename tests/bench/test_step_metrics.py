"""Figures of steps: the host gap, blocks held ahead, drafts by position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bench.samples import StepRecord
from bench.step_metrics import host_gap, largest, step_metrics

Steps = Callable[..., list[StepRecord]]


@pytest.fixture
def steps(make_step: Callable[..., StepRecord]) -> Steps:
    """A step for each of these changes of the usual one."""

    def make(*changes: dict[str, Any]) -> list[StepRecord]:
        return [replace(make_step(step=i), **change) for i, change in enumerate(changes)]

    return make


def test_the_gap_is_the_median_and_its_share_that_of_all_time(steps: Steps) -> None:
    """Gaps of 10, 10 and 70 us before steps of 90, 90 and 30 us: 10 us, and 30 %."""
    gaps = ((None, 5.0), (10.0, 0.09), (10.0, 0.09), (70.0, 0.03))
    records = steps(*({"gap_us": gap, "device_ms": device} for gap, device in gaps))
    gap_us, percent = host_gap(records)
    assert gap_us.value == 10
    assert percent.value == pytest.approx(30)
    figures = step_metrics(records)
    assert (figures["gap_us"], figures["gap_percent"]) == (gap_us, percent)


def test_what_was_never_measured_has_no_figure(steps: Steps) -> None:
    """Steps of an older version have neither gaps nor blocks ahead nor drafts."""
    figures = step_metrics(steps({}, {}))
    for names, reason in (
        (("gap_us", "gap_percent"), "no step followed another"),
        (
            ("ahead_blocks_peak", "ahead_blocks_mean", "draft_blocks_peak"),
            "no step counted blocks held ahead",
        ),
        (("acceptance_length", "acceptance_1", "acceptance_5"), "no step verified a draft"),
    ):
        for name in names:
            assert (figures[name].value, figures[name].reason) == (None, reason)
    assert {metric.reason for metric in step_metrics([]).values() if metric.value is None} >= {
        "no step in a measured round",
        "no step followed another",
    }


def test_drafts_are_counted_by_position_over_all_steps(steps: Steps) -> None:
    """5 requests drafted 5, 5 and 3; 4, 2 and 0 were accepted: a length of 1 + 6/5."""
    figures = step_metrics(
        steps(
            {"num_drafting": 3, "drafts_proposed": (3, 3, 3), "drafts_accepted": (3, 2, 0)},
            {"num_drafting": 2, "drafts_proposed": (2, 2), "drafts_accepted": (1,)},
            {},
        )
    )
    assert figures["acceptance_length"].value == pytest.approx(2.2)
    rates = [figures[f"acceptance_{k}"].value for k in (1, 2, 3, 4)]
    assert rates == [0.8, 0.4, 0, None]
    assert figures["acceptance_4"].reason == "no draft at position 4"


def test_blocks_ahead_have_a_peak_and_a_mean(steps: Steps) -> None:
    """4 and 1 blocks, 3 and 0 of them for drafts; a 0 that was counted is a 0."""
    figures = step_metrics(
        steps(
            {"blocks_ahead": 4, "blocks_for_drafts": 3},
            {"blocks_ahead": 1, "blocks_for_drafts": 0},
        )
    )
    assert figures["ahead_blocks_peak"].value == 4
    assert figures["ahead_blocks_mean"].value == 2.5
    assert figures["draft_blocks_peak"].value == 3
    none_ahead = step_metrics(steps({"blocks_ahead": 0, "blocks_for_drafts": 0}))
    assert none_ahead["ahead_blocks_peak"].value == 0


def test_the_largest_of_nothing_is_nothing() -> None:
    """No 0 where there is no value."""
    assert (largest([3, 5, 1]), largest([])) == (5, None)
