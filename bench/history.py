"""Saved results over time: an index of the results folders, in sqlite.

Knows results files and their figures; measures nothing. Invariant: the index holds nothing that is
not in the files, so it can be deleted or rebuilt at any time; a file is read again only when its
size or time has changed.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.metrics import CellMetrics, compute_metrics
from bench.provenance import commit_of
from bench.samples import SAMPLES_FILE, FailureRecord, Samples, read_samples
from deepinfer.errors import UserError

INDEX_FILE = "index.sqlite"
VERSION = 1  # of the tables below; another one makes the index be built anew
METRICS = ("tok_per_s", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms", "itl_ms_p99", "wrong_requests")

_TABLES = f"""
CREATE TABLE runs (
  folder TEXT PRIMARY KEY, bytes INTEGER, mtime_ns INTEGER,
  error TEXT,  -- why the file is no results file; the columns below are NULL then
  workload TEXT, profile TEXT, started_at TEXT, status TEXT, host TEXT, git_commit TEXT,
  config_hash TEXT, rounds INTEGER, metadata TEXT, mean_round_s REAL
);
CREATE TABLE cells (
  folder TEXT REFERENCES runs ON DELETE CASCADE, cell INTEGER, axes TEXT, unsafe INTEGER,
  baseline INTEGER, rounds INTEGER, failure TEXT, {", ".join(f"{name} REAL" for name in METRICS)},
  PRIMARY KEY (folder, cell)
);
CREATE INDEX runs_by_workload ON runs (workload, started_at);
"""


@dataclass(frozen=True, slots=True)
class SavedCell:
    """One cell of one saved run.

    Attributes:
        folder: of the run, relative to the results folder.
        started_at: UTC, ISO 8601.
        status: `complete`, `interrupted`, `stopped`, or `unfinished` for a run without an end.
        commit: ten digits, `+` behind it if files were changed; None if unknown.
        rounds: measured rounds that ended.
        mean_round_s: what a round of the run cost on average, verification included; None if no
            measured round has it.
        metrics: by the keys `METRICS`; None where undefined.
        failure: why the cell gave no result, or "".
    """

    folder: str
    workload: str
    profile: str
    started_at: str
    status: str
    host: str
    commit: str | None
    config_hash: str
    metadata: dict[str, Any]
    mean_round_s: float | None
    axes: dict[str, Any]
    unsafe: bool
    baseline: bool
    rounds: int
    failure: str
    metrics: dict[str, float | None]


class History:
    """The index of a results folder, brought up to date when it is opened. A context manager.

    Args:
        results: the folder that has a folder per run.
        rebuild: forget what the index says and read all files again.
        read_only: leave the index on disk alone; one in memory is brought up to date instead.

    `problems` has a line for each folder that holds a broken results file. Raises UserError if the
    folder does not exist or the index cannot be written.
    """

    def __init__(self, results: Path, *, rebuild: bool = False, read_only: bool = False) -> None:
        if not results.is_dir():
            raise UserError(
                f"{results}: no such results folder",
                hint="`run` and `compare` make it; another one is named with --results",
            )
        self._results = results
        index = results / INDEX_FILE
        try:
            self._db = _open_copy(index) if read_only else _open(index, rebuild)
            self._update()
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"{index}: cannot keep the index: {error}",
                hint="it holds nothing of its own: it may be deleted",
            ) from error

    def __enter__(self) -> History:
        return self

    def __exit__(self, *exc: object) -> None:
        self._db.close()

    @property
    def problems(self) -> list[str]:
        """One line for each results file that is broken, in the order of the folders' names."""
        found = self._db.execute("SELECT error FROM runs WHERE error IS NOT NULL ORDER BY folder")
        return [error for (error,) in found]

    def workloads(self) -> list[str]:
        """The workloads there are results of, sorted."""
        found = self._db.execute(
            "SELECT DISTINCT workload FROM runs WHERE workload IS NOT NULL ORDER BY workload"
        )
        return [name for (name,) in found]

    def cells(self, workload: str, profile: str | None = None) -> list[SavedCell]:
        """Every cell of every saved run of a workload, oldest run first."""
        found = self._db.execute(
            "SELECT folder, workload, profile, started_at, status, host, git_commit AS 'commit',"
            " config_hash, metadata, mean_round_s, axes, unsafe, baseline, cells.rounds AS rounds,"
            f" failure, {', '.join(METRICS)} FROM runs JOIN cells USING (folder)"
            " WHERE workload = ? AND profile = coalesce(?, profile)"
            " ORDER BY started_at, folder, cell",
            (workload, profile),
        )
        return [_saved_cell(row) for row in found]

    # -- keeping the index -----------------------------------------------------------------------

    def _update(self) -> None:
        known = {
            folder: (size, mtime_ns)
            for folder, size, mtime_ns in self._db.execute(
                "SELECT folder, bytes, mtime_ns FROM runs"
            )
        }
        with self._db:  # one transaction: an update that is cut off leaves the index as it was
            for folder, stamp in self._files():
                if known.pop(folder, None) != stamp:
                    self._replace(folder, stamp)
            self._db.executemany("DELETE FROM runs WHERE folder = ?", [(name,) for name in known])

    def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Each run's folder, with the size and time of its file."""
        for path in sorted(self._results.glob(f"*/{SAMPLES_FILE}")):
            if path.is_file():
                facts = path.stat()
                yield path.parent.name, (facts.st_size, facts.st_mtime_ns)

    def _replace(self, folder: str, stamp: tuple[int, int]) -> None:
        self._db.execute("DELETE FROM runs WHERE folder = ?", (folder,))
        try:
            samples = read_samples(self._results / folder)
        except UserError as error:
            self._insert("runs", (folder, *stamp, str(error), *[None] * 10))
            return
        self._insert("runs", (folder, *stamp, None, *_run_columns(samples)))
        for metrics in compute_metrics(samples):
            failure = samples.failure_of(metrics.cell.cell)
            self._insert("cells", (folder, *_cell_columns(metrics, failure)))

    def _insert(self, table: str, values: Sequence[Any]) -> None:
        marks = ", ".join("?" * len(values))
        self._db.execute(f"INSERT INTO {table} VALUES ({marks})", values)


