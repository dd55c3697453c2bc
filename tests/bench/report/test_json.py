"""The JSON document and the JSON lines."""

from __future__ import annotations

import json

import pytest

from bench.report.json import render_json, render_jsonl
from bench.report.table import View, build_table
from bench.report.view import apply_view


def strict(text):
    """Parse, refusing NaN and infinities (memtier#271, ginkgo#514)."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_the_document_holds_run_rows_notes_and_footnotes(comparison):
    """All that the text table says, and the environment it was measured in."""
    document = strict(render_json(build_table(comparison)))
    assert list(document) == ["run", "rows", "notes", "footnotes"]
    assert document["run"]["environment"] == {"host": "test"}
    assert document["rows"][1]["release"] == "early"
    assert document["rows"][1]["unsafe"] is True
    assert "nvml: no usable NVIDIA driver" in document["footnotes"]


def test_undefined_is_null_with_its_reason(comparison):
    """null, never 0, and why."""
    row = strict(render_json(build_table(comparison)))["rows"][0]
    assert row["nvml_used_mib"] is None
    assert row["undefined"]["nvml_used_mib"] == "nvml: no usable NVIDIA driver"


def test_a_run_that_failed_throughout_is_null_throughout(synthetic):
    """All requests failed: percentiles are null, not 0 (sglang#35005)."""
    run = synthetic()
    run.round(run.cell(), requests=[(0.0, (), "abort")])
    (row,) = strict(render_json(build_table(run.end())))["rows"]
    for key in ("tok_per_s", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms", "itl_ms_p99"):
        assert row[key] is None


def test_json_lines_are_the_rows(comparison):
    """A line per row, the same objects as in the document."""
    table = build_table(comparison)
    lines = [strict(line) for line in render_jsonl(table).splitlines()]
    assert lines == strict(render_json(table))["rows"]


def test_rows_have_the_chosen_columns_and_their_reasons_only(comparison):
    """No key that was not asked for, and no reason for it."""
    view = View(columns=("release", "nvml_used_mib"), sort=("-release",))
    document = strict(render_json(apply_view(build_table(comparison), view)))
    first = document["rows"][0]
    assert list(first) == ["release", "nvml_used_mib", "unsafe", "baseline", "undefined"]
    assert first["release"] == "polled"
    assert first["undefined"] == {"nvml_used_mib": "nvml: no usable NVIDIA driver"}
    assert document["footnotes"] == ["nvml: no usable NVIDIA driver"]
