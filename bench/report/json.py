"""The table as one JSON document, or as JSON lines: a row a line.

Knows JSON; does not compute anything. Invariant: strict JSON; what is undefined is null, and the
row's `undefined` says why.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from bench.report.table import Row, Table
from bench.report.view import plain_value


def render_json(table: Table) -> str:
    """`{"run": ..., "rows": [...], "notes": [...], "footnotes": [...]}`, indented."""
    document = {
        "run": dataclasses.asdict(table.run),
        "rows": [_entry(table, row) for row in table.rows],
        "notes": table.notes,
        "footnotes": table.footnotes,
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def render_jsonl(table: Table) -> str:
    """One line per row, as in `render_json`."""
    return "".join(json.dumps(_entry(table, row), allow_nan=False) + "\n" for row in table.rows)


def _entry(table: Table, row: Row) -> dict[str, Any]:
    values = {c.key: plain_value(row, c, table.view.precision) for c in table.columns}
    undefined = {key: reason for key, reason in row.undefined.items() if key in values}
    return {**values, "unsafe": row.unsafe, "baseline": row.baseline, "undefined": undefined}
