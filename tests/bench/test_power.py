"""The check can fail: planted faults are flagged, clean requests are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from bench.power import CLEAN, FAULTS, PowerRow, measure_power
from bench.runner import Target
from bench.spec import Resolved
from tests.bench.tiny import PLAIN, silent, tiny, workload

TRIALS = 200


@pytest.fixture(scope="module")
def resolved() -> Resolved:
    """cpu-tiny; the workload is not used."""
    return tiny(workload(PLAIN))


@pytest.fixture(scope="module")
def target(resolved: Resolved) -> Iterator[Target]:
    """Device, weights and reference."""
    opened = Target(resolved)
    yield opened
    opened.close()


def test_faults_are_flagged_and_clean_requests_are_not(resolved: Resolved, target: Target) -> None:
    """Of 200 trials of each fault at least 99 % are flagged, and of 200 clean ones none."""
    said: list[str] = []
    rows = {row.fault: row for row in measure_power(resolved, target, TRIALS, said.append)}
    assert list(rows) == [CLEAN, *FAULTS]
    assert {row.trials for row in rows.values()} == {TRIALS}
    clean = rows.pop(CLEAN)
    assert clean.flagged == 0
    assert clean.largest_diff < resolved.verify.logprob_tolerance / 10
    for row in rows.values():
        assert row.flagged >= 0.99 * TRIALS, row
    assert said[-1] == f"lose_row: {TRIALS} of {TRIALS}"


def test_a_blind_check_flags_nothing(resolved: Resolved, target: Target) -> None:
    """With tolerances that let everything pass, the same faults go unseen: no row is made up."""
    verify = resolved.verify.model_copy(update={"score_tolerance": 1e9, "logprob_tolerance": 1e9})
    blind = dataclasses.replace(resolved, verify=verify)
    rows = list(measure_power(blind, target, 16, silent))
    assert {row.flagged for row in rows} == {0}
    assert all(row.largest_diff > 1 for row in rows if row.fault != CLEAN)


@pytest.mark.parametrize("trials", [1, 17])
def test_any_number_of_trials(resolved: Resolved, target: Target, trials: int) -> None:
    """One trial has company for the fault that needs another request; the rest is left out.

    A trial counted twice or lost would show in what is flagged: of these every fault.
    """
    rows = list(measure_power(resolved, target, trials, silent))
    assert [row.trials for row in rows] == [trials] * 4
    assert [row.flagged for row in rows] == [0, trials, trials, trials]


def test_trials_are_drawn_from_the_seed(resolved: Resolved, target: Target) -> None:
    """The same seed finds the same rows, another seed others."""

    def rows(seed: int) -> list[PowerRow]:
        return list(measure_power(resolved.with_engine(seed=seed), target, 4, silent))

    assert rows(3) == rows(3) != rows(4)


def test_a_profile_of_short_requests_can_be_tested(resolved: Resolved, target: Target) -> None:
    """The trials bring their own pool and lengths, whatever the profile allows."""
    short = resolved.with_engine(max_model_len=8, num_blocks=2)
    rows = list(measure_power(short, target, 2, silent))
    assert rows[0].flagged == 0
