r"""The table as LaTeX, to be read with `\input`: booktabs and no other package.

Knows LaTeX; does not compute anything. Invariant: no text of the run is ever read as a command, so
the fragment compiles whatever the names are. Letters outside Latin need LuaLaTeX or XeLaTeX.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.report.display import Display, display, telling_columns
from bench.report.legend import build_legend
from bench.report.table import Column, Table
from bench.report.text import panels
from bench.report.view import groups

# Characters of \footnotesize that fit the text width of article on A4.
WIDTH = 76
ESCAPES = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "`": r"\textasciigrave{}",
    "[": "{[}",  # after \\ it would be an argument of the line break
    "*": "{*}",  # likewise
}


def render_latex(table: Table) -> str:
    r"""A `table` environment with a tabular per group and panel, notes below, ending with `\n`."""
    columns, asides = telling_columns(table)
    numbers: dict[str, int] = {}
    lines = [
        r"% needs \usepackage{booktabs} in the preamble",
        r"\begin{table}",
        r"\centering\footnotesize",
        r"\setlength{\tabcolsep}{4pt}",
        rf"\caption{{{escape(table.run.workload)} on {escape(table.run.profile)}}}",
    ]
    for heading, part in groups(table):
        shown = display(part, [c for c in columns if c in part.columns], numbers)
        lines += [rf"\par\medskip\textbf{{{escape(heading)}}}\par"] if heading else []
        for panel in panels(shown, WIDTH):
            lines += [r"\par\smallskip", *_tabular(shown, panel)]
    footnotes = [f"({i}) {text}" for text, i in numbers.items()]
    lines += [r"\par\smallskip", r"\begin{minipage}{\linewidth}\raggedright"]
    legend = build_legend(table, columns)
    lines += [rf"{escape(text)}\par" for text in (*footnotes, *table.notes, *asides, *legend)]
    lines += [r"\end{minipage}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """`text` as LaTeX prints it; what is not printable becomes a space."""
    escaped = "".join(
        ESCAPES.get(character, character if character.isprintable() else " ") for character in text
    )
    return escaped.replace("--", "-{}-{}")  # would become a dash


def _tabular(shown: Display, panel: Sequence[int]) -> list[str]:
    columns = [shown.columns[i] for i in panel]
    align = "".join("l" if column.kind == "axis" else "r" for column in columns)
    rows = [_line(escape(row[i]) for i in panel) for row in shown.rows]
    return [
        rf"\begin{{tabular}}{{@{{}}{align}@{{}}}}",
        r"\toprule",
        *_header(columns),
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
    ]


def _header(columns: Sequence[Column]) -> list[str]:
    """A line of names and, where a header has two, a line of units."""
    parts = [column.header.split("\n") for column in columns]
    height = max(map(len, parts))
    padded = [part + [""] * (height - len(part)) for part in parts]
    return [_line(escape(part[i]) for part in padded) for i in range(height)]


def _line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"
