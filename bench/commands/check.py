"""`check`: tests of the instrument itself: its proof of answers, its verdicts, what it costs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from bench.commands.conformance import conformance
from bench.commands.explore import explore
from bench.commands.faults import faults
from bench.commands.pools import with_pool

if TYPE_CHECKING:
    from bench.instrument import Trials

REQUIRED = 0.99  # of the planted faults must be flagged


@click.group("check", invoke_without_command=True, no_args_is_help=True)
@click.option("--faults", "check_faults", is_flag=True, help="The same as `check faults`.")
@click.pass_context
def command(ctx: click.Context, check_faults: bool) -> None:
    """Check the instrument: are faults noticed, are verdicts right, does watching cost little?"""
    if check_faults and ctx.invoked_subcommand is None:
        ctx.invoke(faults)
    elif check_faults:
        raise click.UsageError("--faults stands alone; for its options: check faults", ctx)


command.add_command(conformance)
command.add_command(explore)
command.add_command(faults)


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


@command.command("instrument")
@click.option("--quick", is_flag=True, help="Two comparisons on the engine instead of twenty.")
@click.option("--profile", default="cpu-tiny", show_default=True, help="Of the engine's part.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--trials", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--format", "format_name", type=click.Choice(("text", "json")), default="text")
@click.pass_context
def instrument(
    ctx: click.Context, quick: bool, profile: str, seed: int, trials: int, format_name: str
) -> None:
    """Compare a cell with itself, and with one slowed by 5 %, and count the verdicts.

    TRIALS times each on a target that is told its times, twenty times on the engine (the slowed one
    once). Exit code 1 if more than 5 % of the equal cells are called FASTER or SLOWER, fewer than
    90 % of the slowed ones SLOWER, or fewer than 93 % of their intervals cover the true ratio.
    """
    import dataclasses
    import json

    from bench.catalog import find_profile, find_workload
    from bench.instrument import check_engine, check_fake
    from bench.spec import Flags, load_profile, load_workload, resolve

    workload = load_workload(find_workload("fork-batch"))
    resolved = resolve(load_profile(find_profile(profile)), workload, Flags(seed=seed))
    rows = check_fake(trials, seed)
    rows += check_engine(with_pool(resolved), 2 if quick else 20, _say)
    if format_name == "json":
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows], allow_nan=False))
    else:
        _print_trials(rows)
    ctx.exit(0 if all(row.passed for row in rows) else 1)


@command.command("observer")
@click.option("--profile", default="cpu-small", show_default=True, help="Name or file.")
@click.option("--device", help="cpu, cpu-stepped or cuda; default: the profile's.")
@click.option("-r", "--rounds", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--format", "format_name", type=click.Choice(("text", "json")), default="text")
@click.pass_context
def observer(
    ctx: click.Context, profile: str, device: str | None, rounds: int, format_name: str
) -> None:
    """Measure what step records, counters and NVML sampling cost a step of a batch of 16.

    Exit code 1 if it is more than 1 % of the step's time.
    """
    import dataclasses
    import json

    from bench.arrivals import build_requests
    from bench.catalog import find_profile
    from bench.observer import LIMIT, measure_observer, observer_workload
    from bench.runner import Target
    from bench.spec import Flags, load_profile, resolve

    resolved = with_pool(
        resolve(load_profile(find_profile(profile)), observer_workload(), Flags(device=device))
    )
    requests = build_requests(resolved.workload, resolved.seed, resolved.model.vocab_size, 0)
    target = Target(resolved)
    try:
        cost = measure_observer(resolved, target, requests, rounds, _say)
    finally:
        target.close()
    if format_name == "json":
        entry = {**dataclasses.asdict(cost), "total": cost.total, "limit": LIMIT}
        click.echo(json.dumps(entry, allow_nan=False))
    else:
        low, high = cost.records_interval.low, cost.records_interval.high
        click.echo(f"a step of the batch: {cost.step_us / 1e3:.3g} ms, {cost.num_pairs} pairs\n")
        click.echo(f"  records      {cost.records:8.3%}  [{low:.3%}, {high:.3%}]")
        click.echo(f"  NVML         {cost.nvml:8.3%}")
        click.echo(f"  clock reads  {cost.clock_reads:8.3%}")
        click.echo(f"  all          {cost.total:8.3%}  of a step's time, at most {LIMIT:.0%}")
    ctx.exit(0 if cost.total <= LIMIT else 1)


def _print_trials(rows: Sequence[Trials]) -> None:
    from tabulate import tabulate

    words = list(rows[0].verdicts)
    headers = ["", "trials", *words, "covers %", "mean ratio", "true", "rounds"]
    body = [
        (
            row.name,
            row.num_trials,
            *row.verdicts.values(),
            f"{100 * row.coverage:.1f}",
            f"{row.mean_ratio:.4f}",
            f"{row.true_ratio:.4f}",
            f"{row.mean_rounds:.1f}",
        )
        for row in rows
    ]
    click.echo(tabulate(body, headers, disable_numparse=True) + "\n")
    for row in rows:
        for bound in row.bounds:
            asked = f"at {'most' if bound.is_most else 'least'} {100 * bound.limit:g} %"
            mark = "ok    " if bound.is_met else "FAILED"
            click.echo(f"{mark}  {row.name}: {bound.what} in {100 * bound.share:.1f} %, {asked}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
