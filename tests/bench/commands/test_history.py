"""`history` at the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.commands import main

POLLED = {"release": "polled", "free_order": "reverse"}


@pytest.fixture
def results(synthetic: Callable[..., Any], tmp_path: Path) -> Path:
    """Two runs, the second with two cells and unfinished; a broken folder."""
    first = synthetic("first", started_at="2026-01-01T00:00:00+00:00", metadata={"ticket": "42"})
    first.round(first.cell(baseline=True))
    first.end()
    second = synthetic("second", started_at="2026-02-02T00:00:00+00:00", profile="h200")
    second.round(second.cell(baseline=True), wall_s=2.0)
    second.round(second.cell(POLLED, unsafe=True))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "samples.jsonl").write_text("{}\n")
    return tmp_path


def test_a_row_per_cell_a_heading_per_run(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oldest first; run, commit and profile stand in the first row of a run alone."""
    assert main(["history", "fork-batch", "--results", str(results)]) == 0
    out, err = capsys.readouterr()
    rows = out.splitlines()[2:]
    assert [row.split()[:2] for row in rows[:2]] == [
        ["2026-01-01", "00:00:00"],
        ["2026-02-02", "00:00:00"],
    ]
    assert "ticket=42" in rows[0]
    assert "unfinished" in rows[1]
    assert rows[2].split()[0] == "polled/reverse"
    assert "UNSAFE" in rows[2]
    assert err == (f"left out: {results}/broken/samples.jsonl:1: not a record: no `kind`\n"), (
        "one line for the broken folder"
    )


def test_json_has_every_figure(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A list of cells; a profile selects."""
    args = ["history", "fork-batch", "--results", str(results), "--format", "json"]
    assert main([*args, "--profile", "h200", "--rebuild"]) == 0
    cells = json.loads(capsys.readouterr().out)
    assert [cell["axes"]["release"] for cell in cells] == ["deferred", "polled"]
    assert [cell["tok_per_s"] for cell in cells] == [1.5, 3.0]
    assert {cell["status"] for cell in cells} == {"unfinished"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fork-bach"], "no result of workload 'fork-bach'; expected 'fork-batch'"),
        (["fork-batch", "--profile", "x"], "no result of workload fork-batch on profile 'x'"),
        (["fork-batch", "--results", "nowhere"], "nowhere: no such results folder"),
    ],
)
def test_what_is_not_there_is_one_line(
    results: Path, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and the nearest name."""
    assert main(["history", "--results", str(results), *args]) == 2
    assert message in capsys.readouterr().err
