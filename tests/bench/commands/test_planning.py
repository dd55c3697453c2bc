"""`--resume`, `--dry-run`, `--metadata` and `--fail-fast` at the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.commands import main
from bench.commands.planning import parse_metadata
from bench.runner import Round
from bench.samples import read_samples
from deepinfer.errors import UserError

WORKLOAD = """\
description: small
requests:
  - {count: 2, prompt_tokens: 20, output_tokens: 6}
"""
CELLS = ("--profile", "cpu-tiny", "--release", "deferred,step", "-r", "2")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small workload, the working directory of each test."""
    (tmp_path / "small.yaml").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def failing_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured rounds of the first cell raise; nothing else does."""
    plain_run = Round.run

    def run(self: Round) -> Any:
        if self._cell == 0 and self._index >= 0:
            raise RuntimeError("planted\nin two lines")
        return plain_run(self)

    monkeypatch.setattr(Round, "run", run)


def compare(*args: str) -> int:
    """`compare small.yaml` with the two cells."""
    return main(["compare", "small.yaml", *CELLS, *args])


def test_a_dry_run_shows_the_cells_and_leaves_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells, rounds, seconds and where these are from; no results folder appears."""
    assert compare("--dry-run") == 0
    out, err = capsys.readouterr()
    row = next(line for line in out.splitlines() if "release=step" in line)
    assert " ".join(row.split()[2:]) == "2 0.0 s rule: 5e10 FLOP/s, never run before"
    assert "2 cells, 4 rounds: about 0.0 s" in out
    assert err == ""
    assert [path.name for path in here.iterdir()] == ["small.yaml"]


def test_a_dry_run_refuses_drafts_that_the_model_has_no_layers_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As the run would, before it is begun."""
    assert compare("--dry-run", "-s", "drafts=2", "-s", "drafter=mtp") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "drafter: 'mtp' asks the model's own draft layers, and a Qwen3 model has none" in err


def test_a_dry_run_knows_earlier_results(capsys: pytest.CaptureFixture[str]) -> None:
    """What was measured once is estimated from that; the index is not written for it."""
    assert compare("-o", "results/a") == 0
    capsys.readouterr()
    assert compare("--dry-run") == 0
    assert capsys.readouterr().out.count("1 earlier run") == 2
    assert not Path("results/index.sqlite").exists()


def test_metadata_is_stored_and_exported(capsys: pytest.CaptureFixture[str]) -> None:
    """Under `run.metadata` of the JSON, and in the history."""
    assert compare("-o", "results/a", "--metadata", "ticket=42", "--metadata", "by=a=b") == 0
    capsys.readouterr()
    assert main(["export", "results/a", "--format", "json"]) == 0
    exported = json.loads(capsys.readouterr().out)
    assert exported["run"]["metadata"] == {"ticket": "42", "by": "a=b"}
    assert main(["history", "small", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["metadata"] == {"ticket": "42", "by": "a=b"}


@pytest.mark.parametrize(
    ("items", "message"),
    [(["x"], "no key; expected KEY=VALUE"), (["=x"], "no key"), (["a=1", "a=2"], "given twice")],
)
def test_bad_metadata_is_refused(items: list[str], message: str) -> None:
    """A key, an equals sign, and each key once."""
    with pytest.raises(UserError, match=message):
        parse_metadata(items)


def test_resume_carries_a_cut_run_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The rounds that are left are run, the table is that of all of them."""
    assert compare("-o", "run") == 0
    path = Path("run/samples.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    last_round = max(i for i, line in enumerate(lines) if b'"kind": "round"' in line)
    path.write_bytes(b"".join(lines[:last_round]) + lines[last_round][:40])
    capsys.readouterr()
    assert compare("-o", "run", "--resume", "--dry-run") == 0
    assert "2 cells, 1 round:" in capsys.readouterr().out
    assert compare("-o", "run", "--resume") == 0
    out, err = capsys.readouterr()
    assert "resumed: 1 of 4 rounds are left" in err
    assert "TRUNCATED" not in out
    samples = read_samples("run")
    assert sum(not record.warmup for record in samples.rounds) == 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--resume",), "error: --resume: no folder given"),
        (("--resume", "-o", "nowhere"), "error: nowhere: no such results folder"),
        (("--resume", "-o", "run", "--seed", "5"), "configuration"),
        (("-o", "run"), "results exist already"),
    ],
)
def test_what_cannot_be_resumed_is_one_line(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, an error and perhaps a hint, and the old file untouched."""
    assert compare("-o", "run") == 0
    before = Path("run/samples.jsonl").read_bytes()
    capsys.readouterr()
    assert compare(*args) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert all(line.startswith(("error: ", "hint: ")) for line in err.splitlines())
    assert out == ""
    assert Path("run/samples.jsonl").read_bytes() == before


@pytest.mark.usefixtures("failing_cell")
def test_a_failed_cell_leaves_its_reason_and_the_others_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its row is empty with a footnote, the other has its figures; exit code 1."""
    assert compare("-o", "run", "--format", "json") == 1
    out, err = capsys.readouterr()
    failed, good = json.loads(out)["rows"]
    reason = "failed in round 1: RuntimeError: planted in two lines"
    assert failed["tok_per_s"] is None
    assert failed["undefined"]["tok_per_s"] == failed["undefined"]["wrong_requests"] == reason
    assert good["tok_per_s"] > 0
    assert "release=deferred free_order=reverse  FAILED: RuntimeError: planted in two lines" in err
    samples = read_samples("run")
    assert sorted((r.cell, r.round) for r in samples.rounds if not r.warmup) == [(1, 0), (1, 1)]
    assert samples.end is not None
    assert samples.end.status == "complete"


@pytest.mark.usefixtures("failing_cell")
def test_fail_fast_stops_at_the_first_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """The file says `stopped` and by which cell; exit code 1."""
    assert compare("-o", "run", "--fail-fast") == 1
    out, err = capsys.readouterr()
    samples = read_samples("run")
    assert samples.end is not None
    assert samples.end.status == "stopped"
    assert samples.end.reason == "release=deferred free_order=reverse failed"
    assert "STOPPED" in out
    assert "stopped; what was measured is in run" in err
    assert sum(not record.warmup for record in samples.rounds) <= 1
