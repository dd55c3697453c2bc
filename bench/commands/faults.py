"""`check faults`: which checker finds which planted fault, and that the clean engine is silent.

Knows how the table is printed; faults and harness are `deepinfer.testing.faults`. Invariant: exit
code 0 means that every fault was found by a checker and no clean engine by anybody.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from bench.commands.sheet import Sheet, render_sheet
from deepinfer.errors import check_name

if TYPE_CHECKING:
    from deepinfer.testing.faults.survey import Row

NUM_SEEDS = 5
BLIND = (
    "tags is blind to counts that are off and to blocks withheld for ever (no row is wrong), to "
    "free order, and to whatever goes well in this run: it sees what was read, not what could be.",
    "order is blind to work that is ordered and wrong (rows never written or copied, a computed "
    "count too high, blocks lost), and to operations that do something else than they say.",
    "conservation is blind to the device: events, waits and fences that do not cover what they "
    "stand for, what is changed behind a plan, and what an operation really does.",
    "engine is what the engine itself refused with an error, or a stall; most faults never come to "
    "that.",
)


@click.command("faults")
@click.option("--fault", "names", multiple=True, metavar="NAME", help="Only this one; repeatable.")
@click.option("--seeds", type=click.IntRange(min=1), default=NUM_SEEDS, show_default=True)
@click.option("--format", "format_name", type=click.Choice(("text", "json")), default="text")
@click.pass_context
def faults(ctx: click.Context, names: tuple[str, ...], seeds: int, format_name: str) -> None:
    """Plant faults in a live engine, one at a time, and see which checker finds them.

    Each runs SEEDS random scenarios on the deterministic CPU device. Exit code 1 if no checker
    found a fault, or anybody found something in an engine without one.
    """
    from deepinfer.device.openmp import use_one_thread
    from deepinfer.testing.faults import FAULTS
    from deepinfer.testing.faults.survey import survey

    use_one_thread()  # the model is so small that a team of threads only waits for one another

    for name in names:
        check_name("--fault", name, FAULTS)
    chosen = [FAULTS[name] for name in names or FAULTS]
    rows = []
    for row in survey(chosen, seeds):
        rows.append(row)
        print(f"{row.name}: {'ok' if row.passed else 'FAILED'}", file=sys.stderr, flush=True)
    click.echo(render_sheet(_sheet(rows, seeds), format_name), nl=False)
    ctx.exit(0 if all(row.passed for row in rows) else 1)


def _sheet(rows: Sequence[Row], num_seeds: int) -> Sheet:
    from deepinfer.testing.faults.survey import COLUMNS

    ordered = sorted(rows, key=lambda row: row.is_clean)  # faults first
    cells = [(row.name, row.report, *(_cell(row, column) for column in COLUMNS)) for row in ordered]
    failed = [row for row in ordered if not row.passed]
    remarks = [
        f"{row.name}: {text}" for row in failed for text in row.example.values() or ["not found"]
    ]
    remarks.append(
        f"A figure is the step at which it was first found, the median of {num_seeds} scenarios; "
        f"in brackets, in how many of them, where not in all. Blank: never."
    )
    remarks += BLIND
    clean = [row for row in ordered if row.is_clean]
    planted = {row.what for row in ordered if not row.is_clean}  # some in two models
    missed = {row.what for row in failed if not row.is_clean}
    remarks.append(
        f"{len(planted - missed)} of {len(planted)} faults found; the clean engine is silent in "
        f"{sum(row.passed for row in clean)} of {len(clean)} rows."
    )
    keys = ("name", "what", "report", "clean", "first_step", "num_found", "example", "passed")
    records = [
        {
            "name": row.name,
            "what": row.what,
            "report": row.report or None,
            "clean": row.is_clean,
            "first_step": {column: row.first_step.get(column) for column in COLUMNS},
            "num_found": {column: row.num_found.get(column, 0) for column in COLUMNS},
            "example": row.example,
            "passed": row.passed,
        }
        for row in ordered
    ]
    align = ("left", "left", *["right"] * len(COLUMNS))
    return Sheet(
        ("fault", "report", *COLUMNS), cells, align, remarks, keys, records, {"seeds": num_seeds}
    )


def _cell(row: Row, column: str) -> str:
    if column not in row.first_step:
        return ""
    count = row.num_found[column]
    share = "" if count == row.num_seeds else f" ({count})"
    return f"{row.first_step[column]}{share}"
