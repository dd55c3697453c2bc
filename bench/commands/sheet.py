"""A profile's figures as text, Markdown, CSV or JSON: what every `profile` subcommand prints.

Knows the formats; neither measures nor decides what a figure means. Invariant: every format has the
same rows; an undefined value is a dash on paper, an empty field in CSV, null in JSON.
"""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FORMATS = ("text", "md", "csv", "json")
WIDTH = 100
UNDEFINED = "-"


@dataclass(frozen=True, slots=True)
class Sheet:
    """Figures, twice: as a reader sees them and as a program does.

    Attributes:
        headers, cells: of the table on paper, a tuple of strings per row.
        align: `left` or `right` for each column.
        remarks: sentences a reader of the figures needs.
        keys, records: of the table for programs; each record has every key, None if undefined.
        facts: what JSON has besides `rows` and `notes`.
    """

    headers: Sequence[str]
    cells: Sequence[Sequence[str]]
    align: Sequence[str]
    remarks: Sequence[str]
    keys: Sequence[str]
    records: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any] = field(default_factory=dict)


def render_sheet(sheet: Sheet, format_name: str) -> str:
    """The sheet in one of `FORMATS`, ending with a line break."""
    writers = {"text": _text, "md": _markdown, "csv": _csv, "json": _json}
    return writers[format_name](sheet)


def figure(value: float | None, decimals: int) -> str:
    """A number with so many decimals, or a dash."""
    return UNDEFINED if value is None else f"{value:.{decimals}f}"


def undefined_remarks(undefined: Mapping[str, str], heading: str) -> list[str]:
    """One sentence for each reason, with the names that share it."""
    names: dict[str, list[str]] = {}
    for name, reason in undefined.items():
        names.setdefault(reason, []).append(name)
    return [f"{heading}: {', '.join(which)}: {why}" for why, which in names.items()]


def _grid(sheet: Sheet, style: str) -> str:
    from tabulate import tabulate

    return tabulate(
        sheet.cells,
        headers=sheet.headers,
        tablefmt=style,
        disable_numparse=True,
        colalign=sheet.align,
    )


def _text(sheet: Sheet) -> str:
    lines = [*_grid(sheet, "simple").split("\n"), ""]
    for remark in sheet.remarks:
        lines += textwrap.wrap(remark, WIDTH, subsequent_indent="    ")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _markdown(sheet: Sheet) -> str:
    remarks = "\n".join(f"- {remark}" for remark in sheet.remarks).replace("*", r"\*")
    return f"{_grid(sheet, 'github')}\n\n{remarks}\n"


def _csv(sheet: Sheet) -> str:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(sheet.keys)
    writer.writerows([record[key] for key in sheet.keys] for record in sheet.records)
    return out.getvalue()


def _json(sheet: Sheet) -> str:
    rows = [{key: record[key] for key in sheet.keys} for record in sheet.records]
    document = {"rows": rows, **sheet.facts, "notes": list(sheet.remarks)}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
