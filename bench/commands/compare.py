"""`compare`: one workload, a cell for every combination of choices, interleaved round by round."""

from __future__ import annotations

from typing import Any

import click

from bench.commands.completion import complete_names, complete_setting, complete_workload
from bench.commands.host_only import (
    DEFAULTS,
    HOST_ONLY_OPTIONS,
    SHARED,
    compare_host_only,
    refuse_misplaced,
)
from bench.commands.inputs import with_options
from bench.commands.measuring import measure, measuring_options
from deepinfer.errors import UserError


def _refuse_record(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise UserError(
            "--record: of one run, not of a comparison",
            hint="`run --record FILE`, then `replay FILE -a NAME=V1,V2` tries the others on it",
        )


@click.command("compare")
@click.argument("workload", shell_complete=complete_workload)
@click.option(
    "-a",
    "--axis",
    "axes",
    multiple=True,
    metavar="NAME=V1,V2",
    help="A choice and its values; repeatable. The first of each makes the baseline.",
    shell_complete=complete_setting(several=True),
)
@click.option(
    "--release",
    help="Short for -a release=...",
    shell_complete=complete_names("release", several=True),
)
@click.option(
    "--free-order",
    help="Short for -a free_order=...",
    shell_complete=complete_names("free_order", several=True),
)
@click.option(
    "--fork-copy",
    help="Short for -a fork_copy=...",
    shell_complete=complete_names("fork_copy", several=True),
)
@click.option(
    "--load-stream",
    help="Short for -a load_stream=...",
    shell_complete=complete_names("load_stream", several=True),
)
@measuring_options(rounds="auto")
@with_options(HOST_ONLY_OPTIONS)
@click.option("--record", hidden=True, expose_value=False, callback=_refuse_record)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    workload: str,
    axes: tuple[str, ...],
    release: str | None,
    free_order: str | None,
    host_only: bool,
    **options: Any,
) -> None:
    """Compare choices on WORKLOAD (a name of `list workloads`, or a YAML file).

    Every combination of the axes' values is a cell. Cells run interleaved, each round in an order
    of its own, and each cell's tokens are verified before its time counts.

    \b
      deepinfer-bench compare fork-batch --release deferred,polled --free-order reverse,forward
      deepinfer-bench compare mixed-chat -a block_size=16,128 -r 5

    With --host-only a trace's blocks alone go through the pool, with prefixes reused: more free
    orders, no model, seconds for thousands of requests; docs/prefix-reuse.md.

    
      deepinfer-bench compare mooncake --host-only --trace-file conversation_trace.jsonl
          --free-order reverse,forward,reverse_unhashed_head --blocks 2000,8000 --hold 1,timed

    Exit code 1 if any answer was wrong, or a checker found something.
    """
    refuse_misplaced(ctx, host_only=host_only)
    own = {name: options.pop(name) for name in DEFAULTS}
    if host_only:
        kept = {name: options[name] for name in SHARED if name in options}
        compare_host_only(workload, free_order=free_order, **kept, **own)
        return
    given = {"release": release, "free_order": free_order}
    given |= {name: options.pop(name) for name in ("fork_copy", "load_stream")}
    shorthands = tuple(f"{name}={values}" for name, values in given.items() if values is not None)
    ctx.exit(measure(workload, (*shorthands, *axes), **options))
