"""The table as one JSON document, or as JSON lines: a row a line.

Knows JSON; does not compute anything. Invariant: strict JSON; what is undefined is null, and the
row's `undefined` says why.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from bench.report.table import Row, Table


def render_json(table: Table) -> str:
    """`{"run": ..., "rows": [...], "notes": [...], "footnotes": [...]}`, indented."""
    document = {
        "run": dataclasses.asdict(table.run),
        "rows": [_entry(row) for row in table.rows],
        "notes": table.notes,
        "footnotes": table.footnotes,
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def render_jsonl(table: Table) -> str:
    """One line per row, as in `render_json`."""
    return "".join(json.dumps(_entry(row), allow_nan=False) + "\n" for row in table.rows)


def _entry(row: Row) -> dict[str, Any]:
    flags = {"unsafe": row.unsafe, "baseline": row.baseline}
    return {**row.values, **flags, "undefined": row.undefined}
