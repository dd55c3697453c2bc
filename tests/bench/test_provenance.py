"""Whether two results come from one machine and code."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from bench.provenance import commit_of, environment_changes

HERE: dict[str, Any] = {
    "time": "2026-01-02T03:04:05+00:00",
    "host": "bench-1",
    "os": "Linux",
    "cpu": {"model": "EPYC", "logical_cores": 2},
    "versions": {"torch": "2.13.0", "numpy": "2.4.6", "transformers": None},
    "gpu": {"name": "H200", "driver": "570", "sm_clock_mhz": 1980},
    "git": {"commit": "0123456789" * 4, "dirty": False},
    "reasons": {"versions.transformers": "not installed"},
}


def changed(**parts: Any) -> dict[str, Any]:
    """`HERE` with some parts replaced."""
    return {**copy.deepcopy(HERE), **parts}


def test_what_differs_from_run_to_run_is_no_change() -> None:
    """Times, clocks and reasons are never named."""
    gpu = {**HERE["gpu"], "sm_clock_mhz": 300}
    assert environment_changes(HERE, changed(time="later", gpu=gpu, reasons={})) == []


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"host": "bench-2"}, "host bench-1 -> bench-2"),
        ({"cpu": {"model": "Xeon", "logical_cores": 2}}, "cpu EPYC -> Xeon"),
        ({"versions": {"torch": "2.14.0"}}, "torch 2.13.0 -> 2.14.0"),
        ({"versions": {"transformers": "5.24.0"}}, "transformers None -> 5.24.0"),
        ({"gpu": None}, "gpu, which one of them lacks"),
        ({"git": {"commit": "f" * 40}}, "commit 0123456789 -> ffffffffff"),
    ],
)
def test_each_fact_is_named_with_both_values(parts: dict[str, Any], expected: str) -> None:
    """Machine, versions and commit: one entry a fact."""
    assert environment_changes(HERE, changed(**parts)) == [expected]


def test_facts_one_side_does_not_record_are_left_out() -> None:
    """An old file without an environment cannot be said to differ in it."""
    assert environment_changes({"gpu": {}}, HERE) == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (HERE, "0123456789"),
        (changed(git={"commit": "a" * 40, "dirty": True}), "aaaaaaaaaa+"),
        (changed(git={"commit": None, "dirty": None}), None),
        ({}, None),
    ],
)
def test_a_commit_is_short_and_says_whether_files_were_changed(
    environment: dict[str, Any], expected: str | None
) -> None:
    """Ten digits, `+` for uncommitted changes, None if unknown."""
    assert commit_of(environment) == expected
