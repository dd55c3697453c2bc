"""The comparison of two results as text, GitHub-flavoured Markdown or JSON.

Knows the formats; does not compute anything. Invariant: every format has the same cells, figures,
verdicts and warnings, and a verdict is a word, never a colour.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Callable
from typing import Any

from tabulate import tabulate

from bench.diff import HIGHER_IS_BETTER, CellDifference, Change, Difference, source_of
from bench.provenance import commit_of
from bench.report.markdown import escape
from bench.report.table import METRIC_COLUMNS, SLOT_COLUMNS
from bench.samples import Samples

FORMATS = ("text", "md", "json")
WIDTH = 100
_TITLES = {column.key: column.title for column in (*METRIC_COLUMNS, *SLOT_COLUMNS)}
_HEADERS = ("cell", "figure", "base", "new", "new / base", "98 % interval", "verdict")
_ALIGN = ("left", "left", "right", "right", "right", "left", "left")


def render_diff(difference: Difference, format_name: str) -> str:
    """The comparison in one of `FORMATS`, ending with a newline."""
    writers: dict[str, Callable[[Difference], str]] = {
        "text": _text,
        "md": _markdown,
        "json": _json,
    }
    return writers[format_name](difference)


def summary(difference: Difference) -> str:
    """`2 SLOWER, 1 FASTER, 7 UNCLEAR of 10 figures in 2 cells`."""
    verdicts = [change.verdict.value for cell in difference.cells for change in cell.changes]
    counts = {word: verdicts.count(word) for word in ("SLOWER", "FASTER", "SAME", "UNCLEAR")}
    said = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    cells = "1 cell" if len(difference.cells) == 1 else f"{len(difference.cells)} cells"
    return f"{said} of {len(verdicts)} figures in {cells}"


def _text(difference: Difference) -> str:
    lines = [f"{difference.new.run.workload}: {_title(difference)}", ""]
    rows = [
        _cells(cell, change, is_first=index == 0)
        for cell in difference.cells
        for index, change in enumerate(cell.changes)
    ]
    lines += tabulate(rows, _HEADERS, "simple", disable_numparse=True, colalign=_ALIGN).split("\n")
    lines += ["", summary(difference)]
    for sentence in _sentences(difference):
        lines += textwrap.wrap(sentence, WIDTH, subsequent_indent="    ")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _markdown(difference: Difference) -> str:
    """For a pull request: the sum in a heading, tok/s in sight, all figures folded away."""
    workload = escape(difference.new.run.workload)
    rows = [(cell, change) for cell in difference.cells for change in cell.changes]
    shown = [(c, change) for c, change in rows if change.metric == "tok_per_s"]
    lines = [f"### {workload}: {escape(summary(difference))}", "", escape(_title(difference)), ""]
    lines += [_grid(shown), ""]
    lines += [f"- {escape(sentence)}" for sentence in _sentences(difference)]
    lines += ["", "<details><summary>all figures</summary>", "", _grid(rows), "", "</details>"]
    return "\n".join(lines) + "\n"


def _grid(rows: list[tuple[CellDifference, Change]]) -> str:
    body = [[escape(text) for text in _cells(cell, change)] for cell, change in rows]
    return tabulate(body, _HEADERS, "github", disable_numparse=True, colalign=_ALIGN)


def _json(difference: Difference) -> str:
    document = {
        "base": _source(difference.base),
        "new": _source(difference.new),
        "threshold": difference.threshold,
        "cells": [
            {
                "axes": cell.axes,
                "problems": cell.problems,
                "changes": [_change(change) for change in cell.changes],
            }
            for cell in difference.cells
        ],
        "only_base": difference.only_base,
        "only_new": difference.only_new,
        "warnings": difference.warnings,
        "slower": difference.slower,
        "is_worse": difference.is_worse,
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _source(samples: Samples) -> dict[str, Any]:
    run = samples.run
    return {
        "path": str(source_of(samples)),
        "started_at": run.started_at,
        "commit": commit_of(run.environment),
        "rounds": run.rounds,
        "metadata": run.metadata,
    }


def _change(change: Change) -> dict[str, Any]:
    entry = dataclasses.asdict(change)
    interval = entry.pop("interval")
    low, high = (interval["low"], interval["high"]) if interval else (None, None)
    return {**entry, "ratio_low": low, "ratio_high": high}


def _title(difference: Difference) -> str:
    """Which is which."""
    base, new = difference.base, difference.new
    return (
        f"base {source_of(base)} ({base.run.started_at}), "
        f"new {source_of(new)} ({new.run.started_at})"
    )


def _cells(cell: CellDifference, change: Change, *, is_first: bool = True) -> list[str]:
    interval = change.interval
    return [
        cell.label if is_first else "",
        _TITLES[change.metric],
        _figure(change.base),
        _figure(change.new),
        "-" if change.ratio is None else f"{change.ratio:.3f}",
        "-" if interval is None else f"{interval.low:.3f} to {interval.high:.3f}",
        change.verdict.value,
    ]


def _figure(value: float | None) -> str:
    """Three significant figures, or all digits of the whole part."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _sentences(difference: Difference) -> list[str]:
    """All that must be said beside the figures, the gravest first."""
    sentences = [
        f"PROBLEM in {cell.label}: {problem}"
        for cell in difference.cells
        for problem in cell.problems
    ]
    for labels, which in ((difference.only_base, "base"), (difference.only_new, "new")):
        if labels:
            sentences.append(f"only in {which}: {', '.join(labels)}")
    sentences += [f"WARNING: {warning}" for warning in difference.warnings]
    sentences += _without_verdict(difference)
    better = ", ".join(_TITLES[key] for key, higher in HIGHER_IS_BETTER.items() if higher)
    sentences.append(
        "ratio: median over all pairs of rounds, with its unpaired 98 % interval "
        f"(docs/compare.md); more {better} is FASTER, a longer latency SLOWER, within "
        f"{100 * difference.threshold:g} % SAME"
    )
    return sentences


def _without_verdict(difference: Difference) -> list[str]:
    """Why figures have none, those with the same reason in one sentence."""
    reasons: dict[str, list[str]] = {}
    for cell in difference.cells:
        for change in cell.changes:
            if change.reason:
                name = f"{cell.label} {_TITLES[change.metric]}"
                reasons.setdefault(change.reason, []).append(name)
    num_figures = sum(len(cell.changes) for cell in difference.cells)
    return [
        f"no verdict: {why}"
        if len(names) == num_figures
        else f"no verdict for {', '.join(names)}: {why}"
        for why, names in reasons.items()
    ]
