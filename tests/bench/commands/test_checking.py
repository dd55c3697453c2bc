"""`--check`: its values, what they set, and what a finding does to table and exit code."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from bench.commands import main
from bench.commands.checking import ChecksType
from bench.samples import read_samples
from deepinfer.cache_engine import KVCache
from tests.bench.commands.test_compare import WORKLOAD

COMMON = ("mine.yaml", "--profile", "cpu-tiny")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a workload of forks, to work in."""
    (tmp_path / "mine.yaml").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("tags", "tags"),
        ("order, tags,order", "order+tags"),
        ("all", "tags+order+conservation"),
        ("off", "off"),
    ],
)
def test_values_of_the_option(given: str, value: str) -> None:
    """Names with commas become one value of the engine's `checks`."""
    assert ChecksType().convert(given, None, None) == value


@pytest.mark.parametrize("given", ["tag", "tags,", ""])
def test_a_wrong_name_is_answered_with_the_right_ones(given: str) -> None:
    """The nearest, and all there are."""
    with pytest.raises(click.BadParameter, match=r"unknown checker .*tags, order, conservation"):
        ChecksType().convert(given, None, None)


@pytest.mark.parametrize("given", ["off,tags", "tags,all"])
def test_all_and_off_stand_alone(given: str) -> None:
    """Beside names they are not called unknown."""
    with pytest.raises(click.BadParameter, match="stands alone"):
        ChecksType().convert(given, None, None)


def counters(folder: str, round_: int) -> dict[str, float | None]:
    """What the first cell's round counted."""
    return next(r.counters for r in read_samples(folder).rounds if r.round == round_)


def test_by_default_only_the_first_warm_up_is_tagged(capsys: pytest.CaptureFixture[str]) -> None:
    """Measured rounds are as fast as they were, and the table counts the wrong rows."""
    assert main(["run", *COMMON, "-o", "out", "--format", "json"]) == 0
    assert counters("out", -1)["wrong_rows"] == 0
    assert "wrong_rows" not in counters("out", 0)
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert (row["wrong_rows"], row["hazards"], row["unsafe"]) == (0, None, False)


def test_off_means_no_round_at_all() -> None:
    """Not even the warm-up is tagged, and the table says that nothing was."""
    assert main(["run", *COMMON, "-o", "out", "--check", "off"]) == 0
    assert "wrong_rows" not in counters("out", -1)


def test_named_checkers_watch_every_round(capsys: pytest.CaptureFixture[str]) -> None:
    """Each counts, and the table says that the times include them."""
    assert main(["run", *COMMON, "-o", "out", "--check", "all"]) == 0
    for number in (-1, 0):
        found = counters("out", number)
        assert [found[name] for name in ("wrong_rows", "hazards", "contradictions")] == [0] * 3
    said = " ".join(capsys.readouterr().out.split())
    assert "tags, order, conservation checked in measured rounds too" in said


def test_checks_are_an_axis(capsys: pytest.CaptureFixture[str]) -> None:
    """Cells with and without, several joined by +; not beside the option."""
    axis = ("-a", "checks=off,tags+order")
    assert main(["compare", *COMMON, *axis, "-r", "1", "-o", "out", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["checks"], row["hazards"]) for row in rows] == [("off", None), ("tags+order", 0)]
    assert main(["compare", *COMMON, *axis, "--check", "tags"]) == 2
    assert "axis checks: also set by a flag" in capsys.readouterr().err
    assert main(["compare", *COMMON, "-a", "checks=off,tags+ordre"]) == 2
    assert "unknown name (got 'tags+ordre'); expected 'order'" in capsys.readouterr().err


def test_a_wrong_row_fails_the_run_and_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies that are lost: marked in progress, table, note and file, and exit code 1."""
    monkeypatch.setattr(KVCache, "copy_blocks", lambda self, pairs: None)
    assert main(["run", *COMMON, "-o", "out"]) == 1
    shown = capsys.readouterr()
    out = " ".join(shown.out.split())
    assert "UNSAFE: tags, step 2: request" in shown.err
    assert "deferred UNSAFE" in out
    warmup = read_samples("out").rounds[0]
    count = warmup.counters["wrong_rows"]
    assert f"UNSAFE, {count} wrong rows: {warmup.findings[0]}" in out
    assert "found a row never written" in warmup.findings[0]
    assert main(["export", "out", "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["wrong_rows"], row["unsafe"]) == (count, True)


def test_a_wrong_row_without_a_wrong_answer_fails_the_run_too(
    synthetic, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokens were right by luck; the row was not."""
    from bench.commands.measuring import _report

    run = synthetic()
    run.round(run.cell(), counters={"wrong_rows": 2})
    run.end()
    assert _report(run.folder, "text") == 1
    assert "2 WRONG" in capsys.readouterr().out
