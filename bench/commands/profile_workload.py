"""`profile step`, `memory` and `trace`: what a workload does to time, memory and blocks.

Knows the command line and what a reader must be told of each profile's figures; `bench.probes`
measures them. Invariant: a run whose answers were wrong says so and ends with exit code 1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench.commands.checking import check_option
from bench.commands.inputs import INPUT_OPTIONS, resolve_input, with_options
from bench.commands.profile_checks import profile_check_costs
from bench.commands.profile_common import (
    clear_progress,
    format_option,
    print_sheet,
    show_progress,
)
from bench.commands.sheet import UNDEFINED, Sheet, figure, undefined_remarks

if TYPE_CHECKING:
    from bench.probes.memory import MemoryProfile, MemoryRow, MemorySample
    from bench.probes.step import PolicyFacts, StepProfile, StepRow
    from bench.spec import Resolved

STEP_KEYS = ("release", "where", "part", "mean_us", "median_us", "p99_us", "share")
MEMORY_KEYS = ("layer", "depth", "size", "gap_name", "gap")
SAMPLE_KEYS = (
    *("step", "time_s", "nvml_used", "nvml_process", "process_rss", "torch_reserved"),
    *("torch_allocated", "weights", "kv_pool", "free", "withheld", "owned", "live"),
    "num_live_tokens",
)
STATE_KEYS = ("state_pool", "states_free", "states_withheld", "states_owned")
MIB = 2**20


def _resolve(workload: str, release: str | None, options: dict[str, Any]) -> Resolved:
    if release is not None:
        options["settings"] = (*options["settings"], f"release={release}")
    return resolve_input(workload, **options)


# -- step ----------------------------------------------------------------------------------------


@click.command("step", short_help="Where one step's time goes.")
@click.argument("workload")
@click.option("--release", help="Policies to compare, as a,b.  [default: the workload's]")
@with_options(INPUT_OPTIONS)
@click.option(
    "-r",
    "--rounds",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Watched rounds of each policy, and as many that are not watched; with --check, rounds "
    "with each checker and without.",
)
@check_option("Measure instead what tags, order, conservation, or all of them cost a step.")
@format_option
@click.pass_context
def step(
    ctx: click.Context,
    /,
    workload: str,
    release: str | None,
    rounds: int,
    checks: str | None,
    format_name: str,
    **options: Any,
) -> None:
    """Where the time of WORKLOAD's steps goes, on the host and on the device, per release policy.

    Exit code 1 if any answer was wrong, or a checker found something.
    """
    from bench.probes.step import profile_steps
    from bench.spec import parse_axes

    names = parse_axes([f"release={release}"])["release"] if release is not None else None
    if checks is not None:
        resolved = _resolve(workload, release, options)
        ctx.exit(profile_check_costs(resolved, checks, rounds, format_name))
    resolved = resolve_input(workload, **options)
    profile = profile_steps(
        resolved,
        names or (resolved.engine.release,),
        num_rounds=rounds,
        on_probe=show_progress,
    )
    print_sheet(_step_sheet, profile, format_name)
    ctx.exit(int(any(policy.num_wrong for policy in profile.policies)))


def _step_sheet(profile: StepProfile) -> Sheet:
    policies = profile.policies
    by_place: dict[tuple[str, str], list[StepRow]] = {}
    for row in profile.rows:
        by_place.setdefault((row.where, row.part), []).append(row)
    single = len(policies) == 1
    heads = [f"{policy.release}{' UNSAFE' if policy.unsafe else ''}" for policy in policies]
    return Sheet(
        headers=("where", "part", *(["mean us", "median", "p99", "share"] if single else heads)),
        cells=[
            (*place, *(_single_cells(rows[0]) if single else map(_mean_and_share, rows)))
            for place, rows in by_place.items()
        ],
        align=("left", "left", *["right"] * (4 if single else len(policies))),
        remarks=_step_remarks(profile),
        keys=STEP_KEYS,
        records=[asdict(row) for row in profile.rows],
        facts={
            "policies": [asdict(policy) for policy in policies],
            "gaps": [asdict(gap) for gap in profile.gaps],
            "device": profile.device,
        },
    )


def _single_cells(row: StepRow) -> list[str]:
    figures = (figure(value, 1) for value in (row.mean_us, row.median_us, row.p99_us))
    return [*figures, f"{row.share:.1%}"]


def _mean_and_share(row: StepRow) -> str:
    return f"{row.mean_us:.1f} ({row.share:.1%})"


def _step_remarks(profile: StepProfile) -> list[str]:
    means = "" if len(profile.policies) == 1 else "means and their share of the step's time; "
    return [
        *map(_policy_remark, profile.policies),
        *(_gap_remark(profile, policy.release) for policy in profile.policies),
        f"us per step, {means}device {profile.device}, {profile.num_rounds} watched rounds",
        "host parts add up to the step, planning to commit; device parts run beside them, and idle "
        "is the time of the step in which no operation ran",
        "staging: copies to the device, on the host where the host makes them (inside submit), on "
        "the device where its own thread does; launch: submit without them",
        "wait: the release policy's; result_wait: until the tokens were there; caller: between "
        "submit and collect, the caller's own",
        *profile.notes,
    ]


def _gap_remark(profile: StepProfile, release: str) -> str:
    """The device's waits for the host, without overlap and with it."""
    gaps = [
        f"overlap {gap.overlap} {figure(gap.median_us, 1)} us, "
        f"{figure(gap.median_percent, 2)} % of the step "
        f"(median; {figure(gap.percent, 2)} % of all the time)"
        for gap in profile.gaps
        if gap.release == release
    ]
    return f"{release}: host gap between steps, not watched: {'; '.join(gaps)}"


