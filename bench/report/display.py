"""A table as strings: what text, Markdown, LaTeX and HTML share.

Knows how a value is written on paper; knows neither terminals nor markup. Invariant: an undefined
value is never a number, only the mark of the footnote that says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.table import Column, Row, Table
from bench.samples import axis_text

# Columns that answer the question of the table even when they are 0 in every row.
ALWAYS_SHOWN = ("tok_per_s", "wrong_requests", "max_logprob_diff")
# Of a ratio whose interval is missing or a point, and the most an interval can ask for.
PLAIN_DECIMALS, MOST_DECIMALS = 2, 4


@dataclass(frozen=True, slots=True)
class Display:
    """Columns to show, a string for each of their values, and the footnotes the marks refer to."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    footnotes: tuple[str, ...]


def display(
    table: Table, columns: Sequence[Column], numbers: dict[str, int] | None = None
) -> Display:
    """Write `columns` of the table as strings; footnotes count those columns only.

    `numbers` (reason -> footnote) carries the numbering on from one group's table to the next.
    """
    marks = {} if numbers is None else numbers

    def mark(reason: str) -> str:
        return f"({marks.setdefault(reason, len(marks) + 1)})"

    def cell(row: Row, column: Column) -> str:
        if column.key in row.undefined:
            text = mark(row.undefined[column.key])
        else:
            text = _format(row, column, table.view.precision)
            if no_interval := row.undefined.get(f"{column.key}_low"):
                text += f" {mark(no_interval)}"
        if column.key in ("wrong_requests", "wrong_rows") and row.values[column.key]:
            text += " WRONG"
        # Whichever column leads, an unsafe row says so.
        return f"{text} UNSAFE" if row.unsafe and column is columns[0] else text

    rows = tuple(tuple(cell(row, column) for column in columns) for row in table.rows)
    return Display(tuple(columns), rows, tuple(marks))


def shown_columns(table: Table) -> list[Column]:
    """The columns asked for, else all but details and ends of intervals, shown with their ratio."""
    if table.view.columns:
        return list(table.columns)
    return [column for column in table.columns if column.kind not in ("bound", "detail")]


def telling_columns(table: Table) -> tuple[list[Column], list[str]]:
    """Columns that tell rows apart or say something, and sentences for those left out.

    Columns that were asked for are all shown.
    """
    if table.view.columns:
        return list(table.columns), []
    shown: list[Column] = []
    zero: list[str] = []
    undefined: dict[str, list[str]] = {}
    for column in shown_columns(table):
        reasons = {row.undefined.get(column.key) for row in table.rows}
        reason = next(iter(reasons)) if len(reasons) == 1 else None
        is_zero = bool(table.rows) and all(row.values[column.key] == 0 for row in table.rows)
        if column.kind in ("ratio", "word") and len(table.rows) < 2:
            continue
        if column.kind == "axis" or column.key in ALWAYS_SHOWN or not (reason or is_zero):
            shown.append(column)
        elif reason:
            undefined.setdefault(reason, []).append(column.title)
        else:
            zero.append(column.title)
    asides = [f"undefined: {', '.join(names)}: {why}" for why, names in undefined.items()]
    if zero:
        asides.append(f"0 in every row: {', '.join(zero)}")
    return shown, asides


def format_number(value: float, precision: int | None = None) -> str:
    """Three significant digits (or `precision`), whole numbers in full, never a power of ten."""
    if precision is not None:
        rounded = float(f"{value:.{precision - 1}e}")
        exponent = math.floor(math.log10(abs(rounded))) if rounded else 0
        return f"{rounded:.{max(precision - 1 - exponent, 0)}f}"
    size = abs(value)
    if size >= 99.95:
        return f"{value:.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995 or size == 0:
        return f"{value:.2f}"
    return f"{value:.3f}"


def interval_decimals(low: float, high: float) -> int:
    """Decimals an interval justifies: to the first significant digit of half its width.

    To the second where the first is 1 or 2, and to as many as show on which side of 1 an end lies.
    """
    half = (high - low) / 2
    if half <= 0:
        return PLAIN_DECIMALS
    exponent = math.floor(math.log10(half))
    decimals = max((half < 3 * 10.0**exponent) - exponent, 1)
    while decimals < MOST_DECIMALS and any(
        end != 1 and round(end, decimals) == 1 for end in (low, high)
    ):
        decimals += 1
    return min(decimals, MOST_DECIMALS)


def _format(row: Row, column: Column, precision: int | None) -> str:
    value = row.values[column.key]
    if column.kind == "axis" or not isinstance(value, (int, float)):
        return "" if value is None else axis_text(value)
    if isinstance(value, int):
        return str(value)
    if column.kind == "small":
        return f"{value:.{1 if precision is None else precision - 1}e}" if value else "0"
    low, high = (row.values.get(f"{column.key}_{end}") for end in ("low", "high"))
    if low is not None and high is not None:
        decimals = interval_decimals(low, high)
        texts = [
            f"{number:.{decimals}f}" if precision is None else format_number(number, precision)
            for number in (value, low, high)
        ]
        return "{} [{}, {}]".format(*texts)
    if column.kind in ("ratio", "bound") and precision is None:
        return f"{value:.{PLAIN_DECIMALS}f}"
    return format_number(value, precision)
