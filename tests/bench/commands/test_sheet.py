"""A profile's figures in each format."""

from __future__ import annotations

import csv
import io
import json

import pytest

from bench.commands.sheet import FORMATS, Sheet, figure, render_sheet, undefined_remarks

SHEET = Sheet(
    headers=("name", "us"),
    cells=[("record, timed", "0.18"), ("query", "-")],
    align=("left", "right"),
    remarks=["*_timed: with a time stamp", "word " * 40],
    keys=("name", "value"),
    records=[{"name": "record, timed", "value": 0.18, "more": 1}, {"name": "query", "value": None}],
    facts={"undefined": {"query": "too early"}},
)


@pytest.mark.parametrize("format_name", FORMATS)
def test_every_format_has_every_row_and_ends_a_line(format_name):
    """Nothing is left out, and the shell's prompt comes on a line of its own."""
    text = render_sheet(SHEET, format_name)
    assert "record, timed" in text
    assert "query" in text
    assert text.endswith("\n")


def test_text_folds_long_remarks():
    """At 100 columns, the rest indented; no line ends in blanks."""
    lines = render_sheet(SHEET, "text").splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("    word") for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_markdown_shows_asterisks_as_they_are():
    """They would begin emphasis."""
    assert r"- \*_timed: with" in render_sheet(SHEET, "md")


def test_programs_get_the_keys_and_nothing_else():
    """An undefined value is null in JSON and empty in CSV; facts stand beside the rows."""
    document = json.loads(render_sheet(SHEET, "json"))
    assert document["rows"] == [
        {"name": "record, timed", "value": 0.18},
        {"name": "query", "value": None},
    ]
    assert list(document) == ["rows", "undefined", "notes"]
    rows = list(csv.reader(io.StringIO(render_sheet(SHEET, "csv"))))
    assert rows == [["name", "value"], ["record, timed", "0.18"], ["query", ""]]


def test_figures_and_reasons():
    """A dash for nothing, rounding otherwise; names that share a reason share a sentence."""
    assert (figure(None, 2), figure(0.125, 1), figure(-0.0, 0)) == ("-", "0.1", "-0")
    undefined = {"a": "no GPU", "b": "too early", "c": "no GPU"}
    assert undefined_remarks(undefined, "none") == ["none: a, c: no GPU", "none: b: too early"]
