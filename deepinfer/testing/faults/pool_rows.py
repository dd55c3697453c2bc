"""What transfers move in an engine's own KV pool: rows, and the tags beside them.

A save must find the tags of the request's tokens, whoever reads a load must find the load's. In a
network with compressed rows a block has those rows alone whose last token is among the ones moved;
what a request has in its state slot is not moved at all. Knows neither streams nor owners.
Implements `transfers.Rows`. Invariant: rows and tags change together.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer.cache_engine import KVCache
from deepinfer.checks.prefix_tags import POSITION_BITS
from deepinfer.engine import LLMEngine
from deepinfer.models.hybrid.cache import HybridCache
from deepinfer.plan import Int32, Int64


class _Part(NamedTuple):
    """Rows of one block, all filled at once.

    Attributes:
        tags: of the block's rows of one kind, a view.
        stored: the rows themselves, in every layer that has them, as views.
        rows: int64 [n], which of them.
        expected: int64 [n], their tags.
    """

    tags: Tensor
    stored: list[Tensor]
    rows: Tensor
    expected: Tensor


class PoolRows:
    """The rows and tags of one engine; its checks include `tags`."""

    def __init__(self, engine: LLMEngine) -> None:
        assert engine.scheduler.prefix_tags is not None, "rows are tagged"
        self._cache = engine.cache
        self._num_layers = engine.model.num_hidden_layers
        self._block_size = engine.config.block_size
        self._scheduler, self._prefixes = engine.scheduler, engine.scheduler.prefix_tags

    def committed(self, request_id: str, num_rows: int) -> Int64:
        """On the host: the tags of the request's first rows, int64 [num_rows]."""
        row = np.array([self._scheduler.find(request_id).row], np.intp)
        epochs = self._scheduler.seqs.epochs[row]
        tags: Int64 = self._prefixes.up_to(row, epochs, np.array([num_rows], np.int32))[0][0]
        return tags

    @torch.inference_mode()
    def write(self, block_ids: Int32, num_rows: int, content: str) -> None:
        """Inside submitted work: fill the rows with those of a load called `content`."""
        for part in self._parts(block_ids, _tags_of_load(content, num_rows)):
            part.tags[part.rows] = part.expected
            for stored in part.stored:
                stored[part.rows] = 1

    @torch.inference_mode()
    def read(self, block_ids: Int32, num_rows: int, content: str | Int64) -> int:
        """Inside submitted work: how many rows do not have the tags of a load or of a request."""
        tags = _tags_of_load(content, num_rows) if isinstance(content, str) else content
        return sum(
            int((part.tags[part.rows] != part.expected).count_nonzero())
            for part in self._parts(block_ids, tags)
        )

    # -- inside ----------------------------------------------------------------------------------

    def _parts(self, block_ids: Int32, tags: Int64) -> Iterator[_Part]:
        """The rows of a table's first positions, which have these `tags`."""
        size = self._block_size
        for i, block_id in enumerate(block_ids.tolist()):
            of_block = torch.from_numpy(tags[i * size : (i + 1) * size])
            if isinstance(self._cache, HybridCache):
                yield from _compressed(self._cache, block_id, i * size, of_block)
            else:
                yield self._kv(self._cache, block_id, of_block)

    def _kv(self, cache: KVCache, block_id: int, tags: Tensor) -> _Part:
        assert cache.tags is not None, "rows are tagged"
        layers = range(self._num_layers)
        stored = [part(layer)[block_id] for part in (cache.keys, cache.values) for layer in layers]
        return _Part(cache.tags.block(block_id), stored, torch.arange(len(tags)), tags)


def _compressed(cache: HybridCache, block_id: int, start: int, tags: Tensor) -> Iterator[_Part]:
    """Of a block whose first position is `start`: one part for each ratio."""
    assert cache.tags is not None, "rows are tagged"
    positions = torch.arange(start, start + len(tags))
    for ratio in cache.tags.rows:
        closing = (positions + 1) % ratio == 0
        stored = [
            cache.paged(rows.kind, rows.layer)[block_id]
            for rows in cache.geometry.paged
            if rows.ratio == ratio
        ]
        rows = positions[closing] % cache.block_size // ratio
        yield _Part(cache.tags.block(ratio, block_id), stored, rows, tags[closing])


def _tags_of_load(name: str, num_rows: int) -> Int64:
    """One tag for each row, int64 [num_rows], as no request of other tokens has it."""
    positions = np.arange(1, num_rows + 1, dtype=np.int64)
    return (np.int64(zlib.crc32(name.encode())) << POSITION_BITS) | positions
