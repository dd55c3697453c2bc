"""`check`: tests of the instrument itself."""

from __future__ import annotations

import sys

import click

REQUIRED = 0.99  # of the planted faults must be flagged


@click.group("check")
def command() -> None:
    """Check that wrong answers are noticed."""


@command.command("power")
@click.option("--profile", default="cpu-small", show_default=True, help="Name or file.")
@click.option("--device", help="cpu, cpu-stepped or cuda; default: the profile's.")
@click.option("--seed", type=click.IntRange(min=0), help="Of prompts and faults.")
@click.option("--trials", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--format", "format_name", type=click.Choice(("text", "json")), default="text")
@click.pass_context
def power(
    ctx: click.Context,
    profile: str,
    device: str | None,
    seed: int | None,
    trials: int,
    format_name: str,
) -> None:
    """Plant faults in live requests and count how many the verification flags.

    Exit code 1 if fewer than 99 % of a kind are flagged, or any clean request is.
    """
    import dataclasses
    import json

    from tabulate import tabulate

    from bench.catalog import find_profile, find_workload
    from bench.power import CLEAN, measure_power
    from bench.runner import Target
    from bench.spec import Flags, load_profile, load_workload, resolve

    workload = load_workload(find_workload("mixed-chat"))  # names the requests; they are not used
    resolved = resolve(
        load_profile(find_profile(profile)), workload, Flags(device=device, seed=seed)
    )
    target = Target(resolved)
    try:
        rows = list(measure_power(resolved, target, trials, lambda s: print(s, file=sys.stderr)))
    finally:
        target.close()
    if format_name == "json":
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows], allow_nan=False))
    else:
        headers = ["fault", "trials", "flagged", "%", "smallest dlogp", "largest dlogp"]
        body = [
            (
                row.fault,
                row.trials,
                row.flagged,
                f"{100 * row.flagged / row.trials:.1f}",
                f"{row.smallest_diff:.2g}",
                f"{row.largest_diff:.2g}",
            )
            for row in rows
        ]
        click.echo(tabulate(body, headers, disable_numparse=True))
        click.echo(
            f"\nA request is flagged for a wrong token or a log-probability more than "
            f"{resolved.verify.logprob_tolerance:g} nats from the dense reference ({profile})."
        )
    passed = all(
        row.flagged == 0 if row.fault == CLEAN else row.flagged >= REQUIRED * row.trials
        for row in rows
    )
    ctx.exit(0 if passed else 1)
