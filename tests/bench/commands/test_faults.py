"""`check faults` on the command line: the table, JSON, the flag, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from bench.commands import main
from bench.commands.faults import NUM_SEEDS, _cell
from deepinfer.testing import faults as planted
from deepinfer.testing.faults.plant import Fault
from deepinfer.testing.faults.survey import Row

SOME = ["--fault", "staging-rewritten", "--fault", "tail-not-copied", "--seeds", "1"]


def test_the_table_has_a_row_for_each_fault_and_each_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the report, and below it what each checker is blind to; exit code 0."""
    assert main(["check", "faults", *SOME]) == 0
    shown = capsys.readouterr()
    rows = {line.split("  ")[0]: line.split() for line in shown.out.splitlines() if line}
    assert rows["staging-rewritten"][1] == "TensorRT-LLM#15546"
    assert rows["clean, polled"] == ["clean,", "polled"]
    assert "2 of 2 faults found; the clean engine is silent in 34 of 34 rows." in shown.out
    assert "order is blind to" in shown.out
    assert "tail-not-copied: ok" in shown.err


def test_json_has_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """Each row with the first steps by column, null where nothing was found."""
    assert main(["check", "faults", *SOME, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    row = document["rows"][0]
    assert row["name"] == "staging-rewritten"
    assert row["first_step"]["order"] >= 1
    assert row["first_step"]["conservation"] is None
    assert "host arrays" in row["example"]["order"]
    assert document["seeds"] == 1


def test_a_fault_that_nobody_finds_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, and the line says so."""
    harmless = Fault("harmless", "nothing goes wrong", "-", lambda engine: None)
    monkeypatch.setitem(planted.FAULTS, "harmless", harmless)
    assert main(["check", "faults", "--fault", "harmless", "--seeds", "1"]) == 1
    assert "harmless: not found" in capsys.readouterr().out


def test_an_unknown_fault_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, with the nearest name."""
    assert main(["check", "faults", "--fault", "tail-not-copid"]) == 2
    assert "did you mean 'tail-not-copied'" in capsys.readouterr().err


def test_the_flag_of_the_group_is_the_same_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check --faults` runs all of them; beside a command it is refused."""
    asked = []

    def survey(faults: Sequence[Fault], num_seeds: int) -> list[Row]:
        asked.append(([fault.name for fault in faults], num_seeds))
        return [Row("x", "", "", False, 5, {"order": 5}, {"order": 1}, {"order": "it"})]

    monkeypatch.setattr("deepinfer.testing.faults.survey.survey", survey)
    assert main(["check", "--faults"]) == 0
    assert asked == [(list(planted.FAULTS), NUM_SEEDS)]
    assert "1 of 1 faults found" in capsys.readouterr().out
    assert main(["check", "--faults", "power"]) == 2
    assert "--faults stands alone" in capsys.readouterr().err


def test_a_cell_says_in_how_many_scenarios_where_not_in_all() -> None:
    """Blank where nothing was found."""
    row = Row("x", "", "", False, 3, {"tags": 2, "order": 3}, {"tags": 5, "order": 1}, {})
    assert [_cell(row, column) for column in ("tags", "order", "engine")] == ["5 (2)", "1", ""]
