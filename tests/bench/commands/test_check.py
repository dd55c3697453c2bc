"""`check power` on the command line: the counts, and an exit code that is the verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.catalog import find_profile
from bench.commands import main


def check(*args: object, profile: str = "cpu-tiny") -> int:
    """`check power --trials 4 ...`, in this process."""
    return main(["check", "power", "--trials", "4", "--profile", profile, *map(str, args)])


def with_tolerance(folder: Path, score: str, logprob: str) -> str:
    """A copy of cpu-tiny that judges with other tolerances."""
    text = find_profile("cpu-tiny").read_text()
    head, _, _ = text.partition("verify:")
    path = folder / "mine.yaml"
    path.write_text(f"{head}verify: {{score_tolerance: {score}, logprob_tolerance: {logprob}}}\n")
    return str(path)


def test_the_counts_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for the clean requests and for each fault, with the tolerance below; exit code 0."""
    assert check() == 0
    shown = capsys.readouterr()
    lines = [line.split() for line in shown.out.splitlines()]
    flagged = {line[0]: line[1:4] for line in lines if len(line) == 6 and line[1] == "4"}
    assert flagged == {
        "clean": ["4", "0", "0.0"],
        "swap_blocks": ["4", "4", "100.0"],
        "overwrite": ["4", "4", "100.0"],
        "lose_row": ["4", "4", "100.0"],
    }
    assert "more than 0.0002 nats" in shown.out
    assert "lose_row: 4 of 4" in shown.err


def test_json_has_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """`--format json` gives one object per kind, clean first."""
    assert check("--format", "json", "--seed", 3) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["fault"] for row in rows] == ["clean", "swap_blocks", "overwrite", "lose_row"]
    assert all(row["smallest_diff"] <= row["largest_diff"] for row in rows)


def test_missed_faults_fail_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tolerances that let faults pass are found out: exit code 1."""
    assert check("--format", "json", profile=with_tolerance(tmp_path, "1.0e+9", "1.0e+9")) == 1
    assert {row["flagged"] for row in json.loads(capsys.readouterr().out)} == {0}


def test_false_alarms_fail_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tolerance below what rounding does flags clean requests: exit code 1."""
    profile = with_tolerance(tmp_path, "1.0e-3", "1.0e-12")
    assert check("--format", "json", profile=profile) == 1
    assert json.loads(capsys.readouterr().out)[0]["flagged"] == 4