def _open(index: Path, rebuild: bool) -> sqlite3.Connection:
    """The index, empty if it was made by another version, is broken, or shall be rebuilt."""
    if rebuild or not _is_readable(index):
        index.unlink(missing_ok=True)
    return _prepared(sqlite3.connect(index, timeout=30))  # another command may be updating it


def _open_copy(index: Path) -> sqlite3.Connection:
    """The index in memory: what is on disk, if it can be used."""
    db = sqlite3.connect(":memory:")
    if _is_readable(index):
        with closing(sqlite3.connect(index, timeout=30)) as saved:
            saved.backup(db)
    return _prepared(db)


def _prepared(db: sqlite3.Connection) -> sqlite3.Connection:
    """With tables, if they are not there yet."""
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA foreign_keys = ON")
    if tuple(db.execute("PRAGMA user_version").fetchone()) != (VERSION,):
        db.executescript(_TABLES)
        db.execute(f"PRAGMA user_version = {VERSION}")
    return db


def _is_readable(index: Path) -> bool:
    """Whether the file is an index of this version."""
    if not index.is_file():
        return False
    try:
        with closing(sqlite3.connect(index, timeout=30)) as db:
            version: tuple[int] = db.execute("PRAGMA user_version").fetchone()
            return version == (VERSION,)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):  # locked or forbidden, not broken
            raise
        return False


def _run_columns(samples: Samples) -> tuple[Any, ...]:
    run = samples.run
    costs = [r.elapsed_s for r in samples.rounds if not r.warmup and r.elapsed_s is not None]
    return (
        run.workload,
        run.profile,
        run.started_at,
        samples.end.status if samples.end else "unfinished",
        str(run.environment.get("host", "")),
        commit_of(run.environment),
        run.config_hash,
        run.rounds,
        json.dumps(run.metadata),
        sum(costs) / len(costs) if costs else None,
    )


def _cell_columns(metrics: CellMetrics, failure: FailureRecord | None) -> tuple[Any, ...]:
    cell = metrics.cell
    return (
        cell.cell,
        json.dumps(cell.axes),
        cell.unsafe,
        cell.baseline,
        metrics.num_rounds,
        failure.reason if failure else "",
        *(getattr(metrics, name).value for name in METRICS),
    )


def _saved_cell(row: sqlite3.Row) -> SavedCell:
    """A row of `History.cells`' query, whose columns are named as the fields."""
    values = {name: row[name] for name in row.keys() if name not in METRICS}  # noqa: SIM118
    values["metadata"], values["axes"] = json.loads(row["metadata"]), json.loads(row["axes"])
    values["unsafe"], values["baseline"] = bool(row["unsafe"]), bool(row["baseline"])
    return SavedCell(**values, metrics={name: row[name] for name in METRICS})
