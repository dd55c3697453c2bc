"""`env` on the command line."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from bench.commands.env import command


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
