"""`compare --host-only`: a trace's blocks through pool and release queue alone, a row per setup.

Knows the command line and what a reader must be told of the figures; `bench.prefix_replay` runs the
trace and `sheet` writes the table. Invariant: an option that would change nothing is refused, in
either direction, and nothing is read before all setups are known to be valid.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from bench.commands.profile_common import print_sheet, show_progress
from bench.commands.sheet import FORMATS, Sheet, figure
from bench.nearest import choices
from deepinfer.errors import UserError

if TYPE_CHECKING:
    from bench.prefix_replay import ReplayResult, ReplaySetup
    from bench.traces import TraceRequest

Value = TypeVar("Value")

DEFAULTS = {"blocks": "2000", "hold": "timed", "block_size": "512", "in_flight": "0"}
SHARED = ("workload", "host_only", "free_order", "trace_file", "limit", "format_name")
MAX_BLOCKS = 2**22  # of a pool; some 100 bytes each

HOST_ONLY_OPTIONS = (
    click.option(
        "--host-only", is_flag=True, help="Replay a trace's blocks through the pool: no model."
    ),
    click.option(
        "--blocks", metavar="N,M", help="Host-only: pool sizes, in blocks of 512 tokens.  [2000]"
    ),
    click.option(
        "--hold",
        metavar="N,timed",
        help="Host-only: requests held, the newest N; timed: each until its finish.  [timed]",
    ),
    click.option("--block-size", metavar="N,M", help="Host-only: tokens of a block.  [512]"),
    click.option(
        "--in-flight",
        metavar="N,M",
        help="Host-only: requests that come before the fence of a release passes.  [0]",
    ),
)

_WHOLE = re.compile(r"[0-9]{1,9}")
_HEADERS = (
    *("free order", "block size", "blocks", "hold", "in flight", "hit %", "token hit %"),
    *("evicted", "head", "middle", "tail", "LATER", "NEVER", "withheld", "reuse", "run"),
)
_FIGURES = (
    *("evictions", "evicted_head", "evicted_middle", "evicted_tail"),
    *("later_verdicts", "never", "withheld_peak"),
)


def refuse_misplaced(ctx: click.Context, *, host_only: bool) -> None:
    """Raise UserError for a given option that belongs to the other kind of `compare`."""
    for option in ctx.command.params:
        name = option.name or ""
        if ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        if host_only and name not in (*SHARED, *DEFAULTS):
            raise UserError(
                f"{option.opts[0]}: changes nothing with --host-only",
                hint="a trace's blocks alone: no model, device, rounds or results folder",
            )
        if not host_only and name in DEFAULTS:
            hint = f"as an engine's setting: -a {name}=..." if name == "block_size" else None
            raise UserError(f"{option.opts[0]}: only with --host-only", hint=hint)


def compare_host_only(
    workload_name: str,
    *,
    free_order: str | None,
    trace_file: str | None,
    limit: int | None,
    format_name: str,
    **texts: str | None,
) -> None:
    """Print a row for every combination of the lists; all but `limit` as they were typed."""
    from bench.prefix_replay import replay

    if format_name not in FORMATS:
        valid = ", ".join(FORMATS)
        raise UserError(f"--format {format_name}: not with --host-only; expected {valid}")
    setups = parse_setups(free_order, **texts)
    requests = _read(workload_name, trace_file, limit)
    results = []
    for setup in setups:
        show_progress(" ".join(map(str, dataclasses.astuple(setup))))
        results.append(replay(requests, setup))
    print_sheet(_sheet, (requests, setups, results), format_name)


def parse_setups(free_order: str | None, **texts: str | None) -> list[ReplaySetup]:
    """Every combination of the lists in `texts`, keys as in `DEFAULTS`; the order varies fastest.

    Raises UserError for a value that is not valid or is given twice.
    """
    from bench.prefix_replay import TIMED, ReplaySetup
    from bench.traces.mooncake import CHUNK_TOKENS
    from deepinfer.prefix_cache import CachingBlockManager

    def whole(least: int) -> Callable[[str], int]:
        def parse(text: str) -> int:
            if _WHOLE.fullmatch(text) is None or int(text) < least:
                raise UserError(f"{text!r}; expected whole numbers of at least {least}")
            return int(text)

        return parse

    def order(text: str) -> str:
        if text not in CachingBlockManager.free_orders:
            raise UserError(f"{text!r}; expected {choices(text, CachingBlockManager.free_orders)}")
        return text

    def block_size(text: str) -> int:
        size = whole(1)(text)
        if CHUNK_TOKENS % size:
            raise UserError(f"{text!r}; expected divisors of {CHUNK_TOKENS}, as 512 or 128")
        return size

    def hold(text: str) -> int | str:
        return text if text == TIMED else whole(1)(text)

    given = {name: texts.get(name) or default for name, default in DEFAULTS.items()}
    lists = (
        _listed("--block-size", given["block_size"], block_size),
        _listed("--blocks", given["blocks"], whole(2)),
        _listed("--hold", given["hold"], hold),
        _listed("--in-flight", given["in_flight"], whole(0)),
        _listed("--free-order", free_order or "reverse", order),
    )
    setups = [ReplaySetup(o, size, chunks, h, f) for size, chunks, h, f, o in product(*lists)]
    for setup in setups:
        if setup.num_blocks > MAX_BLOCKS:
            raise UserError(
                f"--blocks {setup.num_chunks}: {setup.num_blocks} blocks of {setup.block_size} "
                f"tokens; at most {MAX_BLOCKS}"
            )
    return setups


def _listed(flag: str, text: str, parse: Callable[[str], Value]) -> list[Value]:
    values: list[Value] = []
    for part in text.split(","):
        try:
            value = parse(part.strip())
        except UserError as error:
            raise UserError(f"{flag}: {error}") from error
        if value in values:
            raise UserError(f"{flag}: {part.strip()} is given twice; expected different values")
        values.append(value)
    return values


def _read(workload_name: str, trace_file: str | None, limit: int | None) -> list[TraceRequest]:
    """All of the workload's trace, or its first `limit` requests, as recorded.

    What the workload says of lengths and speed is for machines that run the model.
    """
    from bench.catalog import find_workload
    from bench.spec import load_workload
    from bench.traces import read_trace

    workload = load_workload(find_workload(workload_name))
    if workload.trace is None:
        raise UserError(f"--host-only: workload {workload.name} replays no trace", hint=_HINT)
    path = trace_file or workload.trace.path
    requests = read_trace(workload.trace.format, Path(path).expanduser() if path else None, limit)
    if requests[0].hash_ids is None:
        raise UserError(f"--host-only: {path} has no hash ids, so nothing can be hit", hint=_HINT)
    return requests


_HINT = "deepinfer-bench compare mooncake --host-only --trace-file FILE"

# -- the table -----------------------------------------------------------------------------------


def _sheet(
    made: tuple[Sequence[TraceRequest], Sequence[ReplaySetup], Sequence[ReplayResult]],
) -> Sheet:
    requests, setups, results = made
    records = [
        {**dataclasses.asdict(setup), "num_blocks": setup.num_blocks, **dataclasses.asdict(result)}
        for setup, result in zip(setups, results, strict=True)
    ]
    return Sheet(
        headers=_HEADERS,
        cells=[_cells(record) for record in records],
        align=("left", *["right"] * (len(_HEADERS) - 1)),
        remarks=_remarks(requests, setups),
        keys=tuple(records[0]),
        records=records,
        facts={"num_requests": len(requests)},
    )


def _cells(record: dict[str, Any]) -> list[str]:
    rates = (record["hit_rate"], record["token_hit_rate"])
    return [
        *(str(record[key]) for key in ("free_order", "block_size", "num_chunks", "hold")),
        str(record["in_flight"]),
        *(figure(None if rate is None else 100 * rate, 2) for rate in rates),
        *(str(record[key]) for key in _FIGURES),
        figure(record["reuse_distance"], 0),
        figure(record["mean_run"], 2),
    ]


def _remarks(requests: Sequence[TraceRequest], setups: Sequence[ReplaySetup]) -> list[str]:
    from bench.prefix_replay import unlimited_hit_rate

    limits = [
        f"{figure(100 * (unlimited_hit_rate(requests, size) or 0), 2)} at block size {size}"
        for size in dict.fromkeys(setup.block_size for setup in setups)
    ]
    return [
        f"{len(requests)} requests; hit %: of full prompt blocks, a cache without limit would hit "
        f"{', '.join(limits)}",
        "blocks: of 512 tokens, the same memory at every block size; hold: requests that keep "
        "their blocks, timed: each for 50 ms + 1 ms per 8 prompt tokens + 25 ms per output token",
        "evicted: cached blocks handed out; tail: no cached block continued it; head, middle: the "
        "first of its chain or another, with cached blocks behind it that it cuts off",
        "LATER: times that a request had to wait; NEVER: requests larger than the pool; withheld: "
        "most blocks kept by a fence at once",
        "reuse: blocks handed out between a block's being given up and handed out again, median; "
        "run: mean length of runs of consecutive ids in a table",
    ]
