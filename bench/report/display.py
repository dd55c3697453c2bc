"""A table as strings: what text and Markdown share.

Knows how a value is written on paper; knows neither terminals nor Markdown. Invariant: an
undefined value is never a number, only the mark of the footnote that says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.table import Column, Row, Table


@dataclass(frozen=True, slots=True)
class Display:
    """Columns to show, a string for each of their values, and the footnotes the marks refer to."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    footnotes: tuple[str, ...]


def display(table: Table, columns: Sequence[Column]) -> Display:
    """Write `columns` of the table as strings; footnotes count those columns only."""
    footnotes: dict[str, int] = {}

    def mark(reason: str) -> str:
        return f"({footnotes.setdefault(reason, len(footnotes) + 1)})"

    def cell(row: Row, column: Column) -> str:
        if column.key in row.undefined:
            return mark(row.undefined[column.key])
        text = _format(row.values[column.key], column)
        if column.kind == "ratio":
            low = f"{column.key}_low"
            if low in row.undefined:
                return f"{text} {mark(row.undefined[low])}"
            return f"{text} [{row.values[low]:.2f}, {row.values[f'{column.key}_high']:.2f}]"
        if column is columns[0] and row.unsafe:
            return f"{text} UNSAFE"
        if column.key == "wrong_requests" and row.values[column.key]:
            return f"{text} WRONG"
        return text

    rows = tuple(tuple(cell(row, column) for column in columns) for row in table.rows)
    return Display(tuple(columns), rows, tuple(footnotes))


def shown_columns(table: Table) -> list[Column]:
    """Every column but the interval's ends, which stand beside their ratio."""
    return [column for column in table.columns if column.kind != "bound"]


def format_number(value: float) -> str:
    """Three significant digits, whole numbers in full, never a power of ten."""
    size = abs(value)
    if size >= 99.95:
        return f"{value:.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995 or size == 0:
        return f"{value:.2f}"
    return f"{value:.3f}"


def _format(value: object, column: Column) -> str:
    if column.kind == "axis" or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    if isinstance(value, int):
        return str(value)
    if column.kind == "small":
        return f"{value:.1e}" if value else "0"
    if column.kind == "ratio":
        return f"{value:.2f}"
    return format_number(value)
