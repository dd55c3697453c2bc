"""What transfers move in an engine's own KV pool: rows, and the tags beside them.

A save must find the tags of the request's tokens, whoever reads a load must find the load's. Knows
neither streams nor owners. Implements `transfers.Rows`. Invariant: rows and tags change together.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch

from deepinfer.cache_engine import KVCache
from deepinfer.checks.prefix_tags import POSITION_BITS
from deepinfer.engine import LLMEngine
from deepinfer.plan import Int32, Int64


class PoolRows:
    """The rows and tags of one engine; its checks include `tags`."""

    def __init__(self, engine: LLMEngine) -> None:
        cache = engine.cache
        assert isinstance(cache, KVCache), "a Qwen3 network"
        assert cache.tags is not None, "rows are tagged"
        assert engine.scheduler.prefix_tags is not None, "rows are tagged"
        self._cache, self._tags = cache, cache.tags
        self._num_layers = engine.model.num_hidden_layers
        self._block_size = engine.config.block_size
        self._scheduler, self._prefixes = engine.scheduler, engine.scheduler.prefix_tags

    def committed(self, request_id: str, num_rows: int) -> Int64:
        """On the host: the tags of the request's first rows, int64 [num_rows]."""
        row = np.array([self._scheduler.find(request_id).row], np.intp)
        epochs = self._scheduler.seqs.epochs[row]
        tags: Int64 = self._prefixes.up_to(row, epochs, np.array([num_rows], np.int32))[0]
        return tags

    @torch.inference_mode()
    def write(self, block_ids: Int32, num_rows: int, content: str) -> None:
        """Inside submitted work: fill the rows with those of a load called `content`."""
        tags = torch.from_numpy(_tags_of_load(content, num_rows))
        for i, block_id in enumerate(block_ids.tolist()):
            start = i * self._block_size
            part = tags[start : start + self._block_size]
            self._tags.block(block_id)[: len(part)] = part
            for layer in range(self._num_layers):
                self._cache.keys(layer)[block_id, : len(part)] = 1.0
                self._cache.values(layer)[block_id, : len(part)] = 1.0

    @torch.inference_mode()
    def read(self, block_ids: Int32, num_rows: int, content: str | Int64) -> int:
        """Inside submitted work: how many rows do not have the tags of a load or of a request."""
        tags = _tags_of_load(content, num_rows) if isinstance(content, str) else content
        found = torch.cat([self._tags.block(block_id) for block_id in block_ids.tolist()])
        return int((found[:num_rows] != torch.from_numpy(tags)).count_nonzero())


def _tags_of_load(name: str, num_rows: int) -> Int64:
    """One tag for each row, int64 [num_rows], as no request of other tokens has it."""
    positions = np.arange(1, num_rows + 1, dtype=np.int64)
    return (np.int64(zlib.crc32(name.encode())) << POSITION_BITS) | positions
