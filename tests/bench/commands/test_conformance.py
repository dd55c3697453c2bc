"""`check conformance` on the command line: the table, the programs, the exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.commands import main

BROKEN = """\
from deepinfer.testing.conformance.managers.reference import Reference


class Broken(Reference):
    def can_allocate(self, count):
        return "OK"


class Missing(Reference):
    def __init__(self, num_blocks):
        import no_such_engine
"""


def check(*args: str) -> int:
    """`check conformance --examples 12 ...`, in this process."""
    return main(["check", "conformance", "--examples", "12", *args])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where one stands, with a module of managers."""
    (tmp_path / "conformance_example.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return tmp_path


def test_a_table_with_a_column_for_each_manager(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Failures are below it with their programs, and make exit code 1."""
    managers = ("--manager", "reference", "--manager", "conformance_example:Broken")
    assert check(*managers) == 1
    out = capsys.readouterr().out
    assert out.split("\n")[0].split() == ["invariant", "reference", "conformance_example:Broken"]
    rows = {line[:20].strip(): line[22:].split() for line in out.split("\n")}
    assert rows["capacity"] == ["I13", "holds", "fails"]
    assert rows["one owner"] == ["I1", "holds", "holds"]
    assert "Broken, capacity: a = allocate(1): can_allocate(2) is OK; the pool has 1 block" in out
    assert "\n    a = allocate(1)\n" in out


def test_json_has_a_row_for_each_cell(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the program, and null where there is none."""
    assert check("--manager", "conformance_example:Broken", "--format", "json") == 1
    rows = {row["invariant"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["capacity"]["program"] == "a = allocate(1)"
    assert rows["capacity"]["reports"] == "vllm-rbln#957 vllm#39734"
    assert rows["one owner"]["program"] is None


def test_a_skipped_manager_fails_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named with its reason."""
    assert check("--manager", "conformance_example:Missing", "--manager", "reference") == 0
    out = capsys.readouterr().out
    assert "conformance_example:Missing: skipped: No module named 'no_such_engine'" in out


def test_an_unknown_manager_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and the nearest name."""
    assert check("--manager", "referenc") == 2
    assert "did you mean 'reference'?" in capsys.readouterr().err


def test_the_default_number_of_runs_is_the_kits() -> None:
    """The command line shows it without loading hypothesis, so it is written twice."""
    from bench.commands.conformance import NUM_EXAMPLES
    from deepinfer.testing.conformance.checking import EXAMPLES

    assert NUM_EXAMPLES == EXAMPLES
