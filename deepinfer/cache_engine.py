"""KV storage: one pool of blocks, its geometry, row writes and block copies.

Keys are stored BEFORE the rotary embedding and rotated when they are read, at the position the
reader's block table gives them. With rotated keys attention is a sum over a set, so a table whose
complete blocks are in the wrong order would give the right answer; stored this way it does not,
and the toolkit's checks can see it. (It also lets a block serve at any position.)

The whole pool is one tensor, so that a block copy moves all layers at once:

    pool [layer, K or V, block, offset, kv_head, head_dim]      slot = block * block_size + offset

Knows nothing of requests, tables or which block is owned. Invariant: row writes and copies touch
exactly the slots and destination blocks they are given; block 0 is zero at start and nobody's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.config import ModelConfig


def bytes_per_block(config: ModelConfig, block_size: int) -> int:
    """Bytes of K and V of one block over all layers."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    row = config.num_key_value_heads * config.head_dim * dtype.itemsize
    return 2 * config.num_hidden_layers * block_size * row


class KVCache:
    """The paged K and V of every layer.

    Attributes:
        num_blocks: blocks in the pool, block 0 included.
        block_size: token positions per block.
        bytes_per_block: bytes of one block over all layers.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, torch_device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.bytes_per_block = bytes_per_block(config, block_size)
        heads, head_dim = config.num_key_value_heads, config.head_dim
        self._pool = torch.zeros(
            (config.num_hidden_layers, 2, num_blocks, block_size, heads, head_dim),
            dtype=getattr(torch, config.dtype),
            device=torch_device,
        )
        planes = config.num_hidden_layers * 2
        self._blocks = self._pool.view(planes * num_blocks, block_size * heads * head_dim)
        self._plane_starts = torch.arange(planes, device=torch_device)[:, None] * num_blocks
        # Views are made once: a step asks for two of them in every layer.
        self._slots = [
            [self._pool[i, j].view(num_blocks * block_size, heads, head_dim) for j in (0, 1)]
            for i in range(config.num_hidden_layers)
        ]
        self._rows = [
            [self._pool[i, j].view(num_blocks * block_size * heads, head_dim) for j in (0, 1)]
            for i in range(config.num_hidden_layers)
        ]

    def keys(self, layer: int) -> Tensor:
        """Unrotated K of a layer, a view [num_blocks, block_size, kv_heads, head_dim]."""
        return self._pool[layer, 0]

    def values(self, layer: int) -> Tensor:
        """V of a layer, a view [num_blocks, block_size, kv_heads, head_dim]."""
        return self._pool[layer, 1]

    def head_rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer as rows of one head: row slot * kv_heads + head, [.., head_dim]."""
        key_rows, value_rows = self._rows[layer]
        return key_rows, value_rows

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store T rows at `slots`.

        Args:
            slots: int64 [T], distinct.
            k: [T, kv_heads, head_dim], before the rotary embedding.
            v: [T, kv_heads, head_dim].
        """
        keys, values = self._slots[layer]
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    def copy_blocks(self, pairs: Tensor) -> None:
        """Copy whole blocks in all layers; all sources are read before any destination is written.

        Args:
            pairs: int32 [C, 2], (source, destination) block ids; destinations distinct.
        """
        rows = pairs.long()[None] + self._plane_starts[:, :, None]  # [planes, C, 2]
        sources, destinations = rows[..., 0].reshape(-1), rows[..., 1].reshape(-1)
        self._blocks.index_copy_(0, destinations, self._blocks.index_select(0, sources))
