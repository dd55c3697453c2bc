"""What `run` and `compare` share: their options, and the way from options to a table.

Knows the command line and the order of things: everything that can be refused is refused before
the results folder is made. Invariant: one folder per run, and the table printed is computed from
the file in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from bench.commands.checking import OFF, check_option
from bench.commands.export import FORMAT_NAMES
from bench.commands.inputs import INPUT_OPTIONS, Decorator, load_input, with_options
from bench.commands.planning import (
    PLANNING_OPTIONS,
    kept_of,
    num_rounds_left,
    open_writer,
    parse_metadata,
    refuse_used,
    show_plan,
)
from bench.commands.pools import what_auto_is, with_pools, with_stored_pools
from bench.commands.progress import Progress

if TYPE_CHECKING:
    from bench.rounds import Auto
    from bench.spec import Resolved

RESULTS = Path("results")


class RoundsType(click.ParamType[Any]):
    """A number of rounds from 1 on, or `auto`."""

    name = "N|auto"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | Literal["auto"]:
        """`"7"` as 7, `"auto"` as it is."""
        if value == "auto":
            return "auto"
        try:
            rounds = int(value)
        except ValueError:
            rounds = 0
        if rounds < 1:
            self.fail(f"{value!r} is neither a number of rounds from 1 on nor auto", param, ctx)
        return rounds


class NewFolderType(click.Path):
    """A folder by its name; the empty name is refused, for `Path("")` is the working directory."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        """As click's."""
        if not os.fspath(value):
            self.fail("the name is empty; expected a folder", param, ctx)
        return super().convert(value, param, ctx)


def measuring_options(rounds: int | Literal["auto"]) -> Decorator[Any]:
    """The options both commands have; `rounds` is the default of `-r`."""
    options = (
        *INPUT_OPTIONS,
        click.option(
            "-r",
            "--rounds",
            type=RoundsType(),
            default=rounds,
            show_default=True,
            help="Measured rounds, after the warm-ups; auto: as many as the intervals need.",
        ),
        click.option(
            "--max-time",
            "max_time_s",
            type=click.FloatRange(min=0, min_open=True),
            metavar="SECONDS",
            help="With -r auto, begin no round that would end later; default 75.",
        ),
        click.option(
            "-o",
            "--output-dir",
            type=NewFolderType(path_type=Path),
            help="Results folder; default: a new one in results/.",
        ),
        click.option(
            "--format",
            "format_name",
            type=click.Choice(FORMAT_NAMES),
            default="text",
            show_default=True,
            help="How to write the table.",
        ),
        check_option(
            "Watch every round with tags, order, conservation, or all; off: not even the tags of "
            "the first warm-up."
        ),
        *PLANNING_OPTIONS,
    )

    return with_options(options)


def measure(
    workload_name: str,
    axes: Sequence[str],
    *,
    rounds: int | Literal["auto"],
    max_time_s: float | None,
    output_dir: Path | None,
    format_name: str,
    checks: str | None,
    resume: bool,
    dry_run: bool,
    fail_fast: bool,
    metadata: Sequence[str],
    record: Path | None = None,
    **input_options: Any,
) -> int:
    """Run all cells, print the table, return the exit code (1 if an answer or a row was wrong)."""
    from bench.matrix import NOTHING_KEPT, Cell, Matrix
    from bench.recording import recorded_rounds
    from bench.spec import parse_axes, resolve_cells

    auto, num_rounds = _plan(rounds, max_time_s)
    parsed_axes = parse_axes(axes)
    if checks is not None:
        input_options["settings"] = (*input_options["settings"], f"checks={checks}")
    profile, workload, flags = load_input(workload_name, **input_options)
    resolved = resolve_cells(profile, workload, flags, parsed_axes)
    cells = [
        Cell(index, _shown(values, cell), cell) for index, (values, cell) in enumerate(resolved)
    ]
    shown_rounds = _num(num_rounds, "round") + " or more" * (auto is not None)
    notes = parse_metadata(metadata)
    if output_dir is not None and not resume:
        refuse_used(output_dir)
    if resume:
        cells = with_stored_pools(cells, output_dir)
    kept = kept_of(output_dir, cells, num_rounds, notes) if resume else NOTHING_KEPT
    if dry_run:
        show_plan(cells, num_rounds, kept, RESULTS)
        return 0
    cells, sizings = with_pools(cells)
    folder = output_dir or _new_folder(workload.name, cells[0].resolved.profile_name)
    num_left = num_rounds_left(cells, num_rounds, kept)
    stored_axes = {name: list(values) for name, values in parsed_axes.items()}
    with (
        Progress(sys.stderr, None if auto else num_left) as progress,
        recorded_rounds(record) as make_round,
        Matrix(
            cells,
            rounds=num_rounds,
            axes=stored_axes,
            progress=progress,
            auto=auto,
            make_round=make_round,
            metadata=notes,
            kept=kept,
            fail_fast=fail_fast,
            tag_warmup=checks != OFF,
            sizings=sizings,
            notes=what_auto_is(cells, sizings),
        ) as matrix,
        open_writer(folder, resume=resume) as writer,
    ):
        _say(f"{workload.name}: {_num(len(cells), 'cell')}, {shown_rounds} -> {folder}")
        if resume:
            _say(f"resumed: {num_left} of {len(cells) * num_rounds} rounds are left")
        matrix.run(writer)
    return _report(folder, format_name)


def _plan(rounds: int | Literal["auto"], max_time_s: float | None) -> tuple[Auto | None, int]:
    """What ends the run, and the rounds it has at least."""
    from bench.rounds import DEFAULT_ROUNDS, Auto
    from deepinfer.errors import UserError

    if rounds == "auto":
        return (Auto() if max_time_s is None else Auto(max_time_s=max_time_s)), DEFAULT_ROUNDS
    if max_time_s is not None:
        raise UserError(
            f"--max-time {max_time_s:g} with -r {rounds}: expected -r auto",
            hint="a fixed number of rounds ends when they are done",
        )
    return None, rounds


def _report(folder: Path, format_name: str) -> int:
    from bench.commands.frame import EXIT_FAILED, EXIT_INTERRUPTED
    from bench.report import build_table, write_report
    from bench.samples import read_samples

    samples = read_samples(folder)
    table = build_table(samples)
    write_report(table, format_name)
    if samples.end is not None and samples.end.status != "complete":
        _say(f"{samples.end.status}; what was measured is in {folder}, --resume carries it on")
        return EXIT_FAILED if samples.end.status == "stopped" else EXIT_INTERRUPTED
    has_failed = any(samples.failure_of(cell.cell) for cell in samples.cells)
    is_wrong = table.num_wrong_requests or table.num_findings
    return EXIT_FAILED if has_failed or is_wrong or table.nothing_completed else 0


def _shown(values: dict[str, Any], cell: Resolved) -> dict[str, Any]:
    """A cell's axes; the two choices the tool is about are always among them."""
    return {"release": cell.engine.release, "free_order": cell.engine.free_order, **values}


def _new_folder(workload: str, profile: str) -> Path:
    """`results/WORKLOAD-PROFILE-TIME`, a name nobody has."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = RESULTS / f"{workload}-{profile}-{stamp}"
    number = 2
    while folder.exists():
        folder = RESULTS / f"{workload}-{profile}-{stamp}-{number}"
        number += 1
    return folder


def _num(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
