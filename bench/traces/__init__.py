"""Recorded request traces: real arrivals and lengths, one reader per public format.

Knows which formats there are and where their files come from; the readers know the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from bench.traces import azure, mooncake
from bench.traces.rows import TraceRequest
from deepinfer.errors import UserError

__all__ = ["READERS", "SOURCES", "TraceRequest", "read_trace"]

READERS: dict[str, Callable[[Path], Iterator[TraceRequest]]] = {
    "azure": azure.read,
    "mooncake": mooncake.read,
}
SOURCES = {
    "azure": "https://github.com/Azure/AzurePublicDataset, data/AzureLLMInferenceTrace_*.csv",
    "mooncake": "https://github.com/kvcache-ai/Mooncake, FAST25-release/traces/",
}


def read_trace(format: str, path: Path | None, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a trace file (all if None); no more of it is read.

    Raises UserError if no path is given, saying where the public file comes from, and for a file or
    row that is not valid.
    """
    if path is None:
        raise UserError(
            f"trace.path: no {format} trace is given; expected --trace-file PATH",
            hint=f"the public traces are at {SOURCES[format]}",
        )
    return list(islice(READERS[format](path), limit))
