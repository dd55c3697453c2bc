"""`profile`: what single parts of the engine cost, one subcommand each.

Knows the command line and what a reader must be told of each profile's figures; `bench.probes`
measures them and `sheet` writes them. Invariant: every format has the same figures, and one without
a value is empty, never 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from bench.commands.profile_common import format_option, print_sheet, show_progress
from bench.commands.profile_workload import memory, step, trace
from bench.commands.sheet import Sheet, figure, undefined_remarks
from deepinfer.names import DEVICES

if TYPE_CHECKING:
    from bench.probes.events import EventProfile, EventRow
    from bench.probes.host import HostProfile, HostRow

KEYS = ("name", "value", "unit", "yardstick_value", "ratio")
EVENT_KEYS = (
    *("device", "name", "num_threads", "num_blocks", "value", "p99", "mean", "harness", "unit"),
    *("num_calls", "verdict"),
)

_quick_option = click.option(
    "--quick", is_flag=True, help="Fewer rounds: a few seconds, rougher figures."
)


@click.group("profile")
def command() -> None:
    """Measure single parts of the engine."""


for _subcommand in (step, memory, trace):
    command.add_command(_subcommand)


@command.command("host", short_help="Block manager, scheduler and release queue.")
@format_option
@_quick_option
def host(format_name: str, quick: bool) -> None:
    """Measure the host's bookkeeping beside a plain deque-and-list pool, in the same run.

    Needs no device and runs no model: block ids only. Times are CPU time of one thread.
    """
    from bench.probes.host import profile_host

    print_sheet(_host_sheet, profile_host(quick=quick, on_probe=show_progress), format_name)


@command.command("events", short_help="What event synchronisation costs.")
@click.option(
    "--device",
    "devices",
    type=click.Choice(DEVICES),
    multiple=True,
    help="Where to measure; may be repeated.  [default: every device this machine has]",
)
@format_option
@_quick_option
def events(devices: tuple[str, ...], format_name: str, quick: bool) -> None:
    """Measure record, query, synchronize and the other event calls, and one event per step against
    one per block.

    Runs no model. The harness's own cost is measured beside each row, subtracted, and shown.
    """
    from bench.probes.events import profile_events

    profile = profile_events(devices or None, quick=quick, on_probe=show_progress)
    print_sheet(_events_sheet, profile, format_name)


# -- host ----------------------------------------------------------------------------------------


def _host_sheet(profile: HostProfile) -> Sheet:
    return Sheet(
        headers=("name", "value", "unit", "yardstick", "ratio", "98 % interval", "target"),
        cells=[_host_cells(profile, row) for row in profile.rows],
        align=("left", "right", "left", "right", "right", "left", "left"),
        remarks=_host_remarks(profile),
        keys=KEYS,
        records=[{key: getattr(row, key) for key in KEYS} for row in profile.rows],
        facts={
            "undefined": profile.undefined,
            "intervals": {
                row.name: [row.interval.low, row.interval.high]
                for row in profile.rows
                if row.interval
            },
            "targets": [
                {"name": t.name, "at_most": t.at_most, "ratio": t.ratio, "met": t.met}
                for t in profile.targets
            ],
        },
    )


def _host_cells(profile: HostProfile, row: HostRow) -> list[str]:
    targets = {target.name: target for target in profile.targets}
    target = targets.get(f"{row.name} / yardstick")
    return [
        row.name,
        figure(row.value, 1),
        row.unit,
        figure(row.yardstick_value, 1),
        figure(row.ratio, 2),
        "-" if row.interval is None else f"{row.interval.low:.2f} to {row.interval.high:.2f}",
        "" if target is None else f"<= {target.at_most:g} {'met' if target.met else 'MISSED'}",
    ]


def _host_remarks(profile: HostProfile) -> list[str]:
    from bench.probes.host import NUM_BLOCKS

    scaling = profile.targets[-1]
    met = "met" if scaling.met else "MISSED"
    return [
        f"schedule_commit: 4096 costs {scaling.ratio:.1f} times 256 "
        f"(target <= {scaling.at_most:g}: {met})",
        "yardstick: a pool of a deque and lists in plain Python; rounds alternate with ours; for "
        "schedule_commit_* it is the yardstick's decode_like_step",
        f"medians of {profile.num_rounds} rounds, CPU time of one thread, garbage collector off; "
        f"ratio: median of the rounds' ratios; pools of {NUM_BLOCKS} blocks, first in first out, "
        "in shuffled order",
        "schedule_commit_*: pure decode, prompts of 1024 tokens, block_size 128, the median step; "
        "*_growing: prompts of about 1024, 1 in 128 requests grows in each step, the mean step",
        "decode_like_step: 256 running, 16 grow by a block, one of 64 ends, one of 48 enters",
        *undefined_remarks(profile.undefined, "no yardstick"),
    ]


# -- events --------------------------------------------------------------------------------------


def _events_sheet(profile: EventProfile) -> Sheet:
    return Sheet(
        headers=(
            *("device", "call", "threads", "blocks", "median", "p99", "mean", "harness", "unit"),
            *("calls", "wait"),
        ),
        cells=[_event_cells(row) for row in profile.rows],
        align=("left", "left", *["right"] * 6, "left", "right", "left"),
        remarks=_event_remarks(profile),
        keys=EVENT_KEYS,
        records=[{key: getattr(row, key) for key in EVENT_KEYS} for row in profile.rows],
        facts={"undefined": profile.undefined},
    )


def _event_cells(row: EventRow) -> list[str]:
    return [
        row.device,
        row.name,
        str(row.num_threads),
        "" if row.num_blocks is None else str(row.num_blocks),
        *(figure(value, 2) for value in (row.value, row.p99, row.mean, row.harness)),
        row.unit,
        str(row.num_calls),
        row.verdict,
    ]


def _event_remarks(profile: EventProfile) -> list[str]:
    """How to read the figures, and the answer to the question of the last rows."""
    rows = {(row.device, row.name, row.num_blocks): row.value for row in profile.rows}
    ratios = [
        f"{device} {name.removesuffix('_event_per_block')} {per_block / per_step:.0f} times"
        for (device, name, num_blocks), per_block in rows.items()
        if num_blocks == 1000 and name.endswith("_event_per_block") and per_block
        if (per_step := rows[device, name.replace("per_block", "per_step"), num_blocks])
    ]
    answer = f"1000 blocks, an event per block against one per step: {', '.join(ratios)}"
    return [
        f"wall time of the host in microseconds, each call by itself, {profile.num_rounds} rounds "
        "(a fifth of them for 2 threads and more) after one that warms up, garbage collector off",
        "harness: the median of the same loop around nothing, run in turns with the call and "
        "already subtracted; the mean has the empty loop's mean subtracted",
        "median: an undisturbed call; on several threads the wait for Python's interpreter, and "
        "for CUDA's driver, is in the mean (wall time of a thread by its calls) and the p99",
        "each host thread has a device of its own: on cuda a stream and an event pool per thread "
        "on one context, on the CPU devices nothing in common but the interpreter",
        "create: a new event, which on cuda the driver makes at its first record: "
        "create_and_record; reuse: take one from the pool and give it back",
        "synchronize_waiting: submit an operation, record, wait, less the operation's own time on "
        "the device; wait_cpu_share: CPU time of the process during a long wait",
        "*_event_per_*: one step gives up so many blocks behind one event, or one for each block, "
        "through the release queue, the device being done",
        *([answer] if ratios else []),
        *undefined_remarks(profile.undefined, "no figure"),
    ]
