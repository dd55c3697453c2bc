"""`run` on the command line: a table from the file, and an exit code that tells of a fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.commands import main
from bench.samples import read_samples
from deepinfer.cache_engine import KVCache
from tests.bench.tiny import AZURE_ROWS, MOONCAKE_ROWS

WORKLOAD = """\
description: one parent, its children, and two who chat
requests:
  - count: 1
    prompt_tokens: 40
    output_tokens: 9
    fork: {children: 3, output_tokens: 10}
  - {count: 2, prompt_tokens: 30, output_tokens: 8, temperature: 1.0}
"""


@pytest.fixture
def workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's own workload, in another folder than the one they work in."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.yaml").write_text(WORKLOAD)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return "../elsewhere/mine.yaml"


def run(*args: object) -> int:
    """`run ... --profile cpu-tiny`, in this process."""
    return main(["run", *map(str, args), "--profile", "cpu-tiny"])


def test_a_run_prints_its_table_and_keeps_its_samples(
    workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table alone is on stdout, and `export` prints the same bytes from the folder."""
    assert run(workload) == 0
    shown = capsys.readouterr()
    (folder,) = Path("results").iterdir()
    assert folder.name.startswith("mine-cpu-tiny-")
    assert f"mine: 1 cell, 1 round -> {folder}" in shown.err
    assert main(["export", str(folder)]) == 0
    assert capsys.readouterr().out == shown.out
    assert "mine on cpu-tiny" in shown.out
    assert "WRONG" not in shown.out


def test_the_row_says_what_was_set(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Shorthands and settings reach the engine and the file; the seed is recorded."""
    options = ("--release", "step", "--free-order", "by_id", "-s", "fence=block")
    assert run(workload, *options, "--seed", 7, "-o", "out", "--format", "json") == 0
    table = json.loads(capsys.readouterr().out)
    (row,) = table["rows"]
    assert (row["release"], row["free_order"], row["wrong_requests"]) == ("step", "by_id", 0)
    samples = read_samples("out")
    engine = samples.run.config["engine"]
    assert (engine["release"], engine["free_order"], engine["fence"]) == ("step", "by_id", "block")
    assert (samples.run.seed, engine["seed"]) == (7, 7)


def test_rounds_are_counted(workload: str) -> None:
    """`-r 3` is three measured rounds and one warm-up."""
    assert run(workload, "-r", 3, "-o", "out") == 0
    rounds = [record.round for record in read_samples("out").rounds if not record.warmup]
    assert rounds == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "rows"), [("azure-conv", AZURE_ROWS), ("mooncake", MOONCAKE_ROWS)]
)
def test_a_trace_is_replayed_and_the_table_says_how(
    name: str, rows: tuple[str, ...], workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flags for traces reach the requests, and what was scaled stands below the table."""
    Path("trace").write_text("\n".join(rows) + "\n")
    options = ("--trace-file", "trace", "--limit", 2, "--scale-lengths", 0.05, "--speed", 2)
    assert run(name, *options, "-o", "out") == 0
    out = capsys.readouterr().out
    assert "lengths scaled by 0.05" in out
    assert "arrivals sped up by 2" in out
    assert "at most the first 2 requests of the trace" in out
    measured = [request for request in read_samples("out").requests if request.round == 0]
    assert len(measured) == 2
    assert measured[1].arrival_s == pytest.approx(0.026 if name == "azure-conv" else 0.045)


def test_an_unsafe_policy_is_marked_whatever_it_did(
    workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`early` carries UNSAFE, in the table and in a note."""
    assert run(workload, "--release", "early") in (0, 1)
    out = capsys.readouterr().out
    assert "early UNSAFE" in out
    assert "may hand out blocks still in use" in out


def test_wrong_answers_fail_the_run(
    workload: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that loses the copies of a fork: exit code 1, WRONG in progress and table."""
    monkeypatch.setattr(KVCache, "copy_blocks", lambda self, pairs: None)
    assert run(workload, "-o", "out") == 1
    shown = capsys.readouterr()
    assert "3 WRONG" in shown.err
    assert "3 WRONG" in shown.out
    assert read_samples("out").verifications[0].wrong_requests == 3
    assert main(["export", "out", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["wrong_requests"] == 3


def test_a_prompt_that_can_never_fit_is_reported_and_the_rest_run(
    workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """NEVER stands below the table, the others are measured, and the run succeeded."""
    group = "  - {count: 1, prompt_tokens: 5000, output_tokens: 4, arrival: {at_s: 0.5}}\n"
    Path("big.yaml").write_text(WORKLOAD + group)
    assert run("big.yaml", "-o", "out") == 0
    assert "1 NEVER (cannot fit the pool) of 6 requests" in capsys.readouterr().out
    reasons = [r.finish_reason for r in read_samples("out").requests if r.round == 0]
    assert sorted(reasons) == ["forked", *["length"] * 5, "never"]


def test_a_run_without_one_answer_fails(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    """If no request at all can fit there is nothing to show, which exit code 1 tells."""
    Path("big.yaml").write_text(
        "description: d\nrequests:\n  - {count: 2, prompt_tokens: 5000, output_tokens: 4}\n"
    )
    assert run("big.yaml") == 1
    assert "2 NEVER (cannot fit the pool) of 2 requests" in capsys.readouterr().out
