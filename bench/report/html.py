"""The run as one HTML file: sortable table, plots, notes, where it was measured.

Knows HTML; does not compute anything. Invariant: self-contained (no address is ever loaded), no
text of the run is ever read as markup, and nothing is said by colour alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from string import Template

from bench.report.display import Display, display, telling_columns
from bench.report.legend import build_legend
from bench.report.page import PAGE
from bench.report.plots import build_plots
from bench.report.svg import draw
from bench.report.table import Column, Row, Table
from bench.report.view import groups


def render_html(table: Table) -> str:
    """The document, ending with a newline."""
    columns, asides = telling_columns(table)
    numbers: dict[str, int] = {}
    grids = []
    for heading, part in groups(table):
        shown = display(part, [c for c in columns if c in part.columns], numbers)
        grids.append(_grid(shown, part.rows, heading or "Results"))
    plots, missing = build_plots(table)
    footnotes = [f"({i}) {text}" for text, i in numbers.items()]
    return Template(PAGE).substitute(
        title=escape(f"{table.run.workload} on {table.run.profile}"),
        subtitle=escape(_subtitle(table)),
        tables="\n".join(grids),
        notes=_items([*footnotes, *table.notes, *asides]),
        plots="\n".join(
            f"<figure>\n<h3>{escape(plot.title)}</h3>\n{draw(plot)}\n"
            f"<figcaption>{escape(plot.caption)}</figcaption>\n</figure>"
            for plot in plots
        ),
        missing=_items(missing),
        legend=_items(build_legend(table, columns)),
        run=escape(_run(table)),
    )


def _subtitle(table: Table) -> str:
    run = table.run
    return f"{run.started_at}, seed {run.seed}, configuration {run.config_hash}"


def _grid(shown: Display, rows: Sequence[Row], caption: str) -> str:
    head = "".join(_header(column) for column in shown.columns)
    body = "\n".join(
        "<tr>" + "".join(_cells(shown.columns, texts, row)) + "</tr>"
        for texts, row in zip(shown.rows, rows, strict=True)
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">\n'
        f"<table>\n<caption>{escape(caption)}</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _header(column: Column) -> str:
    """A heading whose button sorts; its unit on a line of its own."""
    name = "<br>".join(map(escape, column.header.split("\n")))
    kind = "text" if column.kind == "axis" else "number"
    return (
        f'<th scope="col" class="{kind}" data-key="{escape(column.key)}">'
        f'<button type="button">{name}<span class="arrow" aria-hidden="true"></span></button></th>'
    )


def _cells(columns: Sequence[Column], texts: Sequence[str], row: Row) -> list[str]:
    """The row's cells; `data-value` is what sorting compares, absent where undefined."""
    cells = []
    for i, (column, text) in enumerate(zip(columns, texts, strict=True)):
        value = row.values[column.key]
        tag = 'th scope="row"' if i == 0 else "td"
        kind = "text" if column.kind == "axis" else "number"
        sort = "" if value is None else f' data-value="{escape(str(value))}"'
        reason = row.undefined.get(column.key)
        title = f' title="{escape(reason)}"' if reason else ""
        cells.append(f'<{tag} class="{kind}"{sort}{title}>{escape(text)}</{tag[:2]}>')
    return cells


def _items(sentences: Sequence[str]) -> str:
    return "\n".join(f"<li>{escape(text)}</li>" for text in sentences)


def _run(table: Table) -> str:
    run = table.run
    known = {
        "command": list(run.command),
        "metadata": run.metadata,
        "environment": run.environment,
        "config": run.config,
    }
    return json.dumps(known, indent=2, ensure_ascii=False)
