"""Reader of the Mooncake request traces (JSON lines; FAST 2025).

Knows keys and units, nothing of the tokens that hash ids become. Invariant: a request has one hash
id for every `CHUNK_TOKENS` prompt tokens, the last one perhaps for fewer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.traces.rows import Place, TraceRequest, check_arrival, text_lines
from deepinfer.errors import UserError

CHUNK_TOKENS = 512
KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def read(path: Path) -> Iterator[TraceRequest]:
    """The requests of a trace file in order, read as they are asked for.

    Raises UserError for an empty file and for the first bad row.
    """
    first: float | None = None
    before = 0.0
    for place, text in text_lines(path):
        row = _row(place, text)
        arrival_ms = _time(place, row["timestamp"])
        if first is None:
            first = before = arrival_ms
        check_arrival(place, "timestamp", arrival_ms, arrival_ms, before)
        before = arrival_ms
        num_prompt = _count(place, "input_length", row["input_length"])
        yield TraceRequest(
            arrival_s=(arrival_ms - first) / 1000,
            num_prompt=num_prompt,
            num_output=_count(place, "output_length", row["output_length"]),
            hash_ids=_hash_ids(place, row["hash_ids"], -(-num_prompt // CHUNK_TOKENS)),
        )
    if first is None:
        raise UserError(f"{path}: empty file; expected JSON lines with {', '.join(KEYS)}")


def _row(place: Place, text: str) -> dict[str, Any]:
    expected = f"one JSON object with {', '.join(KEYS)}"
    try:
        row = json.loads(text)
    except ValueError as error:
        raise place.error("row", "not JSON", text, expected) from error
    if not isinstance(row, dict):
        raise place.error("row", "not an object", text, expected)
    for key in KEYS:
        if key not in row:
            raise place.error(key, "missing key", ", ".join(row), expected)
    return row


def _time(place: Place, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise place.error("timestamp", "not a time", value, "milliseconds, at least 0")
    return float(value)


def _count(place: Place, key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise place.error(key, "not a token count", value, "a whole number of at least 1")
    return value


def _hash_ids(place: Place, value: Any, num_chunks: int) -> tuple[int, ...]:
    expected = f"{num_chunks} whole numbers of at least 0 (one per {CHUNK_TOKENS} input tokens)"
    if not isinstance(value, list) or any(type(one) is not int or one < 0 for one in value):
        raise place.error("hash_ids", "not a list of ids", value, expected)
    if len(value) != num_chunks:
        raise place.error("hash_ids", f"{len(value)} ids", value, expected)
    return tuple(value)
