"""`replay`: an operation log through other policies, orders, pools and block managers, no model.

Knows the command line and the table; `deepinfer.testing.oplog` does the work. Invariant: every
cell sees the same operations in the same order, and a cell that stops leaves the others alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench.commands.completion import complete_file, complete_setting
from bench.commands.sheet import FORMATS, Sheet, figure, render_sheet
from bench.nearest import choices
from deepinfer.errors import UserError

if TYPE_CHECKING:
    from deepinfer.testing.oplog.log import OperationLog
    from deepinfer.testing.oplog.replay import Replay

AXES = ("release", "free_order", "discipline", "fence", "num_blocks", "num_state_slots")
CHECKS = ("order", "conservation")
EXPLORATION = re.compile(rb'\s*\{\s*"format":\s*"deepinfer-exploration"')
CELLS_BESIDE = 5  # on paper
# What was found: words on paper, and who finds it.
FOUND = {
    "wrong_reads": ("wrong reads", "content"),
    "hazards": ("hazards", "order"),
    "contradictions": ("contradictions", "conservation"),
}
FIGURES = {
    "operations": "operations",
    "allocations": "allocations",
    "blocks_allocated": "blocks handed out",
    "blocks_touched": "distinct blocks",
    "withheld_peak": "withheld peak",
    "withheld_block_steps": "withheld block-steps",
    "refused_while_withheld": "refused while withheld",
    "host_waits": "host waits",
    "stream_waits": "stream waits",
    "reuse_distance": "reuse distance",
}
# Of state slots, where the log has some: keys of a record, and of `FIGURES` what they are of slots.
SLOT_FIGURES = {
    "slots_allocated": ("slots handed out", "blocks_allocated"),
    "slots_touched": ("distinct slots", "blocks_touched"),
    "slots_withheld_peak": ("slots withheld peak", "withheld_peak"),
    "slots_refused_while_withheld": ("slots refused while withheld", "refused_while_withheld"),
    "slot_host_waits": ("host waits for slots", "host_waits"),
    "slot_stream_waits": ("stream waits for slots", "stream_waits"),
}
LEGEND = (
    "withheld block-steps: blocks withheld as each step was queued, summed over the steps.",
    "refused while withheld: allocations that found too few blocks, though the withheld ones would "
    "have sufficed; the replay then waits for them.",
    "reuse distance: the median number of blocks handed out between a block's release and its "
    "reuse.",
)


@click.command("replay")
@click.argument("log", type=click.Path(path_type=Path), shell_complete=complete_file)
@click.option(
    "-a",
    "--axis",
    "axes",
    multiple=True,
    metavar="NAME=V1,V2",
    help=f"A choice and its values, of {', '.join(AXES)}; repeatable. Default: as recorded.",
    shell_complete=complete_setting(several=True),
)
@click.option(
    "--manager",
    "managers",
    multiple=True,
    metavar="NAME",
    help="A block manager: a name of `check conformance`, or module:Class; repeatable.",
)
@click.option(
    "--check",
    "checks",
    default=",".join(CHECKS),
    show_default=True,
    metavar="NAME,NAME",
    help="What watches besides the content of rows; off: nothing.",
)
@click.option(
    "--progress",
    default="late",
    show_default=True,
    metavar="late|recorded|random:SEED",
    help="How far the device runs: as late as it may, as the recorded host saw it, or anyhow.",
)
@click.option(
    "--format",
    "format_name",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="How to write the table.",
)
@click.pass_context
def command(
    ctx: click.Context,
    log: Path,
    axes: tuple[str, ...],
    managers: tuple[str, ...],
    checks: str,
    progress: str,
    format_name: str,
) -> None:
    """Replay LOG, written by `run --record`, with every combination of choices.

    \b
      deepinfer-bench replay ops.jsonl -a release=deferred,step -a free_order=reverse,forward
      deepinfer-bench replay ops.jsonl -a num_blocks=64,96,128
      deepinfer-bench replay ops.jsonl --manager reference

    A failure file of `check explore` is replayed as it was found. Exit code 1 if a policy called
    safe has a wrong read, a hazard or a contradiction, or if no cell reaches the end of the log.
    """
    from deepinfer.testing.oplog.log import OperationLog
    from deepinfer.testing.oplog.replay import replay_all

    if _is_exploration(log):
        ctx.exit(_replay_exploration(log))
    source = OperationLog(log)
    cells = _cells(source, axes, managers, _parse_checks(checks), progress)
    replay_all(source, [replay for _, replay in cells])
    replays = [replay for _, replay in cells]
    if not any(replay.figures.operations or replay.stopped for replay in replays):
        raise UserError(
            f"{log}: the log holds no operation",
            hint="the recorded run ended before its first measured step; record it again",
        )
    click.echo(_render(source, cells, format_name), nl=False)
    no_end = all(replay.stopped for replay in replays)
    ctx.exit(1 if no_end or any(replay.has_failed for replay in replays) else 0)


def _is_exploration(path: Path) -> bool:
    """Whether the explorer wrote the file, whose header may span lines."""
    try:
        with path.open("rb") as file:
            return EXPLORATION.match(file.read(200)) is not None
    except OSError:
        return False  # the reader of logs says why


def _replay_exploration(path: Path) -> int:
    """A failure that the explorer saved: what was done, and what was wrong then."""
    from deepinfer.testing.explorer.explore import replay_file

    outcome = replay_file(path)
    for line in (*outcome.log, *outcome.findings, *outcome.problems):
        click.echo(line)
    wrong = f"{outcome.wrong_rows} wrong rows, {outcome.wrong_tokens} wrong tokens"
    click.echo(f"{wrong}, {outcome.hazards} hazards, {len(outcome.problems)} other problems")
    return 1 if outcome.failed else 0


def _parse_checks(text: str) -> tuple[str, ...]:
    names = () if text == "off" else tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in CHECKS:
            expected = choices(name, (*CHECKS, "off"))
            raise UserError(f"--check: unknown checker (got {name!r}); expected {expected}")
    return names


def _cells(
    log: OperationLog,
    axes: Sequence[str],
    managers: Sequence[str],
    checks: Sequence[str],
    progress: str,
) -> list[tuple[dict[str, Any], Replay]]:
    """The values of each cell by axis, and its replay; the last axis varies fastest."""
    from bench.schema import AUTO
    from bench.spec import parse_axes
    from deepinfer.block_manager import BlockManager
    from deepinfer.testing.oplog.figures import Progress
    from deepinfer.testing.oplog.managers import block_manager
    from deepinfer.testing.oplog.replay import Replay

    for item in axes:
        name = item.partition("=")[0].strip().replace("-", "_")
        if name not in AXES:
            raise UserError(
                f"axis {name}: what it decides is in the log, or nothing; expected "
                f"{choices(name, AXES)}"
            )
    values: dict[str, tuple[Any, ...]] = parse_axes(axes)
    if AUTO in values.get("num_blocks", ()):
        raise UserError(
            "axis num_blocks: auto, and a log has no model to measure; expected numbers"
        )
    makers = {name: block_manager(name) for name in managers}
    if makers:
        values["manager"] = tuple(makers)
    parsed = Progress.parse(progress)
    cells = []
    for combination in product(*values.values()):
        cell = dict(zip(values, combination, strict=True))
        config = dataclasses.replace(
            log.config, **{name: value for name, value in cell.items() if name in AXES}
        )
        config.check()
        shown = {"release": config.release, "free_order": config.free_order, **cell}
        maker = makers[cell["manager"]] if makers else BlockManager
        replay = Replay(config, make_blocks=maker, checks=checks, progress=parsed)
        cells.append((shown, replay))
    return cells


def _render(
    log: OperationLog, cells: Sequence[tuple[Mapping[str, Any], Replay]], format_name: str
) -> str:
    records = [_record(axes, replay) for axes, replay in cells]
    notes = _notes(log, cells)
    if format_name in ("csv", "json"):
        return render_sheet(_sheet(cells, records, notes), format_name)
    parts = []
    for start in range(0, len(cells), CELLS_BESIDE):
        end = start + CELLS_BESIDE
        last = notes if end >= len(cells) else []
        parts.append(render_sheet(_sheet(cells[start:end], records[start:end], last), format_name))
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _record(axes: Mapping[str, Any], replay: Replay) -> dict[str, Any]:
    figures, slots = replay.figures, replay.slot_figures
    of_slots = {key: getattr(slots, of) for key, (_, of) in SLOT_FIGURES.items()}
    counts = {key: replay.findings.counts[finder] for key, (_, finder) in FOUND.items()}
    return {
        **axes,
        "unsafe": not replay.is_safe,
        **{key: getattr(figures, key) for key in FIGURES},
        **(of_slots if slots.allocations else dict.fromkeys(SLOT_FIGURES)),
        **counts,
        "stopped": replay.stopped or None,
    }


def _sheet(
    cells: Sequence[tuple[Mapping[str, Any], Replay]],
    records: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
) -> Sheet:
    """A column for each cell, for there are more figures than cells."""
    axes = list(cells[0][0])
    rows = [(name, *(_value(record, name) for record in records)) for name in axes]
    shown = dict(FIGURES)
    if any(record["slots_allocated"] for record in records):
        shown |= {key: words for key, (words, _) in SLOT_FIGURES.items()}
    shown |= {key: words for key, (words, _) in FOUND.items()}
    for key, words in shown.items():
        decimals = 1 if key == "reuse_distance" else 0
        rows.append((words, *(figure(record[key], decimals) for record in records)))
    if any(record["stopped"] for record in records):
        rows.append(("stopped", *("yes" if record["stopped"] else "" for record in records)))
    return Sheet(
        headers=rows[0],
        cells=rows[1:],
        align=("left", *("right" for _ in records)),
        remarks=notes,
        keys=list(records[0]),
        records=records,
    )


def _value(record: Mapping[str, Any], axis: str) -> str:
    unsafe = " UNSAFE" if axis == "release" and record["unsafe"] else ""
    return f"{record[axis]}{unsafe}"


def _notes(log: OperationLog, cells: Sequence[tuple[Mapping[str, Any], Replay]]) -> list[str]:
    """What stopped a cell, the first of each thing found in it, and what the words mean."""
    notes = []
    for axes, replay in cells:
        name = " ".join(f"{key}={value}" for key, value in axes.items())
        if replay.stopped:
            notes.append(f"{name}: stopped at {replay.stopped}")
        first = {finding.check: finding for finding in reversed(replay.findings.first)}
        notes += [
            f"{name}: {finding}" for finding in first.values() if replay.stopped != finding.message
        ]
    if log.truncated:
        notes.append("The log has no end: the recorded run was cut off there.")
    return [*notes, *LEGEND]
