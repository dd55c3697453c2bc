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


def test_the_verdicts_are_counted_and_bounded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check instrument` prints what was found and asked, and its exit code is whether it holds."""
    from bench import instrument

    monkeypatch.setattr(instrument, "ENGINE_MAX_TIME_S", 0.5)
    main(["check", "instrument", "--quick", "--trials", "3", "--format", "json"])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["num_trials"]) for row in rows] == [
        ("A/A, fake", 3),
        ("planted 5 %, fake", 3),
        ("A/A, engine", 2),
        ("planted 5 %, engine", 1),
    ]
    assert all(sum(row["verdicts"].values()) == row["num_trials"] for row in rows)


@pytest.mark.parametrize(("limit", "code", "mark"), [(0.0, 0, "ok"), (1.1, 1, "FAILED")])
def test_a_bound_that_fails_is_exit_code_1(
    limit: float,
    code: int,
    mark: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More power than there can be is asked for: the line says so, and the command fails."""
    from bench import instrument

    monkeypatch.setattr(instrument, "check_engine", lambda *args: [])
    monkeypatch.setattr(instrument, "POWER", limit)
    monkeypatch.setattr(instrument, "FALSE_ALARMS", 1.0)
    monkeypatch.setattr(instrument, "COVERAGE", 0.0)
    assert main(["check", "instrument", "--trials", "2"]) == code
    out = capsys.readouterr().out
    assert f"{mark:6}  planted 5 %, fake: SLOWER in 100.0 %, at least" in out


def test_the_observer_says_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """`check observer` prints the parts, and fails where they are more than the limit."""
    code = main(["check", "observer", "--profile", "cpu-tiny", "-r", "1", "--format", "json"])
    cost = json.loads(capsys.readouterr().out)
    assert code == int(cost["total"] > cost["limit"])
    assert cost["num_pairs"] > 100
