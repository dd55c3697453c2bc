"""`check explore`: small engines under every order of events, and random ones for as long as asked.

Knows the command line and how rows are printed; `deepinfer.testing` explores. Invariant: exit code
0 means that every policy did what is expected of it, also the unsafe one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepinfer.errors import UserError, check_name
from deepinfer.names import RELEASE_POLICIES

if TYPE_CHECKING:
    from deepinfer.testing.explorer.runs import Outcome, Setup
    from deepinfer.testing.explorer.survey import Row
    from deepinfer.testing.explorer.walk import Tally

SECONDS = 60.0
UNASKED = "explorations"  # the folder of failures that nobody expected
ALIGN = ("left", "left", "left", *["right"] * 4, "left")


@click.command("explore")
@click.option("--scenario", "scenarios", multiple=True, help="Only this one; repeatable.")
@click.option("--release", "releases", multiple=True, help="Only this policy; repeatable.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help=f"Time for all of it; default {SECONDS:g}, with --operations as long as it takes.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=300,
    show_default=True,
    help="Most interleavings of one engine run in order; half as many random ones follow.",
)
@click.option(
    "--operations",
    type=click.IntRange(min=1),
    help="Instead: random calls on random engines under the safe policies, that many in all.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of the engines and calls of --operations.",
)
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes.")
@click.option(
    "--save",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the shortest run of each row that goes wrong, as JSON for `replay`; without "
    f"it, runs that should not have gone wrong are kept in {UNASKED}.",
)
@click.option("--format", "format_name", type=click.Choice(("text", "json")), default="text")
@click.pass_context
def explore(
    ctx: click.Context,
    scenarios: tuple[str, ...],
    releases: tuple[str, ...],
    seconds: float | None,
    limit: int,
    operations: int | None,
    seed: int,
    jobs: int,
    save: Path | None,
    format_name: str,
) -> None:
    """Run small engines under every order of events, and look for rows read by the wrong hands.

    Each scenario is run under all release policies, free orders and disciplines, on separate
    streams and, if something races with the engine, on one. Exit code 1 if a safe policy went
    wrong, or `early` did not where transfers race with the engine.
    """
    from deepinfer.testing.explorer.scenarios import SCENARIOS

    for name in scenarios:
        check_name("scenario", name, SCENARIOS)
    for name in releases:
        check_name("release", name, RELEASE_POLICIES)
    if operations is not None and scenarios:
        raise click.UsageError("--operations makes its own engines and calls: no --scenario")
    if save is not None:
        _make(save)
    if operations is not None:
        passed = _walk(operations, seed, releases, seconds, save, format_name)
    else:
        chosen = scenarios or tuple(SCENARIOS)
        policies = releases or RELEASE_POLICIES
        passed = _survey(chosen, policies, limit, seconds or SECONDS, jobs, save, format_name)
    ctx.exit(0 if passed else 1)


# -- scenarios -----------------------------------------------------------------------------------


def _survey(
    scenarios: Sequence[str],
    releases: Sequence[str],
    limit: int,
    seconds: float,
    jobs: int,
    save: Path | None,
    format_name: str,
) -> bool:
    from deepinfer.testing.explorer.survey import survey

    start = time.perf_counter()
    rows = survey(scenarios, releases, limit, seconds=seconds, jobs=jobs, tell=_say)
    took = time.perf_counter() - start
    if format_name == "json":
        entries = [_entry(row) for row in rows]
        click.echo(json.dumps({"seconds": took, "rows": entries}, allow_nan=False))
    else:
        for line in _lines(rows, took):
            click.echo(line)
    for row in rows:
        if row.example is not None and (save is not None or not row.as_expected):
            name = f"{row.scenario}-{row.release}-{row.streams}"
            _keep(save or Path(UNASKED), name, *row.example)
    return all(row.as_expected for row in rows)


def _lines(rows: Sequence[Row], took: float) -> Iterator[str]:
    from tabulate import tabulate

    headers = ["scenario", "streams", "policy", "runs", "corrupt", "wrong rows", "hazards", ""]
    body = [
        (
            row.scenario,
            row.streams,
            row.release,
            row.num_runs,
            row.num_corrupt,
            row.wrong_rows,
            f"{row.num_hazardous} of {row.num_checked}",
            _remark(row),
        )
        for row in rows
    ]
    yield tabulate(body, headers, disable_numparse=True, colalign=ALIGN)
    yield ""
    yield "runs       interleavings that differ in what somebody saw, over all orders of a row"
    yield "corrupt    of these, runs in which a wrong row was read or a wrong token given"
    yield "hazards    of the runs with the order checker on, those in which it found something"
    yield "complete   these are all interleavings there are; else the first ones and random ones"
    yield ""
    num_runs, redundant = sum(row.num_runs for row in rows), sum(row.num_redundant for row in rows)
    yield f"{num_runs} interleavings in {took:.1f} s: {num_runs / took:.0f} a second"
    yield f"{redundant} more were given up halfway, because they could only repeat others"
    wrong = [row for row in rows if not row.as_expected]
    for row in wrong:
        where = f"{row.scenario}, {row.streams} streams, {row.release}"
        yield f"NOT AS EXPECTED: {where}: {_why(row)}"
    if not wrong:
        yield "as expected: corrupt where early meets a transfer on a stream of its own, only there"


def _remark(row: Row) -> str:
    extent = "complete"
    if not row.complete:
        extent = f"bounded: {row.num_complete} of {row.num_cells} orders complete"
        extent += f", {row.num_random} random" if row.num_random else ""
    return extent if row.as_expected else f"{extent}; NOT AS EXPECTED"


def _why(row: Row) -> str:
    if row.must_corrupt and not row.num_runs:
        return "no time was left for it"
    if row.must_corrupt:
        return "no run went wrong, and some must"
    assert row.example is not None
    return _first_line(row.example[1])


def _entry(row: Row) -> dict[str, Any]:
    numbers = {name: getattr(row, name) for name in row.__slots__ if name != "example"}
    return {**numbers, "complete": row.complete, "as_expected": row.as_expected}


# -- random walks --------------------------------------------------------------------------------


def _walk(
    operations: int,
    seed: int,
    releases: Sequence[str],
    seconds: float | None,
    save: Path | None,
    format_name: str,
) -> bool:
    from deepinfer.testing.explorer.walk import SAFE, tally

    start = time.perf_counter()
    tallies, failed = tally(operations, seed, releases or SAFE, seconds=seconds, tell=_say)
    took = time.perf_counter() - start
    if format_name == "json":
        entries = [{name: getattr(one, name) for name in one.__slots__} for one in tallies]
        click.echo(json.dumps({"seconds": took, "policies": entries}, allow_nan=False))
    else:
        _print_tallies(tallies, took)
    for walk in failed:
        name = f"walk-{walk.seed}-{walk.setup.config.release}"
        _keep(save or Path(UNASKED), name, walk.setup, walk.outcome)
    return not failed


def _print_tallies(tallies: Sequence[Tally], took: float) -> None:
    from tabulate import tabulate

    headers = ["policy", "engines", "calls", "device operations", "alarms", "wrong rows", "failed"]
    body = [
        (
            one.release,
            one.num_walks,
            one.num_actions,
            one.num_ops,
            one.num_alarms,
            one.wrong_rows,
            one.num_failed,
        )
        for one in tallies
    ]
    click.echo(tabulate(body, headers, disable_numparse=True, colalign=("left", *["right"] * 6)))
    done = sum(one.num_actions + one.num_ops for one in tallies)
    alarms = sum(one.num_alarms for one in tallies)
    click.echo(f"\n{done} operations in {took:.1f} s: {done / took:.0f} a second, {alarms} alarms")


# -- both ----------------------------------------------------------------------------------------


def _make(folder: Path) -> None:
    """Make the folder now, not after an hour of exploring."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--save {folder}: cannot make the folder: {error.strerror}") from error


def _keep(folder: Path, name: str, setup: Setup, outcome: Outcome) -> None:
    """Shrink a run that went wrong, with the order checker on, and write it down."""
    from dataclasses import replace

    from deepinfer.testing.explorer.recording import write_file
    from deepinfer.testing.explorer.shrink import shrink

    config = setup.config
    if config.checks == "off":
        setup = replace(setup, config=replace(config, checks="order"))
    shortest = shrink(setup, outcome)
    path = folder / f"{name}.json"
    write_file(path, f"{name}: {_first_line(shortest)}", setup, shortest)
    _say(f"{path}: {len(shortest.performed)} actions: {_first_line(shortest)}")


def _first_line(outcome: Outcome) -> str:
    said = [*outcome.problems, *outcome.findings]
    counts = f"{outcome.wrong_rows} wrong rows, {outcome.wrong_tokens} wrong tokens"
    return f"{counts}; {said[0]}" if said else counts


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
