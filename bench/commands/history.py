"""`history`: saved results of a workload over time.

Knows the command line and the table; `bench.history` keeps the index. Invariant: writes nothing but
the index, which can be deleted at any time.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench.commands.completion import complete_profile, complete_workload

if TYPE_CHECKING:
    from bench.history import SavedCell

_HEADERS = (
    *("started (UTC)", "run", "commit", "profile", "cell", "rounds"),
    *("tok/s", "TTFT p50 ms", "TPOT ms", "wrong", "remarks"),
)
_ALIGN = (*["left"] * 5, *["right"] * 5, "left")


@click.command("history")
@click.argument("workload", shell_complete=complete_workload)
@click.option("--profile", shell_complete=complete_profile, help="Only results of this profile.")
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    default=Path("results"),
    show_default=True,
    help="Folder that has a folder per run.",
)
@click.option("--rebuild", is_flag=True, help="Read all results again instead of the new ones.")
@click.option(
    "--format",
    "format_name",
    type=click.Choice(("text", "json")),
    default="text",
    show_default=True,
    help="How to write it.",
)
def command(
    workload: str, profile: str | None, results: Path, rebuild: bool, format_name: str
) -> None:
    """List the saved results of WORKLOAD over time, a row per cell, the oldest run first.

    An index in the results folder, index.sqlite, is kept up to date; broken results files are
    named on stderr and left out.
    """
    from bench.history import History
    from bench.nearest import choices
    from deepinfer.errors import UserError

    with History(results, rebuild=rebuild) as history:
        for problem in history.problems:
            click.echo(f"left out: {problem}", err=True)
        cells = history.cells(workload, profile)
        known = history.workloads()
    if not cells and workload not in known:
        expected = f"; expected {choices(workload, known)}" if known else ""
        raise UserError(f"{results}: no result of workload {workload!r}{expected}")
    if format_name == "json":
        click.echo(json.dumps([_entry(cell) for cell in cells], indent=2, allow_nan=False))
    elif cells:
        click.echo(_table(cells))
    else:
        raise UserError(f"{results}: no result of workload {workload} on profile {profile!r}")


def _entry(cell: SavedCell) -> dict[str, Any]:
    entry = dataclasses.asdict(cell)
    return {**entry, **entry.pop("metrics")}


def _table(cells: Sequence[SavedCell]) -> str:
    from tabulate import tabulate

    from bench.samples import label_of_axes

    rows = []
    previous = None
    for cell in cells:
        is_first = cell.folder != previous
        previous = cell.folder
        head = (
            cell.started_at[:19].replace("T", " "),
            cell.folder,
            cell.commit or "-",
            cell.profile,
        )
        rows.append(
            [
                *(head if is_first else [""] * len(head)),
                label_of_axes(cell.axes),
                str(cell.rounds),
                *(_figure(cell.metrics[key]) for key in ("tok_per_s", "ttft_ms_p50", "tpot_ms")),
                _figure(cell.metrics["wrong_requests"]),
                _remarks(cell, is_first),
            ]
        )
    text = tabulate(rows, _HEADERS, "simple", disable_numparse=True, colalign=_ALIGN)
    return "\n".join(line.rstrip() for line in text.split("\n"))


def _remarks(cell: SavedCell, is_first: bool) -> str:
    remarks = ["UNSAFE"] if cell.unsafe else []
    remarks += [f"FAILED: {cell.failure}"] if cell.failure else []
    if is_first:
        remarks += [cell.status] if cell.status != "complete" else []
        remarks += [f"{key}={value}" for key, value in cell.metadata.items()]
    return ", ".join(remarks)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
