"""What `run` and `compare` share: their options, and the way from options to a table.

Knows the command line and the order of things: everything that can be refused is refused before
the results folder is made. Invariant: one folder per run, and the table printed is computed from
the file in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bench.commands.export import FORMAT_NAMES

if TYPE_CHECKING:
    from bench.spec import Resolved

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

RESULTS = Path("results")


def measuring_options(rounds: int) -> Callable[[Decorated], Decorated]:
    """The options both commands have; `rounds` is the default of `-r`."""
    options = (
        click.option("--profile", default="cpu-small", show_default=True, help="Name or file."),
        click.option("--device", help="cpu, cpu-stepped or cuda; default: the profile's."),
        click.option("--seed", type=click.IntRange(min=0), help="Of requests and weights' order."),
        click.option(
            "-s",
            "--set",
            "settings",
            multiple=True,
            metavar="KEY=VALUE",
            help="An engine setting, as block_size=16; repeatable.",
        ),
        click.option("--trace-file", help="Your copy of the trace the workload replays."),
        click.option("--limit", type=click.IntRange(min=1), help="Requests to read of the trace."),
        click.option("--scale-lengths", type=float, help="Factor on every token count."),
        click.option("--speed", type=float, help="Divides the trace's arrival times."),
        click.option(
            "-r",
            "--rounds",
            type=click.IntRange(min=1),
            default=rounds,
            show_default=True,
            help="Measured rounds; one warm-up comes before them.",
        ),
        click.option(
            "-o",
            "--output-dir",
            type=click.Path(path_type=Path),
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
    )

    def decorate(command: Decorated) -> Decorated:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def measure(
    workload_name: str,
    axes: Sequence[str],
    *,
    profile: str,
    device: str | None,
    seed: int | None,
    settings: Sequence[str],
    trace_file: str | None,
    limit: int | None,
    scale_lengths: float | None,
    speed: float | None,
    rounds: int,
    output_dir: Path | None,
    format_name: str,
) -> int:
    """Run all cells, print the table, return the exit code (1 if an answer was wrong)."""
    from bench.catalog import find_profile, find_workload
    from bench.matrix import Cell, Matrix
    from bench.samples import SampleWriter
    from bench.spec import Flags, load_profile, load_workload, parse_axes, resolve_cells

    parsed_axes = parse_axes(axes)
    flags = Flags(
        engine=_engine_flags(settings),
        seed=seed,
        device=device,
        trace_path=trace_file,
        limit=limit,
        scale_lengths=scale_lengths,
        speed=speed,
    )
    workload = load_workload(find_workload(workload_name))
    resolved = resolve_cells(load_profile(find_profile(profile)), workload, flags, parsed_axes)
    cells = [
        Cell(index, _shown(values, cell), cell) for index, (values, cell) in enumerate(resolved)
    ]
    folder = output_dir or _new_folder(workload.name, cells[0].resolved.profile_name)
    stored_axes = {name: list(values) for name, values in parsed_axes.items()}
    with (
        Matrix(cells, rounds=rounds, axes=stored_axes, progress=_say) as matrix,
        SampleWriter(folder) as writer,
    ):
        _say(f"{workload.name}: {_num(len(cells), 'cell')}, {_num(rounds, 'round')} -> {folder}")
        complete = matrix.run(writer)
    return _report(folder, format_name, complete)


def _report(folder: Path, format_name: str, complete: bool) -> int:
    from bench.commands.frame import EXIT_FAILED, EXIT_INTERRUPTED
    from bench.report import build_table, write_report
    from bench.samples import read_samples

    table = build_table(read_samples(folder))
    write_report(table, format_name)
    if not complete:
        _say(f"interrupted; what was measured is in {folder}")
        return EXIT_INTERRUPTED
    return EXIT_FAILED if table.num_wrong_requests or table.nothing_completed else 0


def _shown(values: dict[str, Any], cell: Resolved) -> dict[str, Any]:
    """A cell's axes; the two choices the tool is about are always among them."""
    return {"release": cell.engine.release, "free_order": cell.engine.free_order, **values}


def _engine_flags(settings: Sequence[str]) -> Mapping[str, Any]:
    """`["block_size=16"]` as typed engine settings."""
    from bench.spec import parse_axes
    from deepinfer.errors import UserError

    flags = {}
    for name, values in parse_axes(settings, what="setting").items():
        if name == "device":
            raise UserError("setting device: not of the engine; expected --device")
        if len(values) != 1:
            got = ",".join(map(str, values))
            raise UserError(
                f"setting {name}: several values (got {got}); expected one",
                hint="`compare` takes several",
            )
        flags[name] = values[0]
    return flags


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