def _policy_remark(policy: PolicyFacts) -> str:
    observer = "observer cost unknown: no round had two steps"
    if (ratio := policy.observer) is not None:
        low_high = ratio.interval
        interval = (
            "one round has no interval"
            if low_high is None
            else f"{low_high.low:.3f} to {low_high.high:.3f}, {ratio.confidence:.0%} confidence"
        )
        observer = f"watched steps take {ratio.center:.3f} times the others' time ({interval})"
    wrong = f"; {policy.num_wrong} WRONG requests" if policy.num_wrong else ""
    clock = f"device clock to {policy.clock_error_us:.1f} us, drift {policy.drift_us:.1f} us"
    unsafe = " UNSAFE" if policy.unsafe else ""
    return (
        f"{policy.release}{unsafe}: {policy.num_steps} steps of {policy.step_us:.1f} us; "
        f"{observer}; {clock}{wrong}"
    )


# -- memory --------------------------------------------------------------------------------------


@click.command("memory", short_help="Whose memory it is, down to live tokens.")
@click.argument("workload")
@click.option("--release", help="Release policy; see `list policies`.")
@with_options(INPUT_OPTIONS)
@click.option("--over-time", is_flag=True, help="A row for each step instead of one moment.")
@click.option(
    "--snapshot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write torch's allocator history of the run here (cuda only).",
)
@format_option
@click.pass_context
def memory(
    ctx: click.Context,
    /,
    workload: str,
    release: str | None,
    over_time: bool,
    snapshot: Path | None,
    format_name: str,
    **options: Any,
) -> None:
    """WORKLOAD's memory, from what the driver counts down to the bytes of live tokens, in MiB.

    One table of the fullest step; with --over-time, all steps. JSON has both. Exit code 1 if any
    answer was wrong.
    """
    from bench.probes.memory import profile_memory

    resolved = _resolve(workload, release, options)
    profile = profile_memory(resolved, snapshot=snapshot, on_probe=show_progress)
    sheet = functools.partial(_memory_sheet, over_time=over_time)
    print_sheet(sheet, profile, format_name)
    if snapshot is not None:
        click.echo(f"allocator history in {snapshot}; open it at pytorch.org/memory_viz", err=True)
    ctx.exit(int(profile.num_wrong > 0))


