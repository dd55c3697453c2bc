"""How values are written on paper."""

from __future__ import annotations

import pytest

from bench.report.display import (
    display,
    format_number,
    interval_decimals,
    shown_columns,
    telling_columns,
)
from bench.report.table import View, build_table
from bench.report.view import apply_view


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"),
        (0.01234, "0.012"),
        (0.99951, "1.00"),
        (9.994, "9.99"),
        (9.996, "10.0"),
        (99.96, "100"),
        (123456.7, "123457"),
        (-12.34, "-12.3"),
    ],
)
def test_numbers_keep_about_three_digits_and_no_exponent(value, text):
    """Figures of one column can be compared at a glance."""
    assert format_number(value) == text


def test_marks_count_the_footnotes_of_the_shown_columns_only(comparison):
    """The first undefined column shown is footnote 1."""
    table = build_table(comparison)
    last = [column for column in shown_columns(table) if column.key == "torch_peak_mib"]
    shown = display(table, last)
    assert shown.footnotes == ("allocator: torch is not loaded",)
    assert shown.rows == (("(1)",), ("(1) UNSAFE",), ("(1)",))


def test_a_ratio_stands_with_its_interval_or_with_the_footnote_that_says_why_not(synthetic):
    """`2.00 [2.00, 2.00]`, and `1.00 (1)` for a single round."""
    run = synthetic()
    run.round(run.cell(baseline=True))
    table = build_table(run.end())
    (ratio,) = (column for column in table.columns if column.key == "vs_baseline")
    shown = display(table, [table.columns[0], ratio])
    assert shown.rows == (("deferred", "1.00 (1)"),)
    assert shown.footnotes == ("one round has no interval",)


@pytest.mark.parametrize(
    ("value", "precision", "text"),
    [
        (123456.7, 3, "123000"),
        (0.0012345, 2, "0.0012"),
        (9.996, 3, "10.0"),
        (1.0, 4, "1.000"),
        (0.0, 3, "0.00"),
        (-12.34, 1, "-10"),
    ],
)
def test_precision_counts_significant_figures(value, precision, text):
    """As many as asked for, never a power of ten."""
    assert format_number(value, precision) == text


@pytest.mark.parametrize(
    ("low", "high", "decimals"),
    [
        (0.5, 1.3, 1),
        (0.9, 1.12, 2),
        (0.95, 1.03, 2),
        (0.95, 0.99, 3),
        (1.2, 1.2, 2),
        (0.4, 9.4, 1),
        (0.9, 0.999, 3),
        (0.99999998, 1.00000002, 4),
    ],
)
def test_an_interval_gives_the_digits_it_justifies(low, high, decimals):
    """Narrower means more; an end that is not 1 never reads as 1 while digits are left."""
    assert interval_decimals(low, high) == decimals


def test_a_reader_who_names_columns_gets_them_all(comparison):
    """Undefined or 0 in every row: shown, because it was asked for; an interval's end too."""
    keys = ("release", "nvml_used_mib", "later", "vs_baseline_low")
    table = apply_view(build_table(comparison), View(columns=keys))
    columns, asides = telling_columns(table)
    assert tuple(column.key for column in columns) == keys
    assert tuple(column.key for column in shown_columns(table)) == keys
    assert asides == []
    shown = display(table, columns)
    assert shown.rows[2] == ("polled", "(1)", "0", "2.00")


def test_digits_asked_for_hold_for_all_that_is_measured(comparison):
    """Speed, ratio with interval and small figures; a count has the digits it has."""
    keys = ("tok_per_s", "vs_baseline", "max_logprob_diff", "block_copies")
    table = apply_view(build_table(comparison), View(columns=keys, precision=4))
    shown = display(table, table.columns)
    assert shown.rows[2] == ("4.000", "2.000 [2.000, 2.000]", "1.000e-06", "4")
