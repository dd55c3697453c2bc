"""A host and a device that exist only as calls to a checker."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.observer import KV, Access
from deepinfer.sequence import SequenceTable

SIZE = 4
CONFIG = EngineConfig(
    block_size=SIZE,
    num_blocks=9,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=24,
    release="early",
)


class RunningHost:
    """What the order checker asks of a host: who has which row, and how far it has come."""

    def __init__(self) -> None:
        self.config = CONFIG
        self.states = None
        self.seqs = SequenceTable(CONFIG.max_num_seqs, CONFIG.max_model_len, SIZE)
        self.num_steps = 1
        self.running = []

    def run(self, *request_ids: str) -> None:
        """Give the requests the rows 0, 1, ..."""
        self.running = [
            SimpleNamespace(row=row, request_id=request_id)
            for row, request_id in enumerate(request_ids)
        ]


def kv(*ids: int, rows: tuple[int, int] | None = None, holder: int | None = None) -> Access:
    """Whole blocks, or the same rows [start, end) of each, on behalf of one row."""
    count = len(ids)
    start, end = (None, None) if rows is None else (np.full(count, row) for row in rows)
    holders = None if holder is None else np.full(count, holder)
    return Access(KV, np.array(ids), start, end, holders)
