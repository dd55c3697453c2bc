"""Carrying on a run: what is kept, what is cut off, what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.resume import Kept, Plan, carry_on, cut_to_whole_rounds
from bench.samples import FailureRecord, RequestRecord, Samples, SampleWriter, read_samples
from bench.schema import Workload
from deepinfer.errors import UserError
from tests.bench.tiny import PLAIN, cells_of, run_matrix, silent, workload

Start = Callable[..., Any]
AXES = {"release": "deferred", "free_order": "reverse"}
PLAN = Plan("fork-batch", "cpu-tiny", "abc", 2, [AXES])
HERE = {"host": "test"}


@pytest.fixture
def killed(synthetic: Start) -> Path:
    """A run of two rounds killed in its second: half a round and half a line."""
    run = synthetic("run", rounds=2)
    cell = run.cell(AXES)
    run.round(cell, -1, warmup=True, wrong=None)
    run.round(cell, 0, wrong=None)
    request = RequestRecord(cell, 1, "r0", 0.0, None, (), 10, 0, "length", 0)
    run._writer.write(request)
    path = Path(run.folder) / "samples.jsonl"
    with open(path, "ab") as file:
        file.write(b'{"kind": "step", "cel')
    return Path(run.folder)


def test_whole_rounds_are_kept(killed: Path) -> None:
    """The rounds that ended, warm-up too; nothing of the one that did not."""
    kept = carry_on(killed, PLAN, HERE)
    assert kept.done == {(0, -1), (0, 0)}
    assert (kept.has_run, kept.num_cells) == (True, 1)
    assert Kept().done == frozenset()


def test_the_file_is_cut_behind_the_last_whole_round(killed: Path) -> None:
    """A torn line, half a round and the end record go; what stays, stays byte for byte."""
    path = killed / "samples.jsonl"
    before = path.read_bytes()
    cut_to_whole_rounds(killed)
    after = path.read_bytes()
    assert before.startswith(after)
    assert json.loads(after.splitlines()[-1])["kind"] == "round"
    samples = read_samples(killed)
    assert not samples.truncated
    assert {record.round for record in samples.requests} == {-1, 0}
    cut_to_whole_rounds(killed)
    assert path.read_bytes() == after, "cutting again changes nothing"


def test_an_end_is_cut_off_too(synthetic: Start) -> None:
    """`interrupted` would be wrong of a run that goes on."""
    run = synthetic("run")
    run.round(run.cell(AXES), wrong=None)
    run.end("interrupted", "Ctrl-C")
    cut_to_whole_rounds(run.folder)
    assert read_samples(run.folder).end is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config_hash": "xyz"}, "configuration abc, this command asks for xyz"),
        ({"rounds": 3}, "rounds 2, this command asks for 3"),
        ({"workload": "mooncake"}, "workload fork-batch, this command asks for mooncake"),
        ({"profile": "h200"}, "profile cpu-tiny, this command asks for h200"),
        ({"cells": [AXES, AXES]}, r"other cells \(1\) than this command asks for \(2\)"),
        ({"cells": [{**AXES, "release": "step"}]}, "other cells"),
        ({"metadata": {"a": "1"}}, "metadata is empty, this command gives a=1"),
    ],
)
def test_another_command_is_refused(killed: Path, change: dict[str, Any], message: str) -> None:
    """One line that says what differs; the file is as it was."""
    before = (killed / "samples.jsonl").read_bytes()
    with pytest.raises(UserError, match=message):
        carry_on(killed, dataclasses.replace(PLAN, **change), HERE)
    assert (killed / "samples.jsonl").read_bytes() == before


def test_another_machine_is_refused(killed: Path) -> None:
    """A table must come from one machine."""
    with pytest.raises(UserError, match="measured with other host test -> elsewhere"):
        carry_on(killed, PLAN, {"host": "elsewhere"})


def test_a_run_killed_while_it_began_has_some_of_its_cells(synthetic: Start) -> None:
    """The cells there are must be the first of those asked for."""
    run = synthetic("run", rounds=2)
    run.cell(AXES)
    plan = dataclasses.replace(PLAN, cells=[AXES, {**AXES, "release": "step"}])
    assert carry_on(run.folder, plan, HERE).num_cells == 1


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_where_there_is_no_run_nothing_is_carried_on(tmp_path: Path, name: str) -> None:
    """No folder, or nothing in it: refused, and not made."""
    if name == "empty":
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=name):
        carry_on(tmp_path / name, PLAN, HERE)


# -- with the real engine ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Workload:
    """Over in milliseconds."""
    return workload({**PLAIN, "count": 2})


def resume(folder: Path, work: Workload, rounds: int) -> Samples:
    """Carry on the run of `release=deferred,step` in `folder`."""
    from bench.collect.environment import collect_environment
    from bench.matrix import Matrix

    cells = cells_of(work, "release=deferred,step")
    first = cells[0].resolved
    plan = Plan("test", "cpu-tiny", first.config_hash, rounds, [cell.axes for cell in cells])
    kept = carry_on(folder, plan, collect_environment())
    with Matrix(cells, rounds=rounds, axes={}, progress=silent, kept=kept) as matrix:
        cut_to_whole_rounds(folder)
        with SampleWriter(folder, append=True) as writer:
            assert matrix.run(writer)
    return read_samples(folder)


def rounds_of(samples: Samples) -> list[tuple[int, int]]:
    """(round, cell) of the measured rounds, in file order."""
    return [(record.round, record.cell) for record in samples.rounds if not record.warmup]


@pytest.mark.parametrize("share", [0.02, 0.3, 0.55, 0.8, 0.999])
def test_a_run_killed_anywhere_ends_as_if_it_had_not_been(
    small: Workload, tmp_path: Path, share: float
) -> None:
    """Cut at any byte behind its first line and resumed: every round once, in the same order."""
    _, whole = run_matrix(tmp_path, cells_of(small, "release=deferred,step"), 3)
    path = tmp_path / "samples.jsonl"
    content = path.read_bytes()
    first_line = content.index(b"\n") + 1
    path.write_bytes(content[: first_line + int(share * (len(content) - first_line))])
    samples = resume(tmp_path, small, 3)
    assert rounds_of(samples) == rounds_of(whole)
    keys = [(r.cell, r.round, r.request_id) for r in samples.requests if r.round >= 0]
    assert len(keys) == len(set(keys)) == 2 * 3 * 2, "no request is there twice"
    assert len(samples.cells) == 2
    assert samples.end is not None
    assert samples.end.status == "complete"


def test_a_complete_run_is_not_run_again(small: Workload, tmp_path: Path) -> None:
    """All rounds are there: the file says the same as before."""
    run_matrix(tmp_path, cells_of(small, "release=deferred,step"), 2)
    before = (tmp_path / "samples.jsonl").read_bytes()
    resume(tmp_path, small, 2)
    assert (tmp_path / "samples.jsonl").read_bytes() == before


def test_a_cell_that_failed_gets_another_try(
    small: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its failure is void once the round has ended."""
    from bench.runner import Round

    plain_run = Round.run

    def run(self: Round) -> Any:
        if self._cell == 1 and self._index == 0:
            raise RuntimeError("once only")
        return plain_run(self)

    monkeypatch.setattr(Round, "run", run)
    _, failed = run_matrix(tmp_path, cells_of(small, "release=deferred,step"), 2)
    assert failed.failure_of(1) == FailureRecord(1, 0, "RuntimeError: once only")
    assert (1, 1) not in rounds_of(failed), "its other rounds are not tried"
    monkeypatch.setattr(Round, "run", plain_run)
    samples = resume(tmp_path, small, 2)
    assert samples.failure_of(1) is None
    assert sorted(rounds_of(samples)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
