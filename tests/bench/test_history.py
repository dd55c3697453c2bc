"""The index of saved results: what it holds, when it reads a file, that it can be thrown away."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import history
from bench.history import INDEX_FILE, History
from deepinfer.errors import UserError

Start = Callable[..., Any]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the folders whose files are read, as it happens."""
    names: list[str] = []
    plain_read = history.read_samples

    def read(path: Path) -> Any:
        names.append(path.name)
        return plain_read(path)

    monkeypatch.setattr(history, "read_samples", read)
    return names


def save(start: Start, name: str, started_at: str = "2026-01-01", **run: Any) -> Any:
    """A finished run of one cell and one round."""
    made = start(name, started_at=started_at, **run)
    made.round(made.cell(baseline=True))
    return made.end()


def test_runs_come_in_the_order_of_time_with_their_figures(
    synthetic: Start, tmp_path: Path
) -> None:
    """Oldest first, whatever the folders are called; figures are those of the table."""
    save(synthetic, "a", "2026-02-02", metadata={"ticket": "42"})
    save(synthetic, "b", "2026-01-01")
    save(synthetic, "c", "2026-03-03", workload="mixed-chat")
    with History(tmp_path) as index:
        cells = index.cells("fork-batch")
        assert index.workloads() == ["fork-batch", "mixed-chat"]
    assert [cell.folder for cell in cells] == ["b", "a"]
    assert cells[1].metadata == {"ticket": "42"}
    assert cells[1].axes == {"release": "deferred", "free_order": "reverse"}
    assert (cells[1].status, cells[1].rounds, cells[1].baseline) == ("complete", 1, True)
    assert cells[1].metrics["tok_per_s"] == 3.0
    assert cells[1].metrics["ttft_ms_p50"] == pytest.approx(100)


def test_a_file_is_read_again_only_when_it_changed(
    synthetic: Start, tmp_path: Path, reads: list[str]
) -> None:
    """A new run is added, a longer file and a touched one are read anew, a deleted one goes."""
    save(synthetic, "a")
    growing = synthetic("b", started_at="2026-01-02")
    cell = growing.cell()
    for expected in (["a", "b"], []):
        reads.clear()
        History(tmp_path).__exit__(None, None, None)
        assert reads == expected
    growing.round(cell)
    os.utime(tmp_path / "a" / "samples.jsonl", ns=(1, 1))
    save(synthetic, "c", "2026-01-03")
    reads.clear()
    with History(tmp_path) as index:
        assert reads == ["a", "b", "c"]
        assert [c.status for c in index.cells("fork-batch")] == [
            "complete",
            "unfinished",
            "complete",
        ]
    shutil.rmtree(tmp_path / "a")
    with History(tmp_path) as index:
        assert [cell.folder for cell in index.cells("fork-batch")] == ["b", "c"]


def test_the_index_can_be_rebuilt_from_the_files(
    synthetic: Start, tmp_path: Path, reads: list[str]
) -> None:
    """Rebuilt, deleted, of another version or broken: the same cells are in it afterwards."""
    save(synthetic, "a")
    path = tmp_path / INDEX_FILE
    with History(tmp_path) as index:
        expected = index.cells("fork-batch")

    def of_another_version() -> None:
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA user_version = 999")

    spoilers: tuple[Callable[[], Any], ...] = (
        lambda: None,
        path.unlink,
        of_another_version,
        lambda: path.write_bytes(b"no database, but long enough to be taken for one" * 9),
    )
    for spoil in spoilers:
        spoil()
        reads.clear()
        with History(tmp_path, rebuild=spoil is spoilers[0]) as index:
            assert index.cells("fork-batch") == expected
            assert reads == ["a"]


def test_broken_results_are_named_and_left_out(
    synthetic: Start, tmp_path: Path, reads: list[str]
) -> None:
    """One line each, told every time, read once; folders without results are no problem."""
    save(synthetic, "good")
    for name in ("bad", "worse"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "samples.jsonl").write_text("nothing of ours\n")
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        with History(tmp_path) as index:
            assert [line.partition(":")[0] for line in index.problems] == [
                str(tmp_path / name / "samples.jsonl") for name in ("bad", "worse")
            ]
            assert [cell.folder for cell in index.cells("fork-batch")] == ["good"]
    assert reads == ["bad", "good", "worse"]


def test_what_a_round_costs_is_the_mean_of_the_measured_ones(
    synthetic: Start, tmp_path: Path
) -> None:
    """Warm-ups do not count; files of before that figure have none."""
    run = synthetic("a")
    cell = run.cell()
    for number, elapsed_s, warmup in ((-1, 100.0, True), (0, 2.0, False), (1, 4.0, False)):
        run.round(cell, number, warmup=warmup, elapsed_s=elapsed_s)
    run.end()
    save(synthetic, "b", "2026-01-03")
    with History(tmp_path) as index:
        assert [cell.mean_round_s for cell in index.cells("fork-batch")] == [3.0, None]


def test_a_failed_cell_has_its_reason_and_no_figures(synthetic: Start, tmp_path: Path) -> None:
    """As the table has it."""
    run = synthetic("a")
    run.fail(run.cell())
    run.end()
    with History(tmp_path) as index:
        (cell,) = index.cells("fork-batch")
    assert cell.failure == "RuntimeError: no"
    assert cell.metrics["tok_per_s"] is None


def test_reading_only_leaves_no_trace_and_sees_the_newest(synthetic: Start, tmp_path: Path) -> None:
    """With an index on disk or without one, it is as it was."""
    save(synthetic, "a")
    with History(tmp_path, read_only=True) as index:
        assert len(index.cells("fork-batch", "cpu-tiny")) == 1
        assert index.cells("fork-batch", "h200") == []
    assert not (tmp_path / INDEX_FILE).exists()
    History(tmp_path).__exit__(None, None, None)
    before = (tmp_path / INDEX_FILE).read_bytes()
    save(synthetic, "b", "2026-01-03")
    with History(tmp_path, read_only=True) as index:
        assert len(index.cells("fork-batch")) == 2
    assert (tmp_path / INDEX_FILE).read_bytes() == before


def test_no_folder_is_one_line(tmp_path: Path) -> None:
    """A missing results folder is not made."""
    with pytest.raises(UserError, match="no such results folder"):
        History(tmp_path / "none")
    assert not (tmp_path / "none").exists()
