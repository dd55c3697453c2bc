"""The table for a terminal: aligned columns in as many panels as the width asks for.

Knows terminals; does not compute anything. Invariant: nothing is said by colour alone, and no
line of the table is wider than the terminal unless a single value is.
"""

from __future__ import annotations

import io
import os
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.box import Box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from bench.report.display import Display, display, telling_columns
from bench.report.legend import build_legend
from bench.report.table import Column, Row, Table
from bench.report.view import groups

GAP = 2
# A rule below the header and nothing else, in ASCII: tables are pasted into mails and tickets.
RULE = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


@dataclass(frozen=True, slots=True)
class Screen:
    """What the table is written on: columns of characters, and whether it shows colour."""

    width: int = 80
    color: bool = False

    @classmethod
    def of(cls, stream: TextIO) -> Screen:
        """The screen behind `stream`; 80 columns without colour where it is no terminal.

        `NO_COLOR` (not empty) and `TERM=dumb` turn colour off; `COLUMNS` sets the width.
        """
        has_width = stream.isatty() or "COLUMNS" in os.environ
        width = shutil.get_terminal_size().columns if has_width else 80
        is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        return cls(width=max(width, 40), color=stream.isatty() and not is_plain)


def render_text(table: Table, screen: Screen) -> str:
    """The table, its footnotes, notes and legend, ending with a newline."""
    columns, asides = telling_columns(table)
    numbers: dict[str, int] = {}
    lines = [f"{table.run.workload} on {table.run.profile}", ""]
    for heading, part in groups(table):
        shown = display(part, [c for c in columns if c in part.columns], numbers)
        lines += [heading, ""] if heading else []
        for panel in panels(shown, screen.width):
            lines += [*_draw(shown, panel, part.rows, screen), ""]
    lines += _paragraphs([f"({i}) {text}" for text, i in numbers.items()], screen)
    lines += _paragraphs([*table.notes, *asides], screen)
    lines += ["", *_paragraphs(build_legend(table, columns), screen)]
    return "\n".join(lines) + "\n"


def panels(shown: Display, width: int) -> list[list[int]]:
    """Indices of the columns of each panel: the axes in all of them, the rest as they fit."""
    widths = [
        max(map(len, (*column.header.split("\n"), *(row[i] for row in shown.rows))))
        for i, column in enumerate(shown.columns)
    ]
    axes = [i for i, column in enumerate(shown.columns) if column.kind == "axis"]
    others = [i for i in range(len(widths)) if i not in axes]
    if not others:
        return [axes]
    start = sum(widths[i] + GAP for i in axes)
    cut: list[list[int]] = []
    used = width
    for i in others:
        if not cut or used + widths[i] > width:
            cut.append(list(axes))
            used = start
        cut[-1].append(i)
        used += widths[i] + GAP
    return cut


def _draw(shown: Display, panel: Sequence[int], rows: Sequence[Row], screen: Screen) -> list[str]:
    grid = RichTable(box=RULE, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for i in panel:
        column = shown.columns[i]
        grid.add_column(
            Text(column.header),
            justify="left" if column.kind == "axis" else "right",
            no_wrap=True,
            vertical="bottom",
        )
    for strings, row in zip(shown.rows, rows, strict=True):
        grid.add_row(*(Text(strings[i], _style(shown.columns[i], row)) for i in panel))
    out = io.StringIO()
    console = Console(
        file=out,
        width=10_000,  # the panels are cut to the screen already; rich must not cut again
        force_terminal=screen.color,
        no_color=not screen.color,
        color_system="standard" if screen.color else None,
        legacy_windows=False,
    )
    console.print(grid)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _style(column: Column, row: Row) -> str:
    if column.key in ("wrong_requests", "wrong_rows") and row.values[column.key]:
        return "bold red"
    if column.key == "release" and row.unsafe:
        return "yellow"
    return ""


def _paragraphs(sentences: Sequence[str], screen: Screen) -> list[str]:
    return [
        line
        for text in sentences
        for line in textwrap.wrap(text, screen.width, subsequent_indent="    ")
    ]
