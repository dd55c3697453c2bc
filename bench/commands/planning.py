"""What `run` and `compare` do besides measuring: carry a run on, tell what it costs, label it.

Knows the command line; `bench.resume` and `bench.estimate` do the work. Invariant: nothing here
changes a file, but `open_writer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench.commands.duration import duration
from bench.commands.pools import what_auto_will_be
from deepinfer.errors import UserError

if TYPE_CHECKING:
    from bench.matrix import Cell
    from bench.resume import Kept
    from bench.samples import SampleWriter

PLANNING_OPTIONS = (
    click.option(
        "--resume", is_flag=True, help="Carry on the interrupted run in the folder of -o."
    ),
    click.option(
        "--dry-run", is_flag=True, help="Show the cells and how long they take; measure nothing."
    ),
    click.option(
        "--fail-fast", is_flag=True, help="Stop at the first cell that fails, not after the others."
    ),
    click.option(
        "--metadata",
        multiple=True,
        metavar="KEY=VALUE",
        help="A note stored with the result; repeatable.",
    ),
)


def parse_metadata(items: Sequence[str]) -> dict[str, str]:
    """`["ticket=42"]` by key. Raises UserError for an item without a key, or a key given twice."""
    metadata: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--metadata {item!r}: no key; expected KEY=VALUE")
        if key.strip() in metadata:
            raise UserError(f"--metadata {key.strip()}: given twice; expected different keys")
        metadata[key.strip()] = value.strip()
    return metadata


def kept_of(
    folder: Path | None, cells: Sequence[Cell], rounds: int, metadata: dict[str, str]
) -> Kept:
    """What the run in `folder` has already. Raises UserError if it cannot be carried on."""
    from bench.collect.environment import collect_environment
    from bench.resume import Plan, carry_on

    if folder is None:
        raise UserError("--resume: no folder given", hint="name the run to carry on with -o DIR")
    first = cells[0].resolved
    plan = Plan(
        workload=first.workload.name,
        profile=first.profile_name,
        config_hash=first.config_hash,
        rounds=rounds,
        cells=[cell.axes for cell in cells],
        metadata=metadata,
    )
    return carry_on(folder, plan, collect_environment())


def refuse_used(folder: Path) -> None:
    """Raise UserError if there is something in the folder of a new run.

    Two runs' files in one folder, or a result amid somebody's sources, cannot be told apart later.
    """
    from bench.samples import samples_path

    hint = "choose another folder with -o, or carry the run on with --resume"
    results = samples_path(folder)
    try:
        exists = results.exists()
        is_used = results.parent == folder and folder.is_dir() and any(folder.iterdir())
    except OSError:  # a folder we may not look into; the writer says so
        return
    if exists:
        raise UserError(f"{results}: results exist already", hint=hint)
    if is_used:
        raise UserError(f"-o {folder}: the folder is not empty; expected a new one", hint=hint)


def open_writer(folder: Path, *, resume: bool) -> SampleWriter:
    """The results file to write to: a new one, or the old one cut to its whole rounds."""
    from bench.resume import cut_to_whole_rounds
    from bench.samples import SampleWriter

    if resume:
        cut_to_whole_rounds(folder)
    return SampleWriter(folder, append=resume)


def num_rounds_left(cells: Sequence[Cell], rounds: int, kept: Kept) -> int:
    """Measured rounds of all cells that are not done."""
    return sum((cell.index, index) not in kept.done for cell in cells for index in range(rounds))


def show_plan(cells: Sequence[Cell], rounds: int, kept: Kept, results: Path) -> None:
    """Print the cells, the rounds each has left, and how long they will take."""
    from tabulate import tabulate

    from bench.estimate import estimate_round

    earlier = _earlier(cells[0], results)
    rows: list[list[Any]] = []
    total_s = 0.0
    for cell in cells:
        left = num_rounds_left([cell], rounds, kept)
        estimate = estimate_round(cell.axes, cell.resolved, earlier)
        total_s += left * estimate.round_s
        name = cell.label or cell.resolved.workload.name
        rows.append([name, left, duration(estimate.round_s), estimate.source])
    headers = ("cell", "rounds", "each", "from")
    click.echo(tabulate(rows, headers, disable_numparse=True, colalign=("left", "right", "right")))
    amount = f"{_num(len(cells), 'cell')}, {_num(sum(row[1] for row in rows), 'round')}"
    click.echo(
        f"\n{amount}: about {duration(total_s)}, start and warm-ups not counted; nothing was run"
    )
    if note := what_auto_will_be(cells):
        click.echo(note)


def _earlier(cell: Cell, results: Path) -> list[Any]:
    """Saved cells of the workload and profile; none where there are no results."""
    from bench.history import History

    if not results.is_dir():
        return []
    with History(results, read_only=True) as history:
        return history.cells(cell.resolved.workload.name, cell.resolved.profile_name)


def _num(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
