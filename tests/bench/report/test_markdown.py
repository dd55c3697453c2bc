"""The Markdown table."""

from __future__ import annotations

from bench.report.markdown import render_markdown
from bench.report.table import View, build_table
from bench.report.view import apply_view


def test_every_line_of_the_grid_has_every_column(comparison):
    """Header, rule and rows have the same number of cells; undefined ones carry footnotes."""
    text = render_markdown(build_table(comparison))
    grid = [line for line in text.splitlines() if line.startswith("|")]
    assert len(grid) == 2 + 3
    assert len({line.count("|") for line in grid}) == 1
    assert "| early UNSAFE |" in text
    assert "3 WRONG" in text
    assert "- (1) checker tags was off" in text
    assert "- (2) nvml: no usable NVIDIA driver" in text


def test_values_cannot_break_the_grid(synthetic):
    """Pipes and line breaks in a name stay inside their cell."""
    run = synthetic(workload="a|b*c")
    run.round(run.cell({"release": "x|y\nz"}))
    text = render_markdown(build_table(run.end()))
    assert "x\\|y z" in text
    assert "a\\|b\\*c" in text


def test_groups_are_tables_under_headings(comparison):
    """A heading and a grid per value."""
    table = apply_view(build_table(comparison), View(group_by="release"))
    lines = render_markdown(table).splitlines()
    assert [line for line in lines if line.startswith("###")] == [
        "### release: deferred",
        "### release: early",
        "### release: polled",
    ]
    assert sum(line.startswith(("|-", "|:")) for line in lines) == 3
