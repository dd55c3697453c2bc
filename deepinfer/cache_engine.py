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

from deepinfer.checks.row_tags import RowTags
from deepinfer.config import ModelConfig
from deepinfer.device.base import Device
from deepinfer.errors import UserError


def bytes_per_block(config: ModelConfig, block_size: int) -> int:
    """Bytes of K and V of one block over all layers."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    row = config.num_key_value_heads * config.head_dim * dtype.itemsize
    return 2 * config.num_hidden_layers * block_size * row


def free_bytes(device: Device) -> int | None:
    """What a pool could still be made of, torch's unused memory included; None if unknown."""
    memory = device.memory()
    if memory.free_bytes is None:
        return None
    return memory.free_bytes + (memory.reserved_bytes or 0) - (memory.allocated_bytes or 0)


def check_pool_fits(config: ModelConfig, num_blocks: int, block_size: int, device: Device) -> None:
    """Raise UserError, with both numbers, if the pool needs more bytes than the device has free.

    Asked for beforehand: Linux grants the CPU memory it has not got, and ends the process that
    uses it.
    """
    free = free_bytes(device)
    if free is None:
        return
    one = bytes_per_block(config, block_size)
    if num_blocks * one > free:
        raise UserError(
            f"{_out_of_memory(num_blocks, block_size, num_blocks * one)}, "
            f"{gib(free)} free on device {device.name!r}",
            hint=f"num_blocks can be {free // one} at most with this block_size; or less of both",
        )


def _out_of_memory(num_blocks: int, block_size: int, num_bytes: int) -> str:
    return f"out of memory for {num_blocks} blocks of {block_size} tokens: {gib(num_bytes)} needed"


def gib(num_bytes: int) -> str:
    """Bytes, for people."""
    return f"{num_bytes} bytes ({num_bytes / 2**30:.3g} GiB)"


class KVCache:
    """The paged K and V of every layer.

    Attributes:
        num_blocks: blocks in the pool, block 0 included.
        block_size: token positions per block.
        bytes_per_block: bytes of one block over all layers.
        num_slots, bytes_per_slot: 0; requests of this network have no state slot.
        tags: one beside each row, if they were asked for.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        torch_device: torch.device,
        *,
        tags: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.bytes_per_block = bytes_per_block(config, block_size)
        self.num_slots = self.bytes_per_slot = 0
        heads, head_dim = config.num_key_value_heads, config.head_dim
        try:
            self._pool = torch.zeros(
                (config.num_hidden_layers, 2, num_blocks, block_size, heads, head_dim),
                dtype=getattr(torch, config.dtype),
                device=torch_device,
            )
        except (MemoryError, RuntimeError) as error:  # the CPU allocator has no type of its own
            what = _out_of_memory(num_blocks, block_size, num_blocks * self.bytes_per_block)
            raise UserError(
                f"{what}: {str(error).splitlines()[0]}", hint="less of num_blocks or block_size"
            ) from error
        self.tags = RowTags(num_blocks, block_size, torch_device) if tags else None
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
        if self.tags is not None:
            self.tags.copy_blocks(pairs)

    def block_parts(self) -> list[Tensor]:
        """All that a block has: tensors [num_blocks, ...], tags among them."""
        planes = [rows for layer in self._pool for rows in layer]
        return planes if self.tags is None else [*planes, self.tags.blocks]

    def erase(self, position: int, block_id: int, slot: int) -> None:
        """Zero the K and V of the token at `position`, in all layers.

        Args:
            block_id: of the block of that position.
            slot: 0; requests of this network have no state slot.
        """
        self._pool[:, :, block_id, position % self.block_size] = 0
