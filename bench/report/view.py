"""A reader's choice of columns, order, groups and digits, applied to a table.

Knows tables; knows no metric and no output format. Invariant: chooses and orders, and changes no
value: what a format shows of a row is in the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from bench.nearest import choices
from bench.report.table import Column, Row, Table, View
from deepinfer.errors import UserError


def apply_view(table: Table, view: View) -> Table:
    """The table as `view` wants it: its columns, rows sorted and a group's rows together.

    Sorting keeps the order of the file among equals and puts undefined values last in either
    direction. Raises UserError for a key no column has and for groups by what is no axis.
    """
    by_key = {column.key: column for column in table.columns}
    columns = [by_key[_known("column", key, by_key)] for key in view.columns]
    axes = [column.key for column in table.columns if column.kind == "axis"]
    rows = list(table.rows)
    for wish in reversed(view.sort):
        key = _known("sort key", wish.removeprefix("-"), by_key)
        rows = _sorted(rows, key, descending=wish.startswith("-"))
    if view.group_by:
        _known("group axis", view.group_by, axes)
        order = list(dict.fromkeys(str(row.values[view.group_by]) for row in table.rows))
        rows.sort(key=lambda row: order.index(str(row.values[view.group_by])))
        if columns and by_key[view.group_by] not in columns:
            columns.insert(0, by_key[view.group_by])
    chosen = tuple(dict.fromkeys(columns)) or table.columns
    return replace(table, columns=chosen, rows=tuple(rows), view=view)


def groups(table: Table) -> list[tuple[str, Table]]:
    """`(heading, table)` for each value of the group axis, whose column the heading replaces.

    One table without a heading if nothing is grouped.
    """
    axis = table.view.group_by
    if not axis:
        return [("", table)]
    columns = tuple(column for column in table.columns if column.key != axis)
    by_value: dict[str, list[Row]] = {}
    for row in table.rows:
        by_value.setdefault(str(row.values[axis]), []).append(row)
    return [
        (f"{axis}: {value}", replace(table, columns=columns, rows=tuple(rows)))
        for value, rows in by_value.items()
    ]


def plain_value(row: Row, column: Column, precision: int | None) -> Any:
    """The value for a machine: as computed, or rounded to `precision` significant figures."""
    value = row.values[column.key]
    is_measured = column.kind in ("number", "small", "ratio", "bound")
    if precision is None or not is_measured or not isinstance(value, float):
        return value
    return float(f"{value:.{precision - 1}e}")


def split_keys(text: str) -> tuple[str, ...]:
    """`"a, b"` -> `("a", "b")`; empty parts are left out."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _known(what: str, key: str, valid: Iterable[str]) -> str:
    names = list(valid)
    if key not in names:
        raise UserError(f"no {what} {key!r} in this table; expected {choices(key, names)}")
    return key


def _sorted(rows: list[Row], key: str, *, descending: bool) -> list[Row]:
    known = [row for row in rows if row.values[key] is not None]
    unknown = [row for row in rows if row.values[key] is None]
    known.sort(key=lambda row: _rank(row.values[key]), reverse=descending)
    return known + unknown


def _rank(value: Any) -> tuple[float, str]:
    """Numbers by size, then texts by the alphabet: an axis may have both."""
    if isinstance(value, (int, float)):
        return float(value), ""
    return math.inf, str(value)
