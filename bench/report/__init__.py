"""Results as tables: `build_table` says what, `render` writes it in one of `FORMATS`.

Knows the formats by name and where their output goes; does not know how a run is made. Invariant:
a table is a pure function of the results file, so an export never runs anything again.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from bench.report.csv import render_csv
from bench.report.json import render_json, render_jsonl
from bench.report.markdown import render_markdown
from bench.report.table import Table, build_table
from bench.report.text import Screen, render_text
from deepinfer.errors import UserError

__all__ = ["FORMATS", "Screen", "Table", "build_table", "render", "write_report"]

FORMATS: dict[str, Callable[[Table, Screen], str]] = {
    "text": render_text,
    "md": lambda table, screen: render_markdown(table),
    "csv": lambda table, screen: render_csv(table),
    "json": lambda table, screen: render_json(table),
    "jsonl": lambda table, screen: render_jsonl(table),
}


def render(table: Table, format: str = "text", screen: Screen | None = None) -> str:
    """The table in one of `FORMATS`; `screen` matters to `text` only (80 columns, no colour)."""
    return FORMATS[format](table, screen or Screen())


def write_report(table: Table, format: str = "text", path: Path | None = None) -> None:
    """Write the table to the file `path`, or to stdout, as UTF-8 whatever the locale.

    A file appears whole or not at all. Raises UserError if it cannot be written.
    """
    if path is None:
        text = render(table, format, Screen.of(sys.stdout))
        sys.stdout.flush()
        # Bytes: text mode would turn CSV's line ends, and fail on names outside the locale.
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()
        return
    if path.is_dir():
        raise UserError(f"{path}: is a folder", hint="name a file in it")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(render(table, format).encode("utf-8"))
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise UserError(
            f"{path}: cannot write: {error.strerror}", hint="name a file in a folder that exists"
        ) from error
