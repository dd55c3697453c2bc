"""The table on a terminal: width, colour, columns left out."""

from __future__ import annotations

import io
import re

import pytest

from bench.report.table import View, build_table
from bench.report.text import Screen, render_text
from bench.report.view import apply_view

RED = "\x1b[1;31m"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(comparison, width):
    """Columns that do not fit go into a further panel, each with the axes."""
    text = render_text(build_table(comparison), Screen(width))
    assert max(map(len, text.splitlines())) <= width
    panels = text.count("-----\n")
    assert text.count("deferred ") == panels
    assert (panels > 1) is (width < 200)


def test_all_values_are_in_their_column(comparison):
    """The wide table's rows hold each figure once, under its header."""
    lines = render_text(build_table(comparison), Screen(200)).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("release"))
    row = next(line for line in lines[head:] if line.startswith("polled"))
    assert row.split()[:4] == ["polled", "reverse", "4.00", "100"]
    column = lines[head].index("block-ms") + len("block-ms")
    assert row[:column].endswith(" 12.5")


def test_unsafe_and_wrong_are_words_without_colour(comparison):
    """Nothing is said by colour alone, and without colour no escape is written."""
    text = render_text(build_table(comparison), Screen(200))
    assert "early UNSAFE" in text
    assert "3 WRONG" in text
    assert "\x1b" not in text


def test_wrong_requests_are_red_on_a_colour_terminal(comparison):
    """Only the cell with wrong requests is red."""
    text = render_text(build_table(comparison), Screen(200, color=True))
    assert text.count(RED) == 1
    assert re.search(re.escape(RED) + " *3 WRONG", text)
    assert re.sub(r"\x1b\[[0-9;]*m", "", text).split() == (
        render_text(build_table(comparison), Screen(200)).split()
    )


def test_columns_that_say_nothing_become_a_line_below(comparison):
    """Undefined in every row, or 0 in every row; wrong requests stay even when 0."""
    text = render_text(build_table(comparison), Screen(200))
    assert "0 in every row: LATER, preemptions" in text
    assert "undefined: NVML used MiB: nvml: no usable NVIDIA driver" in text
    assert "LATER" not in text.split("----")[0]


def test_a_single_run_is_a_table_of_one_row(synthetic):
    """No ratio against itself; a wrong count of 0 is shown, for it is the point."""
    run = synthetic()
    run.round(run.cell(baseline=True))
    text = render_text(build_table(run.end()), Screen(200))
    assert "vs baseline" not in text.split("----")[0]
    assert "requests" in text.split("----")[0]
    assert "WRONG" not in text


def test_an_undefined_value_is_a_mark_with_its_footnote(synthetic):
    """One cell without TPOT: a number in its place, and below the table what it means."""
    run = synthetic()
    run.round(run.cell(baseline=True))
    run.round(
        run.cell({"release": "polled", "free_order": "reverse"}), requests=[(0, (1,), "stop")]
    )
    text = render_text(build_table(run.end()), Screen(200))
    assert "(1) one round has no interval" in text
    assert "(2) no request had two output tokens" in text
    assert re.search(r"^polled .* \(2\) +\(2\) ", text, re.MULTILINE)


def test_a_screen_without_a_terminal_is_plain(monkeypatch):
    """A pipe gets 80 columns without colour."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert not Screen.of(io.StringIO()).color


@pytest.mark.parametrize(
    ("variable", "value", "color"),
    [("NO_COLOR", "1", False), ("NO_COLOR", "", True), ("TERM", "dumb", False)],
)
def test_colour_is_for_terminals_that_want_it(monkeypatch, variable, value, color):
    """NO_COLOR counts when it is not empty (no-color.org); a dumb terminal has no colour."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(variable, value)
    assert Screen.of(Terminal()).color is color


def test_columns_sets_the_width(monkeypatch):
    """COLUMNS overrides what the terminal says, but not below what can be read."""
    monkeypatch.setenv("COLUMNS", "123")
    assert Screen.of(io.StringIO()).width == 123
    monkeypatch.setenv("COLUMNS", "3")
    assert Screen.of(io.StringIO()).width == 40


def test_groups_are_tables_under_their_value(comparison):
    """Each with its heading and its rows; the axis is no column; footnotes are counted once."""
    table = apply_view(build_table(comparison), View(("nvml_used_mib",), group_by="release"))
    lines = render_text(table, Screen()).splitlines()
    assert [line for line in lines if line.startswith("release: ")] == [
        "release: deferred",
        "release: early",
        "release: polled",
    ]
    assert [line.strip() for line in lines].count("(1)") == 2
    assert [line for line in lines if line.startswith("(1) nvml")] == [
        "(1) nvml: no usable NVIDIA driver"
    ]


def test_axes_alone_make_a_table(comparison):
    """No figure was asked for, none is shown."""
    table = apply_view(build_table(comparison), View(("free_order", "release")))
    assert "reverse UNSAFE  early" in render_text(table, Screen())


@pytest.mark.parametrize("num_cells", [0, 1])
def test_what_was_not_measured_is_not_called_zero(synthetic, num_cells):
    """A file that ends before its first cell or its first round: undefined is never 0."""
    run = synthetic()
    for _ in range(num_cells):
        run.cell()
    text = render_text(build_table(run.read()), Screen())
    assert "0 in every row" not in text
    assert "no measured round has ended" in text
