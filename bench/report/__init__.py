"""Results as tables: `build_table` says what, `render` writes it in one of `FORMATS`.

Knows the formats by name and where their output goes; does not know how a run is made. Invariant:
a table is a pure function of the results file, so an export never runs anything again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from bench.report.csv import render_csv
from bench.report.files import write_file
from bench.report.html import render_html
from bench.report.json import render_json, render_jsonl
from bench.report.latex import render_latex
from bench.report.markdown import render_markdown
from bench.report.sql import render_sql
from bench.report.table import Table, View, build_table
from bench.report.text import Screen, render_text
from bench.report.view import apply_view, split_keys

__all__ = [
    "FORMATS",
    "Screen",
    "Table",
    "View",
    "apply_view",
    "build_table",
    "render",
    "split_keys",
    "write_report",
]

FORMATS: dict[str, Callable[[Table, Screen], str]] = {
    "text": render_text,
    "md": lambda table, screen: render_markdown(table),
    "csv": lambda table, screen: render_csv(table),
    "json": lambda table, screen: render_json(table),
    "jsonl": lambda table, screen: render_jsonl(table),
    "latex": lambda table, screen: render_latex(table),
    "html": lambda table, screen: render_html(table),
    "sql": lambda table, screen: render_sql(table),
}


def render(table: Table, format: str = "text", screen: Screen | None = None) -> str:
    """The table in one of `FORMATS`; `screen` matters to `text` only (80 columns, no colour)."""
    return FORMATS[format](table, screen or Screen())


def write_report(table: Table, format: str = "text", path: Path | None = None) -> None:
    """Write the table to the file `path`, or to stdout, as UTF-8 whatever the locale.

    Raises UserError if the file cannot be written.
    """
    if path is None:
        text = render(table, format, Screen.of(sys.stdout))
        sys.stdout.flush()
        # Bytes: text mode would turn CSV's line ends, and fail on names outside the locale.
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()
        return
    write_file(path, render(table, format).encode("utf-8"))
