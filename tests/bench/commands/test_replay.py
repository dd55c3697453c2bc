"""`replay` on the command line: cells side by side, exit codes, and errors of one line."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from bench.commands import main
from deepinfer.testing.explorer.recording import write_file
from deepinfer.testing.explorer.runs import Outcome, Setup
from tests.bench.tiny import run_cli
from tests.deepinfer.testing.oplog.op_logs import LATE_COPY, SMALL, TWO_IN_FLIGHT, write_log


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A log in the working directory."""
    monkeypatch.chdir(tmp_path)
    write_log(Path("ops.jsonl"), TWO_IN_FLIGHT)
    return "ops.jsonl"


def test_cells_stand_side_by_side(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A column for each policy, a row for each figure, and UNSAFE where it belongs."""
    assert main(["replay", log, "-a", "release=early,polled,ordered"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["release", "early", "UNSAFE", "polled", "ordered"]
    rows = {line[:24].strip(): line[24:].split() for line in lines[2:20]}
    assert rows["operations"] == [str(len(TWO_IN_FLIGHT))] * 3
    assert rows["host waits"] == ["0", "1", "0"]
    assert rows["stream waits"] == ["0", "0", "1"]
    assert rows["refused while withheld"] == ["0", "1", "0"]
    assert rows["hazards"][0] != "0"
    assert rows["hazards"][1:] == ["0", "0"]
    assert any("nothing orders it behind" in line for line in lines)


def test_without_axes_the_recorded_choice_is_replayed(
    log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One cell, with what the header says."""
    assert main(["replay", log, "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["release"], row["free_order"], row["unsafe"]) == ("step", "reverse", False)
    assert (row["blocks_allocated"], row["blocks_touched"], row["host_waits"]) == (5, 3, 1)
    assert (row["wrong_reads"], row["hazards"], row["contradictions"]) == (0, 0, 0)
    assert row["stopped"] is None


def test_every_combination_is_a_cell(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The last axis varies fastest, managers behind the axes; CSV has a row for each."""
    options = ["-a", "num_blocks=4,9", "-a", "free-order=forward,by_id", "--manager", "reference"]
    assert main(["replay", log, *options, "--manager", "deepinfer", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    keys = ("num_blocks", "free_order", "manager")
    cells = [tuple(row[key] for key in keys) for row in rows]
    assert cells == [
        (size, order, manager)
        for size in ("4", "9")
        for order in ("forward", "by_id")
        for manager in ("reference", "deepinfer")
    ]


def test_more_cells_than_fit_beside_each_other(
    log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Go into a second table; no line is wider than the page, and the notes come once."""
    axes = ["-a", "release=polled,ordered", "-a", "free_order=forward,by_id,reverse"]
    assert main(["replay", log, *axes]) == 0
    out = capsys.readouterr().out
    assert out.count("stream waits") == 2
    assert out.count("reuse distance: the median") == 1
    assert max(map(len, out.splitlines())) <= 100


def test_a_pool_too_small_is_said_and_the_others_go_on(
    log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not fitting is an answer; exit code 1 only if no cell reaches the end."""
    assert main(["replay", log, "-a", "num_blocks=3,4"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "num_blocks=3: stopped at line 10: does not fit: 3 blocks for second (admit)" in out
    assert main(["replay", log, "-a", "num_blocks=3"]) == 1


def test_a_safe_policy_that_goes_wrong_fails(
    log: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: a policy called safe that waits for nothing."""
    from deepinfer.release import POLICIES, Early

    write_log(Path("late.jsonl"), LATE_COPY)
    assert main(["replay", "late.jsonl", "-a", "release=early"]) == 0
    assert "reads a2 of child" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setitem(POLICIES, "polled", Early())
    assert main(["replay", "late.jsonl", "-a", "release=polled"]) == 1


def test_checks_can_be_left_out(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Off means that no hazard is looked for; wrong reads are always counted."""
    assert main(["replay", log, "-a", "release=early", "--check", "off", "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["hazards"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-a", "relase=step"], "did you mean|'release'"),
        (["-a", "release=stepp"], "'step'"),
        (["-a", "admission=prompt"], "admission: what it decides is in the log"),
        (["-a", "block_size=16"], "block_size: what it decides is in the log"),
        (
            ["-a", "releas=step"],
            "releas: what it decides is in the log, or nothing; expected 'release'",
        ),
        (["-a", "num_blocks=1"], "num_blocks"),
        (["--manager", "refrence"], "unknown name 'refrence'"),
        (["--check", "oder"], "unknown checker .*'order'"),
        (["--check", "tags"], "unknown checker"),
        (["--progress", "soon"], "expected late, recorded or random:SEED"),
    ],
)
def test_bad_choices_are_bad_input(
    options: list[str], message: str, log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and the valid names."""
    import re

    assert main(["replay", log, *options]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_log_without_operations_proves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was killed before its first measured step: exit code 2, no table of zeros."""
    path = write_log(tmp_path / "ops.jsonl", [])
    assert main(["replay", str(path)]) == 2
    shown = capsys.readouterr()
    assert "the log holds no operation" in shown.err
    assert not shown.out


def test_a_broken_line_is_bad_input(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Named with its number; no table is printed."""
    with Path(log).open("a") as file:
        file.write('{"op": "collectd", "step": 3}\n')
    assert main(["replay", log]) == 2
    shown = capsys.readouterr()
    assert f"ops.jsonl:{len(TWO_IN_FLIGHT) + 3}: unknown operation 'collectd'" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("content", ["", "{}\n", '{"kind": "run"}\n'])
def test_another_file_is_bad_input(
    content: str, log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and how a log is made."""
    Path("other.jsonl").write_text(content)
    assert main(["replay", "other.jsonl"]) == 2
    assert "not an operation log" in capsys.readouterr().err
    assert main(["replay", "missing.jsonl"]) == 2


@pytest.mark.parametrize("failed", [True, False])
def test_a_failure_of_the_explorer_is_handed_over(
    failed: bool, log: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the format in its first line; exit code 1 if it fails again."""
    outcome = Outcome(log=["submit"])
    if failed:
        outcome.findings, outcome.hazards, outcome.num_findings = ["a hazard"], 1, 1
    assert outcome.failed == failed
    monkeypatch.setattr(
        "deepinfer.testing.explorer.explore.replay_file", {Path("run.json"): outcome}.get
    )
    write_file(Path("run.json"), "an example", Setup(SMALL), outcome)
    assert main(["replay", "run.json"]) == int(failed)
    assert capsys.readouterr().out.splitlines() == [
        "submit",
        *outcome.findings,
        f"0 wrong rows, 0 wrong tokens, {int(failed)} hazards, 0 other problems",
    ]


def test_an_exploration_is_run_again(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of the explorer, with nothing done in it and so nothing wrong."""
    write_file(Path("run.json"), "an example", Setup(SMALL), Outcome())
    assert main(["replay", "run.json"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 wrong rows, 0 wrong tokens")


def test_a_replay_needs_no_torch(log: str, tmp_path: Path) -> None:
    """The whole command runs without it."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    done = run_cli("replay", log, "-a", "release=polled,ordered", cwd=tmp_path, env=_env(tmp_path))
    assert done.returncode == 0, done.stderr


def _env(first: Path) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.fspath(first)}
