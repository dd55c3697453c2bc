"""A results file as an SQL script for sqlite3: `sqlite3 run.db < run.sql`.

Knows SQL and the records; does not compute anything but the latencies of a request. Invariant: one
transaction, so a script that was cut off loads nothing; numbers are numbers, what is undefined is
NULL, and text is text whatever characters it has.

Tables: runs, cells (the columns of the exported table), rounds, requests, steps, verifications.
Lists and nested settings are JSON, for sqlite's `json_each` and `->>`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from bench.metrics import request_times
from bench.report.table import Table
from bench.report.view import plain_value
from bench.samples import (
    Record,
    RequestRecord,
    RoundRecord,
    RunRecord,
    StepRecord,
    VerificationRecord,
)

ROWS_PER_INSERT = 200


@dataclass(frozen=True, slots=True)
class Relation:
    """A table of the database: the columns' names, and a row's values in their order."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def render_sql(table: Table) -> str:
    """The script, ending with a newline; meant for an empty database."""
    samples = table.samples
    relations = (
        _records("runs", RunRecord, [samples.run]),
        _cells(table),
        _records("rounds", RoundRecord, samples.rounds, spread=("counters", "memory")),
        _requests(samples.requests),
        _records("steps", StepRecord, samples.steps, spread=("host_us",)),
        _records("verifications", VerificationRecord, samples.verifications),
    )
    title = f"{table.run.workload} on {table.run.profile}"
    comment = "".join(letter if letter.isprintable() else " " for letter in title)
    lines = [f"-- {comment}", "BEGIN;"]
    for relation in relations:
        lines += _statements(relation)
    return "\n".join([*lines, "COMMIT;"]) + "\n"


def literal(value: Any) -> str:
    """An SQL literal: NULL, a number (booleans are 0 and 1), text; anything else is JSON text."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "NULL"
    if isinstance(value, (int, float)):
        return repr(int(value) if isinstance(value, bool) else value)
    text = value if isinstance(value, str) else json.dumps(value)
    quoted = text.replace("'", "''")
    return "'" + quoted.replace("\0", "'||char(0)||'") + "'"  # no literal can hold a NUL


def _cells(table: Table) -> Relation:
    """The exported table; `undefined` says as JSON why a value is NULL."""
    keys = [column.key for column in table.columns]
    rows = [
        [
            row.cell,
            *(plain_value(row, column, table.view.precision) for column in table.columns),
            row.unsafe,
            row.baseline,
            row.undefined,
        ]
        for row in table.rows
    ]
    return Relation("cells", ["cell", *keys, "unsafe", "baseline", "undefined"], rows)


def _requests(requests: Sequence[RequestRecord]) -> Relation:
    plain = _records("requests", RequestRecord, requests)
    rows = []
    for row, request in zip(plain.rows, requests, strict=True):
        times = request_times(request)
        rows.append([*row, times.ttft_s, times.tpot_s, times.e2e_s])
    return Relation(plain.name, [*plain.columns, "ttft_s", "tpot_s", "e2e_s"], rows)


def _records(
    name: str, kind: type[Record], records: Sequence[Record], spread: Sequence[str] = ()
) -> Relation:
    """A column per field of `kind`; of the fields in `spread`, dictionaries, one per key."""
    plain = [field.name for field in fields(kind) if field.name not in spread]
    parts = [
        (field, key)
        for field in spread
        for key in dict.fromkeys(key for record in records for key in getattr(record, field))
    ]
    rows = [
        [
            *(getattr(record, field) for field in plain),
            *(getattr(record, field).get(key) for field, key in parts),
        ]
        for record in records
    ]
    return Relation(name, [*plain, *(f"{field}_{key}" for field, key in parts)], rows)


def _statements(relation: Relation) -> Iterator[str]:
    columns = [
        f"{_identifier(column)} {_affinity([row[i] for row in relation.rows])}".rstrip()
        for i, column in enumerate(relation.columns)
    ]
    declared = ",\n  ".join(columns)
    yield f"CREATE TABLE {relation.name} (\n  {declared}\n);"
    for start in range(0, len(relation.rows), ROWS_PER_INSERT):
        chunk = relation.rows[start : start + ROWS_PER_INSERT]
        values = ",\n".join(f"({', '.join(map(literal, row))})" for row in chunk)
        yield f"INSERT INTO {relation.name} VALUES\n{values};"


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _affinity(values: Sequence[Any]) -> str:
    """The column's type; none where numbers and text are mixed, so that each stays what it is."""
    kinds = {type(value) for value in values} - {type(None)}
    if not kinds:
        return ""
    if kinds <= {int, bool}:
        return "INTEGER"
    if kinds <= {int, bool, float}:
        return "REAL"
    return "" if kinds & {int, bool, float} else "TEXT"
