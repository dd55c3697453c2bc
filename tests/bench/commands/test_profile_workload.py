"""`profile step`, `memory` and `trace` on the command line."""

from __future__ import annotations

import csv
import io
import json

import pytest
from click.testing import CliRunner

from bench.commands import main, profile, profile_workload
from bench.probes.check_cost import CheckCost, CheckProfile
from bench.probes.memory import MemoryProfile, MemorySample
from bench.probes.step import GapRow, PolicyFacts, StepProfile, StepRow
from bench.stats import Estimate, Interval
from deepinfer.errors import UserError

COMMON = ("fork-batch", "--profile", "cpu-tiny", "--scale-lengths", "0.05")
STEP = StepProfile(
    rows=(
        StepRow("deferred", "host", "schedule", 20.0, 19.0, 40.0, 0.02),
        StepRow("deferred", "device", "forward", 900.0, 890.0, 990.0, 0.9),
        StepRow("early", "host", "schedule", 21.0, 20.0, 41.0, 0.021),
        StepRow("early", "device", "forward", 901.0, 891.0, 991.0, 0.901),
    ),
    gaps=(
        GapRow("deferred", "off", 500.0, 5.0, 4.0),
        GapRow("deferred", "on", 20.0, 0.5, 0.25),
        GapRow("early", "off", None, None, None),
    ),
    policies=(
        PolicyFacts(
            *("deferred", False, 34, 1000.0),
            *(Estimate(1.012, Interval(0.99, 1.03), 0.95, 6), 0, 0.0, 0.0),
        ),
        PolicyFacts("early", True, 34, 1000.0, None, 2, 3.5, 0.2),
    ),
    device="cpu",
    num_rounds=6,
    notes=("lengths scaled by 0.05",),
)
SAMPLES = tuple(
    MemorySample(
        *(step, 0.1 * step, None, None, 300 * 2**20, None, None),
        *(2**20, 8 * 2**20, 4 * 2**20, 2**20, 2 * 2**20, 2**20, 10 * step),
    )
    for step in (1, 2)
)
MEMORY = MemoryProfile(
    samples=SAMPLES,
    undefined={"NVML": "no driver", "torch allocator": "no CUDA"},
    device="cpu",
    release="step",
    block_size=16,
    num_wrong=0,
    notes=(),
)


def run_profile(*args):
    """Run the command; what it raises reaches the test."""
    return CliRunner().invoke(profile.command, list(args), catch_exceptions=False)


@pytest.fixture
def figures(monkeypatch):
    """Round figures in place of measurements, and what was asked for."""
    asked = []

    def steps(resolved, releases, *, num_rounds, on_probe):
        asked.append((releases, num_rounds))
        return STEP

    monkeypatch.setattr("bench.probes.step.profile_steps", steps)
    monkeypatch.setattr("bench.probes.memory.profile_memory", lambda resolved, **_: MEMORY)
    return asked


def test_the_host_gap_stands_beside_that_with_overlap(figures):
    """On one line per policy; a run without a gap has no figure, and JSON has all of them."""
    text = " ".join(run_profile("step", *COMMON, "--release", "deferred,early").output.split())
    assert (
        "deferred: host gap between steps, not watched: overlap off 500.0 us, 4.00 % of the step "
        "(median; 5.00 % of all the time); overlap on 20.0 us, 0.25 % of the step "
        "(median; 0.50 % of all the time)"
    ) in text
    assert "early: host gap between steps, not watched: overlap off - us" in text
    found = json.loads(run_profile("step", *COMMON, "--format", "json").output)
    assert found["gaps"][1] == {
        "release": "deferred",
        "overlap": "on",
        "median_us": 20.0,
        "percent": 0.5,
        "median_percent": 0.25,
    }


def test_policies_stand_side_by_side(figures):
    """A column each, UNSAFE where it is, with the observer's price; wrong answers exit with 1."""
    done = run_profile("step", *COMMON, "--release", "deferred,early", "-r", "6")
    assert figures == [(("deferred", "early"), 6)]
    assert done.exit_code == 1
    text = " ".join(done.stdout.split())
    assert "where part deferred early UNSAFE" in text
    assert "device forward 900.0 (90.0%) 901.0 (90.1%)" in text
    assert "1.012 times the others' time (0.990 to 1.030, 95% confidence)" in text
    assert "early UNSAFE: 34 steps of 1000.0 us; observer cost unknown" in text
    assert "2 WRONG requests" in text
    assert "lengths scaled by 0.05" in text


