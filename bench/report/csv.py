"""The table as CSV (RFC 4180): a header of keys, a line per cell, nothing else.

Knows CSV; does not compute anything. Invariant: an undefined value is an empty field.
"""

from __future__ import annotations

import csv
import io

from bench.report.table import Table
from bench.report.view import plain_value


def render_csv(table: Table) -> str:
    """Header and rows, each ended by CRLF; the columns of the table, then `unsafe`, `baseline`."""
    out = io.StringIO()
    writer = csv.writer(out)  # its default dialect is RFC 4180, CRLF included
    keys = [column.key for column in table.columns]
    writer.writerow([*keys, "unsafe", "baseline"])
    for row in table.rows:
        flags = (str(flag).lower() for flag in (row.unsafe, row.baseline))
        writer.writerow(
            [*(plain_value(row, c, table.view.precision) for c in table.columns), *flags]
        )
    return out.getvalue()
