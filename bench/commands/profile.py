"""`profile`: what single parts of the engine cost, one subcommand each.

Knows the command line and how such figures are printed; `bench.probes` measures them. Invariant:
every format has the same figures, and one without a yardstick is empty, never 0.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from bench.probes.host import HostProfile, HostRow

KEYS = ("name", "value", "unit", "yardstick_value", "ratio")


@click.group("profile")
def command() -> None:
    """Measure single parts of the engine."""


@command.command("host", short_help="Block manager, scheduler and release queue.")
@click.option(
    "--format",
    "format_name",
    type=click.Choice(("text", "md", "csv", "json")),
    default="text",
    show_default=True,
    help="How to write the figures.",
)
@click.option("--quick", is_flag=True, help="Fewer rounds: a few seconds, wider intervals.")
def host(format_name: str, quick: bool) -> None:
    """Measure the host's bookkeeping beside a plain deque-and-list pool, in the same run.

    Needs no device and runs no model: block ids only. Times are CPU time of one thread.
    """
    from bench.probes.host import profile_host

    profile = profile_host(quick=quick, on_probe=_show_progress)
    if sys.stderr.isatty():
        click.echo("\r\033[K", nl=False, err=True)
    renderers = {"text": _text, "md": _markdown, "csv": _csv, "json": _json}
    click.echo(renderers[format_name](profile), nl=False)


def _show_progress(name: str) -> None:
    """The row being measured, on a line of its own that the next one overwrites."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[Kmeasuring {name}", nl=False, err=True)


def _cells(profile: HostProfile, row: HostRow) -> list[str]:
    targets = {target.name: target for target in profile.targets}
    target = targets.get(f"{row.name} / yardstick")
    return [
        row.name,
        f"{row.value:.1f}",
        row.unit,
        "-" if row.yardstick_value is None else f"{row.yardstick_value:.1f}",
        "-" if row.ratio is None else f"{row.ratio:.2f}",
        "-" if row.interval is None else f"{row.interval.low:.2f} to {row.interval.high:.2f}",
        "" if target is None else f"<= {target.at_most:g} {'met' if target.met else 'MISSED'}",
    ]


HEADERS = ("name", "value", "unit", "yardstick", "ratio", "95 % interval", "target")


def _grid(profile: HostProfile, style: str) -> str:
    from tabulate import tabulate

    return tabulate(
        [_cells(profile, row) for row in profile.rows],
        headers=HEADERS,
        tablefmt=style,
        disable_numparse=True,
        colalign=("left", "right", "left", "right", "right", "left", "left"),
    )


def _remarks(profile: HostProfile) -> list[str]:
    """Sentences a reader of the figures needs."""
    from bench.probes.host import NUM_BLOCKS

    scaling = profile.targets[-1]
    met = "met" if scaling.met else "MISSED"
    remarks = [
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
    ]
    reasons: dict[str, list[str]] = {}
    for name, reason in profile.undefined.items():
        reasons.setdefault(reason, []).append(name)
    return remarks + [f"no yardstick: {', '.join(names)}: {why}" for why, names in reasons.items()]


def _text(profile: HostProfile) -> str:
    import textwrap

    lines = [_grid(profile, "simple"), ""]
    for remark in _remarks(profile):
        lines += textwrap.wrap(remark, 100, subsequent_indent="    ")
    return "\n".join(line.rstrip() for line in "\n".join(lines).split("\n")) + "\n"


def _markdown(profile: HostProfile) -> str:
    remarks = "\n".join(f"- {remark}" for remark in _remarks(profile)).replace("*", r"\*")
    return f"{_grid(profile, 'github')}\n\n{remarks}\n"


def _csv(profile: HostProfile) -> str:
    import csv
    import io

    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(KEYS)
    writer.writerows([getattr(row, key) for key in KEYS] for row in profile.rows)
    return out.getvalue()


def _json(profile: HostProfile) -> str:
    """Rows of `KEYS`; beside them why a yardstick is null, intervals, targets and remarks."""
    import json

    document = {
        "rows": [{key: getattr(row, key) for key in KEYS} for row in profile.rows],
        "undefined": profile.undefined,
        "intervals": {
            row.name: [row.interval.low, row.interval.high] for row in profile.rows if row.interval
        },
        "targets": [
            {"name": t.name, "at_most": t.at_most, "ratio": t.ratio, "met": t.met}
            for t in profile.targets
        ],
        "notes": _remarks(profile),
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
