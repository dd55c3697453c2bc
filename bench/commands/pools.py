"""`num_blocks: auto` of a run: measured when it begins, taken from its file when it is carried on.

Knows configurations and what is told of them; `bench.probes.sizing` measures. Invariant: what
leaves here has a number of blocks, and configurations that ask alike have the same.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.matrix import Cell
    from bench.probes.sizing import MeasuredSizing
    from bench.spec import PoolQuestion, Resolved


def with_pools(cells: Sequence[Cell]) -> tuple[list[Cell], tuple[dict[str, Any], ...]]:
    """All cells with a number of blocks, and what was measured for that.

    A measurement has the form that `RunRecord.sizings` describes. Raises UserError if there is no
    room for a block.
    """
    sized, sizings = list(cells), []
    for question, indices in _asking([cell.resolved for cell in cells]).items():
        measured = _measure(question)
        for index in indices:
            resolved = sized[index].resolved.with_engine(num_blocks=measured.sizing.num_blocks)
            sized[index] = dataclasses.replace(sized[index], resolved=resolved)
        sizings.append({"cells": indices, **measured.to_dict()})
    return sized, tuple(sizings)


def with_pool(resolved: Resolved) -> Resolved:
    """The configuration with a number of blocks. Raises as `with_pools` does."""
    question = resolved.pool_question
    if question is None:
        return resolved
    return resolved.with_engine(num_blocks=_measure(question).sizing.num_blocks)


def _measure(question: PoolQuestion) -> MeasuredSizing:
    """The answer, told while a run of many begins; an error comes alone."""
    from bench.probes.sizing import measure_apart  # loads torch

    measured = measure_apart(question)
    found = f"{measured.sizing.num_blocks:,} of {question.engine.block_size} tokens"
    print(f"num_blocks=auto: {found}, measured", file=sys.stderr, flush=True)
    return measured


def with_stored_pools(cells: Sequence[Cell], folder: Path | None) -> list[Cell]:
    """The cells with the pools of the run in `folder`: all rounds of a cell have one pool.

    As they are if that run measured none or has not begun. Raises UserError for a file that cannot
    be read.
    """
    from bench.resume import stored_num_blocks

    if folder is None or not _asking([cell.resolved for cell in cells]):
        return list(cells)
    stored = stored_num_blocks(folder)
    return [
        dataclasses.replace(cell, resolved=cell.resolved.with_engine(num_blocks=stored[cell.index]))
        if cell.resolved.pool_question is not None and cell.index < len(stored)
        else cell
        for cell in cells
    ]


def what_auto_is(cells: Sequence[Cell], sizings: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """A note with the numbers measured, and the axes they depend on where there are several."""
    from bench.spec import POOL_KEYS

    if not sizings:
        return ()
    numbers = []
    for sizing in sizings:
        axes = cells[sizing["cells"][0]].axes.items()
        where = ", ".join(f"{key}={value}" for key, value in axes if key in (*POOL_KEYS, "device"))
        numbers.append(f"{sizing['num_blocks']:,}" + f" ({where})" * bool(where))
    return (f"num_blocks=auto: {', '.join(numbers)}, by the memory there was",)


def what_auto_will_be(cells: Sequence[Cell]) -> str | None:
    """What a run that is only planned says of numbers it does not know yet."""
    asking = _asking([cell.resolved for cell in cells])
    if not asking:
        return None
    return f"num_blocks=auto: will be measured at the start, {_times(len(asking))}"


def _asking(configurations: Sequence[Resolved]) -> dict[PoolQuestion, list[int]]:
    """Indices of the configurations without a number of blocks, by their question."""
    asking: dict[PoolQuestion, list[int]] = {}
    for index, resolved in enumerate(configurations):
        if (question := resolved.pool_question) is not None:
            asking.setdefault(question, []).append(index)
    return asking


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