def _memory_sheet(profile: MemoryProfile, *, over_time: bool) -> Sheet:
    from bench.probes.memory import waterfall

    samples = [asdict(sample) for sample in profile.samples]
    rows = [asdict(row) for row in waterfall(profile.fullest)]
    facts = {
        "device": profile.device,
        "release": profile.release,
        "block_size": profile.block_size,
        "fullest_step": profile.fullest.step,
        "num_live_tokens": profile.fullest.num_live_tokens,
        "waterfall" if over_time else "over_time": rows if over_time else samples,
        "num_wrong": profile.num_wrong,
        "undefined": _undefined(profile),
    }
    if over_time:
        keys = (*SAMPLE_KEYS, *(STATE_KEYS if profile.fullest.state_pool is not None else ()))
        return Sheet(
            headers=[key.replace("_", " ") for key in keys],
            cells=[_sample_cells(sample, keys) for sample in profile.samples],
            align=["right"] * len(keys),
            remarks=_memory_remarks(profile),
            keys=keys,
            records=samples,
            facts=facts,
        )
    return Sheet(
        headers=("layer", "MiB", "not explained by what is inside", "MiB"),
        cells=[_layer_cells(row) for row in waterfall(profile.fullest)],
        align=("left", "right", "left", "right"),
        remarks=_memory_remarks(profile),
        keys=MEMORY_KEYS,
        records=rows,
        facts=facts,
    )


def _undefined(profile: MemoryProfile) -> dict[str, str]:
    from bench.probes.memory import undefined_layers

    return undefined_layers(profile)


def _layer_cells(row: MemoryRow) -> list[str]:
    gap = _mib(row.gap) if row.gap_name else ""
    return [". " * row.depth + row.layer, _mib(row.size), row.gap_name, gap]


def _sample_cells(sample: MemorySample, keys: Sequence[str]) -> list[str]:
    as_text = {"time_s": figure(sample.time_s, 3)}
    for key in ("step", "num_live_tokens"):
        as_text[key] = str(getattr(sample, key))
    return [as_text.get(key) or _mib(getattr(sample, key)) for key in keys]


def _mib(size: int | None) -> str:
    return UNDEFINED if size is None else f"{size / MIB:.2f}"


def _memory_remarks(profile: MemoryProfile) -> list[str]:
    fullest = profile.fullest
    return [
        f"device {profile.device}, release {profile.release}; step {fullest.step} of "
        f"{len(profile.samples)}, the first with the most live tokens: {fullest.num_live_tokens}",
        "read while the step was in flight, behind its release point; a row that several requests "
        f"share counts once; blocks of {profile.block_size} tokens",
        "torch allocated: its peak during the submit; CSV and JSON are in bytes",
        *([f"{profile.num_wrong} WRONG requests"] if profile.num_wrong else []),
        *undefined_remarks(_undefined(profile), "no figure"),
        *profile.notes,
    ]


# -- trace ---------------------------------------------------------------------------------------


@click.command("trace", short_help="A time line for Perfetto, with the ways of blocks.")
@click.argument("workload")
@click.option("--release", help="Release policy; see `list policies`.")
@with_options(INPUT_OPTIONS)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("trace.json"),
    show_default=True,
    help="The file to write.",
)
@click.option("--nvtx", is_flag=True, help="Ranges for Nsight Systems, too (extra `nvtx`).")
@click.pass_context
def trace(
    ctx: click.Context,
    /,
    workload: str,
    release: str | None,
    output: Path,
    nvtx: bool,
    **options: Any,
) -> None:
    """Run WORKLOAD once, watched, and write a Chrome trace: open it at ui.perfetto.dev.

    Exit code 1 if any answer was wrong.
    """
    from bench.probes.trace import trace_workload

    resolved = _resolve(workload, release, options)
    _check_writable(output)
    result = trace_workload(resolved, nvtx=nvtx, on_probe=show_progress)
    result.write(output)
    clear_progress()
    click.echo(
        f"{output}: {result.num_steps} steps, {result.num_flows} flows from a release to the reuse "
        f"of its blocks; device times to {result.clock_error_us:.1f} us, drift "
        f"{result.drift_us:.1f} us"
    )
    if result.num_wrong:
        click.echo(f"{result.num_wrong} WRONG requests", err=True)
    ctx.exit(int(result.num_wrong > 0))


def _check_writable(output: Path) -> None:
    """UserError now rather than after the run."""
    from deepinfer.errors import UserError

    if not output.parent.is_dir():
        raise UserError(f"-o {output}: no folder {output.parent}")
