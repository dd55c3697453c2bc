"""`profile host` and `profile events` on the command line."""

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
from bench.probes.events import EventProfile, EventRow
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

NO_CUDA = "not measured: device 'cuda': none here"
EVENT_FIGURES = EventProfile(
    rows=(
        EventRow("cpu", "record", "us/call", 1, None, 0.08, 0.12, 0.09, 0.04, 5000),
        EventRow("cpu", "record", "us/call", 8, None, 0.08, 0.31, 0.74, 0.04, 640000),
        EventRow("cpu", "wait_cpu_share", "% of wall", value=0.25, verdict="blocks, as it should"),
        EventRow("cpu", "query_pending", "us/call"),
        EventRow("cpu", "polled_event_per_step", "us/step", 1, 1000, 20.0, 21.0, 20.5, 0.05, 100),
        EventRow("cpu", "polled_event_per_block", "us/step", 1, 1000, 2e3, 3e3, 2e3, 0.05, 100),
    ),
    undefined={"cpu query_pending": "it passed too early", "cuda": NO_CUDA},
    num_rounds=20,
)


def run_profile(*args):
    """Run the command; what it raises reaches the test."""
    return CliRunner().invoke(profile.command, list(args), catch_exceptions=False)


@pytest.fixture
def figures(monkeypatch):
    """Round figures in place of a measurement."""
    monkeypatch.setattr("bench.probes.host.profile_host", lambda **_: FIGURES)


@pytest.fixture
def event_figures(monkeypatch):
    """Round figures of events, and what they were asked for."""
    asked = []

    def measured(devices, *, quick, on_probe):
        asked.append((devices, quick))
        return EVENT_FIGURES

    monkeypatch.setattr("bench.probes.events.profile_events", measured)
    return asked


def test_the_event_table_has_a_row_for_each_figure(event_figures):
    """Harness beside it, a dash and a reason where there is none, a wait with its verdict."""
    done = run_profile("events")
    assert (done.exit_code, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["cpu", "record", "8", "0.08", "0.31", "0.74", "0.04", "us/call", "640000"] in rows
    assert ["cpu", "query_pending", "1", "-", "-", "-", "-", "us/call", "0"] in rows
    assert any(row[1:2] == ["wait_cpu_share"] and row[-4:-2] == ["blocks,", "as"] for row in rows)
    text = " ".join(done.stdout.split())
    assert "an event per block against one per step: cpu polled 100 times" in text
    assert f"no figure: cuda: {NO_CUDA}" in text
    assert "no figure: cpu query_pending: it passed too early" in text


def test_the_event_figures_are_the_same_in_json_and_csv(event_figures):
    """Every key in every row, null or empty where undefined."""
    document = json.loads(run_profile("events", "--format", "json").stdout)
    assert all(tuple(row) == profile.EVENT_KEYS for row in document["rows"])
    assert document["rows"][3]["value"] is None
    assert document["undefined"] == EVENT_FIGURES.undefined
    text = run_profile("events", "--format", "csv").stdout
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["value"] for row in rows] == ["0.08", "0.08", "0.25", "", "20.0", "2000.0"]
    assert rows[1]["num_threads"] == "8"


def test_devices_and_speed_are_passed_on(event_figures):
    """None names no device: then it is all there are."""
    run_profile("events", "--quick", "--device", "cpu", "--device", "cpu-stepped")
    run_profile("events", "--format", "md")
    assert event_figures == [(("cpu", "cpu-stepped"), True), (None, False)]


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
        (("events", "--device", "cdua"), ("--device", "cdua", "cuda")),
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
