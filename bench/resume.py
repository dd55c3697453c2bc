"""What is left to do of a run that was interrupted or killed.

Knows the results file; measures nothing. Invariant: a file is carried on only by the same
configuration on the same machine and code, and only whole rounds are kept, so that a resumed file
cannot be told from one written in one go but for its times.

    run  cell cell ...  [requests steps verdict round]  [requests steps ...  <- killed here
                                                      ^
                                                      the file is cut here and appended to
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.provenance import environment_changes
from bench.samples import RoundRecord, Samples, never_began, read_samples, samples_path
from deepinfer.errors import UserError

# A line of these kinds ends something whole; all that follows the last of them is run again.
_CLOSING = ("run", "cell", "round", "failure")
_FRESH_FOLDER = "start anew in another folder with -o"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a command line asks for, as far as an earlier file must agree with it."""

    workload: str
    profile: str
    config_hash: str
    rounds: int
    cells: Sequence[Mapping[str, Any]]  # axes
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a run that is carried on has already; an empty one has nothing.

    Attributes:
        has_run: whether the run record is there.
        num_cells: cell records in the file; a run killed while it began has not all of them.
        rounds: that ended, warm-up too, in file order.
    """

    has_run: bool = False
    num_cells: int = 0
    rounds: tuple[RoundRecord, ...] = ()

    @property
    def done(self) -> frozenset[tuple[int, int]]:
        """(cell, round) of the rounds that need not be run again."""
        return frozenset((record.cell, record.round) for record in self.rounds)


def carry_on(folder: Path, plan: Plan, environment: Mapping[str, Any]) -> Kept:
    """What of the run in `folder` can be kept. Changes nothing.

    Of a run killed before its first line was whole that is nothing. Raises UserError if there is no
    run, or it is not one of `plan` made in this environment.
    """
    if _is_without_first_line(samples_path(folder)):
        return Kept()
    samples = read_samples(folder)
    _check_same(samples, plan)
    if changed := environment_changes(samples.run.environment, environment):
        raise UserError(
            f"{samples.path}: measured with other {'; '.join(changed)}",
            hint=f"one table must come from one machine and one code; {_FRESH_FOLDER}",
        )
    return Kept(True, len(samples.cells), tuple(samples.rounds))


def stored_num_blocks(folder: Path) -> tuple[int, ...]:
    """The pool of each cell of the run in `folder`, if it measured any and has begun.

    Raises UserError if there is no run.
    """
    if _is_without_first_line(samples_path(folder)):
        return ()
    return read_samples(folder).run.num_blocks


def cut_to_whole_rounds(folder: Path) -> None:
    """Cut off what follows the last whole round: a torn line, half a round, the end record."""
    path = samples_path(folder)
    keep = position = 0
    try:
        with open(path, "r+b") as file:
            for line in file:
                position += len(line)
                if line.endswith(b"\n") and _kind_of(line) in _CLOSING:
                    keep = position
            file.truncate(keep)
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{path}: cannot resume: {error.strerror}") from error


def _is_without_first_line(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            line = file.readline()
    except OSError:  # whoever reads it next says what is wrong with it
        return False
    return not line.endswith(b"\n") and never_began(line)


def _check_same(samples: Samples, plan: Plan) -> None:
    run = samples.run
    for what, stored, asked in (
        ("workload", run.workload, plan.workload),
        ("profile", run.profile, plan.profile),
        ("rounds", run.rounds, plan.rounds),
        ("configuration", run.config_hash, plan.config_hash),
    ):
        if stored != asked:
            raise UserError(
                f"{samples.path}: {what} {stored}, this command asks for {asked}",
                hint=f"resume with the options it began with, or {_FRESH_FOLDER}",
            )
    if plan.metadata and plan.metadata != run.metadata:
        raise UserError(
            f"{samples.path}: metadata {_pairs(run.metadata)}, this command gives "
            f"{_pairs(plan.metadata)}",
            hint="what a run was begun with stays; resume without --metadata",
        )
    stored_cells = [cell.axes for cell in samples.cells]
    asked_cells = [json.loads(json.dumps(axes)) for axes in plan.cells]
    # A run killed while it began has the first few; the others are appended.
    if stored_cells != asked_cells[: len(stored_cells)] or (
        samples.rounds and len(stored_cells) != len(asked_cells)
    ):
        raise UserError(
            f"{samples.path}: has other cells ({len(stored_cells)}) than this command asks for "
            f"({len(asked_cells)})",
            hint=f"resume with the axes it began with, or {_FRESH_FOLDER}",
        )


def _pairs(metadata: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in metadata.items()) or "is empty"


def _kind_of(line: bytes) -> str | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry.get("kind") if isinstance(entry, dict) else None
