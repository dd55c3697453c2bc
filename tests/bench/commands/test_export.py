"""`export` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.commands.export import FORMAT_NAMES, command
from bench.report import FORMATS, build_table, render
from deepinfer.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


def run_export(*args):
    """Run the command; what it raises reaches the test."""
    return CliRunner().invoke(command, [str(arg) for arg in args], catch_exceptions=False)


def test_every_format_can_be_named():
    """The names the command offers are those there are."""
    assert tuple(FORMATS) == FORMAT_NAMES


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_the_table_goes_to_stdout(comparison, name, monkeypatch):
    """stdout has exactly the table, computed from the file."""
    monkeypatch.delenv("COLUMNS", raising=False)
    done = run_export(comparison.path.parent, "--format", name)
    assert done.exit_code == 0
    assert done.stdout_bytes.decode("utf-8") == render(build_table(comparison), name)


def test_the_table_goes_to_a_file(comparison, tmp_path):
    """With -o the file has it, stdout nothing, and a second export replaces it."""
    for name in ("csv", "json"):
        done = run_export(comparison.path, "--format", name, "-o", tmp_path / "table")
        assert (done.exit_code, done.stdout_bytes) == (0, b"")
    assert len(json.loads((tmp_path / "table").read_bytes())["rows"]) == 3


def test_exporting_changes_no_result(comparison):
    """The results folder is as it was."""
    before = {p: p.read_bytes() for p in comparison.path.parent.iterdir()}
    run_export(comparison.path.parent)
    assert {p: p.read_bytes() for p in comparison.path.parent.iterdir()} == before


def test_a_bad_run_is_a_user_error(tmp_path):
    """A folder without results is named, and nothing is written."""
    with pytest.raises(UserError, match=r"no samples\.jsonl in it"):
        run_export(tmp_path, "-o", tmp_path / "table.md")
    assert list(tmp_path.iterdir()) == []


def test_a_bad_format_is_refused_with_the_valid_ones():
    """Exit code 2 and the list of formats."""
    done = run_export("results/x", "--format", "xls")
    assert done.exit_code == 2
    assert "jsonl" in done.output


def test_the_command_is_cheap_to_import():
    """`--help` needs neither numpy nor rich nor torch."""
    code = "import bench.commands.export, bench.commands.env, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert not {"numpy", "rich", "torch", "pynvml", "psutil"} & set(done.stdout.split())
