"""`run --record`: the first measured round leaves its log, and every other round leaves none."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.commands import main
from bench.recording import recorded_rounds
from bench.runner import Round
from deepinfer.testing.oplog.log import OperationLog
from deepinfer.testing.oplog.operations import Allocate, Collected

WORKLOAD = """\
description: one parent and its children
requests:
  - count: 1
    prompt_tokens: 40
    output_tokens: 9
    fork: {children: 3, output_tokens: 10}
"""


@pytest.fixture(autouse=True)
def workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the workload, as the working directory."""
    (tmp_path / "mine.yaml").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)


def run(*args: object) -> int:
    """`run mine.yaml ... --profile cpu-tiny`, in this process."""
    return main(["run", "mine.yaml", *map(str, args), "--profile", "cpu-tiny"])


def test_one_round_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    """With its settings, from the first step to the last, and no other round's blocks."""
    assert run("-r", 2, "--record", "ops.jsonl", "--release", "step", "-s", "num_blocks=40") == 0
    log = OperationLog("ops.jsonl")
    assert (log.config.release, log.config.num_blocks) == ("step", 40)
    steps = [op.step for _, op in log if isinstance(op, Collected)]
    assert steps == list(range(1, len(steps) + 1))
    owners = {owner for _, op in log if isinstance(op, Allocate) for owner, *_ in op.takers}
    assert owners == {"r0-0-0", *(f"r0-0-0.{child}" for child in range(3))}
    assert not log.truncated


def test_slots_of_a_hybrid_model_are_recorded_and_replayed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Beside its blocks; the table of a replay then has rows of slots, and `num_state_slots`."""
    profile = ("--profile", "cpu-v41-tiny")
    assert main(["run", "mine.yaml", *profile, "--record", "ops.jsonl"]) == 0
    slots = [op for _, op in OperationLog("ops.jsonl") if isinstance(op, Allocate) and op.pool]
    assert {owner for op in slots for owner, *_ in op.takers} == {
        "r0-0-0",
        *(f"r0-0-0.{child}" for child in range(3)),
    }
    capsys.readouterr()
    assert main(["replay", "ops.jsonl", "-a", "num_state_slots=0,5,2"]) == 0
    shown = capsys.readouterr().out
    handed_out = next(line for line in shown.splitlines() if line.startswith("slots handed out"))
    assert handed_out.split()[3:] == ["4", "4", "1"]
    words = " ".join(shown.split())
    assert "does not fit: 1 state slots for r0-0-0.0 (fork)" in words
    assert main(["replay", "ops.jsonl", "-a", "num_state_slots=1"]) == 2
    assert "num_state_slots: 1 leaves no usable slot" in capsys.readouterr().err


def test_an_existing_file_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is run and nothing overwritten."""
    Path("ops.jsonl").write_text("mine")
    assert run("--record", "ops.jsonl") == 2
    assert "ops.jsonl: exists already" in capsys.readouterr().err
    assert Path("ops.jsonl").read_text() == "mine"
    assert not Path("results").exists()


def test_a_place_that_cannot_be_written_to_is_refused_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before the results folder is made."""
    assert run("--record", "none/ops.jsonl") == 2
    assert "none/ops.jsonl: cannot write" in capsys.readouterr().err
    assert not Path("results").exists()


def test_a_run_that_is_carried_on_is_not_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    """Its first round may be in the results already."""
    assert run("--record", "ops.jsonl", "--resume", "-o", "out") == 2
    assert "--record with --resume" in capsys.readouterr().err


def test_a_comparison_is_not_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    """The hint says how to compare with a log instead."""
    assert main(["compare", "mine.yaml", "--record", "ops.jsonl"]) == 2
    shown = capsys.readouterr().err
    assert "--record: of one run, not of a comparison" in shown
    assert "replay FILE -a NAME=V1,V2" in shown


def test_a_dry_run_writes_no_log() -> None:
    """It measures nothing, so there is nothing to record."""
    assert run("--record", "ops.jsonl", "--dry-run") == 0
    assert not Path("ops.jsonl").exists()


def test_without_a_path_rounds_are_plain() -> None:
    """No recorder, no engine of its own."""
    with recorded_rounds(None) as make:
        assert make is Round
