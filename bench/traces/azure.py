"""Reader of the Azure LLM inference traces (CSV; Splitwise, ISCA 2024).

Knows columns and timestamps, nothing of how requests are made from them. Invariant: times are exact
integers of 100 ns until the first one is subtracted, since the seven digits of the file are one
more than `datetime` keeps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from bench.traces.rows import Place, TraceRequest, check_arrival, text_lines
from deepinfer.errors import UserError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
TICKS_PER_S = 10_000_000

_TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,7}))?(?:Z|\+00:00)?", re.ASCII
)
_COUNT = re.compile(r"0*[1-9][0-9]{0,8}")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def read(path: Path) -> Iterator[TraceRequest]:
    """The requests of a trace file in order, read as they are asked for.

    Raises UserError for a file that is empty or lacks a column, and for the first bad row.
    """
    lines = text_lines(path)
    header = next(lines, None)
    if header is None:
        raise UserError(f"{path}: empty file; expected columns {','.join(COLUMNS)}")
    place, text = header
    names = [name.strip() for name in text.split(",")]
    for column in COLUMNS:
        if names.count(column) != 1:
            raise place.error(column, "no such column", text, ",".join(COLUMNS))
    wanted = [names.index(column) for column in COLUMNS]
    first = before = None
    for place, text in lines:
        fields = text.split(",")
        if len(fields) != len(names):
            raise place.error("row", f"{len(fields)} fields", text, f"{len(names)} fields")
        when, num_prompt, num_output = (fields[i].strip() for i in wanted)
        ticks = parse_ticks(place, when)
        first = ticks if first is None else first
        check_arrival(place, COLUMNS[0], when, ticks, first if before is None else before)
        before = ticks
        yield TraceRequest(
            arrival_s=(ticks - first) / TICKS_PER_S,
            num_prompt=_count(place, COLUMNS[1], num_prompt),
            num_output=_count(place, COLUMNS[2], num_output),
        )
    if first is None:
        raise UserError(f"{path}: no rows below the header; expected at least one request")


def parse_ticks(place: Place, text: str) -> int:
    """Time since 1970 in units of 100 ns, exactly as written. UserError if it is not a time."""
    expected = "a time as 2023-11-16 18:17:03.9799600"
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        raise place.error(COLUMNS[0], "not a timestamp", text, expected)
    try:
        whole = datetime.fromisoformat(match[1]).replace(tzinfo=timezone.utc) - _EPOCH
    except ValueError as error:
        raise place.error(COLUMNS[0], f"not a timestamp: {error}", text, expected) from error
    fraction = int((match[2] or "").ljust(7, "0"))
    return (whole.days * 86_400 + whole.seconds) * TICKS_PER_S + fraction


def _count(place: Place, column: str, text: str) -> int:
    if _COUNT.fullmatch(text) is None:
        raise place.error(column, "not a token count", text, "a whole number of at least 1")
    return int(text)
