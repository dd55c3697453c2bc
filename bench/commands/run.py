"""`run`: one workload, one cell. See `bench.commands.measuring`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bench.commands.completion import complete_file, complete_names, complete_workload
from bench.commands.measuring import measure, measuring_options
from deepinfer.errors import UserError


@click.command("run")
@click.argument("workload", shell_complete=complete_workload)
@click.option(
    "--release",
    help="Release policy; see `list policies`.",
    shell_complete=complete_names("release"),
)
@click.option(
    "--free-order",
    help="Free order; see `list policies`.",
    shell_complete=complete_names("free_order"),
)
@measuring_options(rounds=1)
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the operation log of the first measured round, for `replay`.",
    shell_complete=complete_file,
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    workload: str,
    release: str | None,
    free_order: str | None,
    record: Path | None,
    **options: Any,
) -> None:
    """Run WORKLOAD (a name of `list workloads`, or a YAML file) and print its table.

    Exit code 1 if any answer was wrong, or a checker found something.
    """
    given = {"release": release, "free_order": free_order}
    shorthands = tuple(f"{name}={value}" for name, value in given.items() if value is not None)
    options["settings"] = (*options["settings"], *shorthands)
    if record is not None and options["resume"]:
        raise UserError(
            "--record with --resume: the first round may have been run already",
            hint="record a run of its own",
        )
    ctx.exit(measure(workload, (), record=record, **options))