def test_step_figures_are_the_same_for_programs(figures):
    """A row for each policy and part, whatever the table on paper looks like."""
    rows = list(csv.DictReader(io.StringIO(run_profile("step", *COMMON, "--format", "csv").stdout)))
    assert [row["mean_us"] for row in rows] == ["20.0", "900.0", "21.0", "901.0"]
    document = json.loads(run_profile("step", *COMMON, "--format", "json").stdout)
    assert all(tuple(row) == profile_workload.STEP_KEYS for row in document["rows"])
    assert document["policies"][0]["observer"]["interval"] == {"low": 0.99, "high": 1.03}
    assert document["policies"][1]["observer"] is None


def test_memory_is_a_waterfall_or_a_row_for_each_step(figures):
    """MiB on paper, bytes for programs; what is undefined is a dash with its reason."""
    done = run_profile("memory", *COMMON)
    assert done.exit_code == 0
    rows = {line.split("  ")[0]: line.split() for line in done.stdout.splitlines()}
    assert rows["NVML used"][2] == "-"
    assert rows[". . . . KV pool"][-1] == "1.00"  # block 0
    assert "step 2 of 2, the first with the most live tokens: 20" in done.stdout
    text = run_profile("memory", *COMMON, "--over-time", "--format", "csv").stdout
    steps = list(csv.DictReader(io.StringIO(text)))
    assert [step["num_live_tokens"] for step in steps] == ["10", "20"]
    assert steps[0]["nvml_used"] == ""
    document = json.loads(run_profile("memory", *COMMON, "--format", "json").stdout)
    assert [sample["step"] for sample in document["over_time"]] == [1, 2]
    assert document["undefined"]["torch reserved"] == "no CUDA"


def test_a_trace_is_written(tmp_path):
    """The real thing, in a few steps: one line that says what is in the file."""
    path = tmp_path / "trace.json"
    done = run_profile("trace", *COMMON, "--device", "cpu-stepped", "-o", str(path))
    assert done.exit_code == 0
    assert done.stdout.startswith(f"{path}: ")
    document = json.loads(path.read_text())
    assert document["otherData"]["workload"] == "fork-batch"
    assert any(event["ph"] == "X" for event in document["traceEvents"])


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("step", "fork-bach"), ("fork-bach", "fork-batch")),
        (("step", *COMMON, "--release", "defered"), ("defered", "deferred")),
        (("memory", *COMMON, "--release", "defered"), ("defered", "deferred")),
        (("trace", *COMMON, "-o", "/nowhere/trace.json"), ("-o", "/nowhere")),
        (("memory", *COMMON, "--snapshot", "history.pickle"), ("--snapshot", "cuda")),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, named, capsys):
    """The line names what was given and what is valid; nothing goes to stdout."""
    assert main(["profile", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(text in captured.err for text in named)
    assert all(line.startswith("hint:") for line in captured.err.splitlines()[1:])


def test_the_price_of_checkers_as_text_and_json(monkeypatch):
    """A row per choice with its ratio and interval; something found ends it with exit code 1."""
    asked = []

    def costs(resolved, names, *, num_rounds, on_probe):
        asked.append((resolved.engine.release, tuple(names), num_rounds))
        ratio = Estimate(1.02, Interval(1.01, 1.03), 0.98, 9)
        rows = (CheckCost("off", 1000.0, None, 0, 0), CheckCost("tags", 1020.0, ratio, 2, 0))
        return CheckProfile(rows, "cpu", num_rounds, ())

    monkeypatch.setattr("bench.probes.check_cost.profile_checks", costs)
    options = ("--check", "tags,order", "--release", "polled", "-r", "9")
    done = run_profile("step", *COMMON, *options)
    assert done.exit_code == 1
    assert asked == [("polled", ("tags", "order"), 9)]
    figures = " ".join(done.output.splitlines()[3].split())
    assert figures == "tags 1020.0 1.020 1.010 to 1.030 2"
    assert "98% confidence" in done.output
    document = json.loads(run_profile("step", *COMMON, *options, "--format", "json").output)
    assert document["rows"][0]["ratio"] is None
    assert document["rows"][1]["ratio_low"] == 1.01
    assert document["num_rounds"] == 9


def test_off_is_nothing_to_measure():
    """One line, before anything runs."""
    with pytest.raises(UserError, match="--check off: nothing to measure"):
        run_profile("step", *COMMON, "--check", "off")
