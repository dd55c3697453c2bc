"""How values are written on paper."""

from __future__ import annotations

import pytest

from bench.report.display import display, format_number, shown_columns
from bench.report.table import build_table


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
    assert shown.rows == (("(1)",),) * 3


def test_a_ratio_stands_with_its_interval_or_with_the_footnote_that_says_why_not(synthetic):
    """`2.00 [2.00, 2.00]`, and `1.00 (1)` for a single round."""
    run = synthetic()
    run.round(run.cell(baseline=True))
    table = build_table(run.end())
    (ratio,) = (column for column in table.columns if column.key == "vs_baseline")
    shown = display(table, [table.columns[0], ratio])
    assert shown.rows == (("deferred", "1.00 (1)"),)
    assert shown.footnotes == ("one round has no interval",)
