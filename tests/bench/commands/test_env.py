"""`env` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from bench.commands.env import command
from deepinfer.errors import UserError
from tests.bench.tiny import ROOT


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    """The same on machines with and without a GPU."""
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_json_is_what_a_run_would_record():
    """Strict JSON with the parts of an environment."""
    done = CliRunner().invoke(command, ["--format", "json"], catch_exceptions=False)
    environment = json.loads(done.stdout)
    assert {"host", "os", "cpu", "versions", "gpu", "git", "reasons"} <= environment.keys()
    assert environment["gpu"] is None


def test_text_has_a_line_per_fact_and_says_why_one_is_missing():
    """Dotted names; a missing fact shows its reason, not `None`."""
    done = CliRunner().invoke(command, [], catch_exceptions=False)
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["versions.numpy"]
    assert lines["gpu"] == "- (package nvidia-ml-py is not installed)"
    assert "None" not in done.stdout


@pytest.mark.parametrize("name", ["cpu-tiny", "cpu-v4", "h200-v41"])
def test_geometry_as_json(name: str):
    """The whole cache as the profile has it; what adds up does."""
    done = CliRunner().invoke(
        command, ["--geometry", name, "--format", "json"], catch_exceptions=False
    )
    cache = json.loads(done.stdout)
    assert cache["profile"] == name
    assert sum(rows["bytes_per_block"] for rows in cache["paged"]) == cache["bytes_per_block"]
    for part in cache["pool"]:
        is_auto = name == "h200-v41" and part["name"] == "blocks"
        number = part["number"]
        assert part["bytes"] == (None if is_auto else number * part["bytes_each"])
    assert bool(cache["slot"]) == (name != "cpu-tiny") == (cache["bytes_per_slot"] > 0)


def test_geometry_as_text():
    """The figures of the served model, with layers that are alike on one line."""
    done = CliRunner().invoke(command, ["--geometry", "h200-v41"], catch_exceptions=False)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in (
        "bytes per token 890",
        "bytes per block 113,920",
        "blocks auto 113,920 - -",
        "of it stored 1,415,040",
        "compressed 2, 8, 14 2 64 288 18,432",
        "index 20 1 128 68 8,704",
        "window ring 0-19 0 134 528 70,752 yes",
        "window ring 20-39 1,415,040 134 528 70,752 no",
        "ring positions, int64 all 2,916,192 134 8 1,072 no",
    ):
        assert line in lines


def test_geometry_of_a_model_without_state():
    """Keys and values, no slot, and why there is none."""
    done = CliRunner().invoke(command, ["--geometry", "cpu-tiny"], catch_exceptions=False)
    assert "bytes per slot   - (this family keeps no state beside its blocks)" in done.stdout
    assert "state slots" not in done.stdout
    assert "regions of a slot" not in done.stdout


def test_geometry_of_a_profile_that_is_not_there():
    """The nearest name, as everywhere."""
    with pytest.raises(UserError, match="cpu-v41"):
        CliRunner().invoke(command, ["--geometry", "cpu-v42"], catch_exceptions=False)


def test_sizing_as_json():
    """The waterfall, what the model needs, what the profile asks for and whether it fits.

    In a process of its own, whose memory is not that of the tests before: its steps do hold some.
    """
    args = [sys.executable, "cli.py", "env", "--sizing", "cpu-tiny", "--format", "json"]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True, check=True)
    sizing = json.loads(done.stdout)
    assert 0 < sizing["needs"]["peak_activation"] < 300 * 2**20
    assert sum(line["bytes"] for line in sizing["lines"]) == sizing["bytes_for_blocks"]
    assert sizing["num_blocks"] == sizing["bytes_for_blocks"] // sizing["needs"]["bytes_per_block"]
    assert (sizing["num_blocks_of_profile"], sizing["fits"]) == (257, True)


def test_geometry_and_sizing_are_two_questions():
    """One at a time."""
    with pytest.raises(UserError, match="expected one of the two"):
        CliRunner().invoke(
            command, ["--geometry", "cpu-tiny", "--sizing", "cpu-tiny"], catch_exceptions=False
        )
