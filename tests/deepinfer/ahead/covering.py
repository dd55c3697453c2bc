"""Covering arrays: a few rows in which every two values of two axes meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Cell = tuple[str, Any]  # an axis and one of its values


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows {axis: value} that between them hold every pair of values of two axes; the same always.

    Greedy: a row starts from the first pair that is missing, and each further axis takes the value
    that brings most missing pairs, of equally good ones the value used least.
    """
    cells = [[(axis, value) for value in values] for axis, values in axes.items()]
    missing = dict.fromkeys(
        frozenset(pair) for one, other in combinations(cells, 2) for pair in product(one, other)
    )
    uses = dict.fromkeys((cell for column in cells for cell in column), 0)
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for column in cells:
            if column[0][0] not in row:
                chosen = row.items()
                gains = {
                    cell: sum(frozenset((cell, c)) in missing for c in chosen) for cell in column
                }
                axis, value = max(column, key=lambda cell: (gains[cell], -uses[cell]))
                row[axis] = value
        for cell in row.items():
            uses[cell] += 1
        for pair in combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        rows.append({axis: row[axis] for axis in axes})
    return rows
