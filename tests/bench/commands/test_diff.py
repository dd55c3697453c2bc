"""`diff` at the command line: formats, threshold, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.commands import main

AXES = {"release": "deferred", "free_order": "reverse"}


@pytest.fixture
def results(synthetic: Callable[..., Any], tmp_path: Path) -> Path:
    """Five rounds each: `base`, `same`, and `slow`, which takes a tenth more."""
    for name, scale in (("base", 1.0), ("same", 1.0), ("slow", 1.1)):
        run = synthetic(name, rounds=5)
        cell = run.cell(AXES, baseline=True)
        for number in range(5):
            run.round(cell, number, wall_s=scale * (1 + number / 1000))
        run.end()
    return tmp_path


@pytest.mark.parametrize(
    ("new", "options", "code"),
    [
        ("slow", (), 0),
        ("slow", ("--fail-on", "slower"), 1),
        ("slow", ("--fail-on", "slower", "--threshold", "20%"), 0),
        ("slow", ("--fail-on", "slower", "--threshold", "0.2"), 0),
        ("same", ("--fail-on", "slower"), 0),
    ],
)
def test_the_exit_code_is_for_ci(
    results: Path, new: str, options: tuple[str, ...], code: int
) -> None:
    """1 only if asked for, and only if the change is beyond the threshold."""
    assert main(["diff", str(results / "base"), str(results / new), *options]) == code


def test_every_format_comes_on_stdout(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text by default; md has a heading; json is strict."""
    args = ["diff", str(results / "base"), str(results / "slow")]
    for format_name in ("text", "md", "json"):
        assert main([*args, "--format", format_name]) == 0
        out, err = capsys.readouterr()
        assert "SLOWER" in out
        assert err == ""
    assert json.loads(out)["slower"] == ["deferred/reverse tok_per_s"]


@pytest.mark.parametrize("threshold", ["x", "-1%", "101%", "nan"])
def test_a_threshold_is_a_share(
    results: Path, threshold: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """From 0 to 100 %, with the percent sign or as a fraction."""
    args = ["diff", str(results / "base"), str(results / "slow"), "--threshold", threshold]
    assert main(args) == 2
    assert "expected 3% or 0.03" in capsys.readouterr().err


def test_a_missing_result_is_one_line(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2."""
    assert main(["diff", str(results / "base"), str(results / "none")]) == 2
    assert "no such results folder" in capsys.readouterr().err
