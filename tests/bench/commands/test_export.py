"""`export` on the command line."""

from __future__ import annotations

import json
import re
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


def test_columns_order_groups_and_digits_are_options(comparison):
    """Keys as csv has them, blanks allowed, `-` for descending."""
    done = run_export(
        comparison.path,
        *("--format", "csv", "--columns", "release, tok_per_s", "--sort", "-tok_per_s,release"),
        *("--precision", "2"),
    )
    assert done.stdout.splitlines() == [
        "release,tok_per_s,unsafe,baseline",
        "polled,4.0,false,false",
        "deferred,2.0,false,true",
        "early,2.0,true,false",
    ]
    grouped = run_export(comparison.path, "--format", "md", "--group-by", "release")
    assert grouped.stdout.count("### release: ") == 3


@pytest.mark.parametrize("option", ["--columns", "--sort", "--group-by"])
def test_an_unknown_key_is_refused_and_nothing_is_written(comparison, tmp_path, option):
    """The nearest key is named."""
    with pytest.raises(UserError, match="'release'"):
        run_export(comparison.path, option, "relase", "-o", tmp_path / "table")
    assert not (tmp_path / "table").exists()


def test_plots_are_drawn_beside_the_table(comparison, tmp_path):
    """The table still goes to stdout."""
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    done = run_export(comparison.path, "--format", "csv", "--plot", tmp_path / "plots.svg")
    assert done.stdout.startswith("release,")
    assert (tmp_path / "plots.svg").read_bytes().startswith(b"<?xml")


def test_plots_without_matplotlib_write_nothing(comparison, tmp_path, monkeypatch):
    """One line with the command that installs it, before any table."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="need matplotlib"):
        run_export(comparison.path, "-o", tmp_path / "t.md", "--plot", tmp_path / "plots.png")
    assert not (tmp_path / "t.md").exists()


def documented():
    """The arguments of every `export` command in docs/export.md."""
    text = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    return re.findall(r"^\$ deepinfer-bench export results/fork-batch ?(.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("arguments", documented())
def test_every_command_of_the_page_works(comparison, tmp_path, monkeypatch, arguments):
    """As written, on another run's folder."""
    if "--plot" in arguments:
        pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    monkeypatch.chdir(tmp_path)
    assert run_export(comparison.path.parent, *arguments.split()).exit_code == 0


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
    heavy = {"numpy", "rich", "torch", "pynvml", "psutil", "matplotlib"}
    assert not heavy & set(done.stdout.split())
