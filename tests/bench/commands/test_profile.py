"""`profile host` on the command line."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.commands import main, profile
from bench.probes.host import HostProfile, HostRow, Target
from bench.stats import Interval

ROOT = Path(__file__).resolve().parents[3]

FIGURES = HostProfile(
    rows=(
        HostRow("alloc_free_1024", 14.25, "ns/block", 80.0, 0.1781, Interval(0.17, 0.19)),
        HostRow("schedule_commit_256", 45.0, "us/step", 10.0, 4.5, Interval(4.0, 5.0)),
        HostRow("release_queue_step", 21.0, "us/table"),
    ),
    undefined={"release_queue_step": "a plain pool withholds nothing"},
    targets=(
        Target("alloc_free_1024 / yardstick", 0.25, 0.1781),
        Target("schedule_commit_256 / yardstick", 3.5, 4.5),
        Target("schedule_commit_4096 / schedule_commit_256", 6.0, 4.8),
    ),
    num_rounds=7,
)


def run_profile(*args):
    """Run the command; what it raises reaches the test."""
    return CliRunner().invoke(profile.command, list(args), catch_exceptions=False)


@pytest.fixture
def figures(monkeypatch):
    """Round figures in place of a measurement."""
    monkeypatch.setattr("bench.probes.host.profile_host", lambda **_: FIGURES)


def test_the_real_figures_come_out_as_json():
    """A quick run gives rows with exactly the promised keys, and nothing on stderr."""
    done = run_profile("host", "--quick", "--format", "json")
    assert (done.exit_code, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert all(tuple(row) == profile.KEYS for row in document["rows"])
    by_name = {row["name"]: row for row in document["rows"]}
    assert by_name["alloc_free_1024"]["value"] > 0
    assert by_name["release_queue_polled"]["ratio"] is None
    assert by_name.keys() - document["undefined"].keys() == document["intervals"].keys()


def test_json_has_what_the_table_says(figures):
    """Targets, intervals and reasons stand beside the rows."""
    document = json.loads(run_profile("host", "--format", "json").stdout)
    assert document["rows"][2] == {
        "name": "release_queue_step",
        "value": 21.0,
        "unit": "us/table",
        "yardstick_value": None,
        "ratio": None,
    }
    assert document["undefined"] == FIGURES.undefined
    assert document["intervals"]["alloc_free_1024"] == [0.17, 0.19]
    assert [target["met"] for target in document["targets"]] == [True, False, True]


def test_the_table_shows_figures_targets_and_reasons(figures):
    """A missed target says so, an undefined figure is a dash with its reason below."""
    done = run_profile("host")
    assert done.exit_code == 0
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line}
    assert rows["alloc_free_1024"][1:5] == ["14.2", "ns/block", "80.0", "0.18"]
    assert rows["alloc_free_1024"][-3:] == ["<=", "0.25", "met"]
    assert rows["schedule_commit_256"][-3:] == ["<=", "3.5", "MISSED"]
    assert rows["release_queue_step"][1:] == ["21.0", "us/table", "-", "-", "-"]
    assert "4096 costs 4.8 times 256 (target <= 6: met)" in done.stdout
    assert "release_queue_step: a plain pool withholds nothing" in done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines())


def test_csv_leaves_undefined_fields_empty(figures):
    """A header of the keys, and a line per row."""
    rows = list(csv.reader(io.StringIO(run_profile("host", "--format", "csv").stdout)))
    assert rows[0] == list(profile.KEYS)
    assert rows[3] == ["release_queue_step", "21.0", "us/table", "", ""]


def test_markdown_is_a_table_and_a_list(figures):
    """Header, rule and three rows, then one bullet per remark, with no stray emphasis."""
    table, _, remarks = run_profile("host", "--format", "md").stdout.partition("\n\n")
    assert len(table.splitlines()) == 5
    assert len({line.count("|") for line in table.splitlines()}) == 1
    assert all(line.startswith("- ") for line in remarks.splitlines())
    assert "*" not in remarks.replace(r"\*", "")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("hots",), ("hots", "host")),
        (("host", "--format", "jsn"), ("--format", "jsn", "json")),
        (("host", "--quik"), ("--quik", "--quick")),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, named, capsys):
    """The line names what was given and what is valid; nothing goes to stdout."""
    assert main(["profile", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    error, *hints = captured.err.splitlines()
    assert all(text in error for text in named)
    assert all(line.startswith("hint:") for line in hints)


def test_the_host_profile_never_loads_torch():
    """Neither the command nor what it measures."""
    code = "import bench.commands.profile, sys; assert 'numpy' not in sys.modules\n"
    code += "import bench.probes.host; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
