"""The table as GitHub-flavoured Markdown, every column in it.

Knows Markdown; does not compute anything. Invariant: no value can break the table's cells.
"""

from __future__ import annotations

from tabulate import tabulate

from bench.report.display import Display, display, shown_columns
from bench.report.legend import build_legend
from bench.report.table import Table
from bench.report.view import groups


def render_markdown(table: Table) -> str:
    """The table, its footnotes, notes and legend, ending with a newline."""
    numbers: dict[str, int] = {}
    title = f"**{escape(table.run.workload)}** on {escape(table.run.profile)}"
    lines = [title, ""]
    for heading, part in groups(table):
        lines += [f"### {escape(heading)}", ""] if heading else []
        lines += [_grid(display(part, shown_columns(part), numbers)), ""]
    footnotes = [f"({i}) {text}" for text, i in numbers.items()]
    legend = build_legend(table, shown_columns(table))
    lines += [f"- {escape(text)}" for text in (*footnotes, *table.notes, *legend)]
    return "\n".join(lines) + "\n"


def _grid(shown: Display) -> str:
    return tabulate(
        [[escape(text) for text in row] for row in shown.rows],
        headers=[escape(column.title) for column in shown.columns],
        tablefmt="github",
        disable_numparse=True,
        colalign=["left" if c.kind == "axis" else "right" for c in shown.columns],
    )


def escape(text: str) -> str:
    """Keep what would end a cell or begin markup as the characters it is."""
    for character in ("\\", "|", "*", "_", "`", "<"):
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())
