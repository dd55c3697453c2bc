"""The storage of a hybrid model: paged rows in blocks, rings and open groups in state slots.

    blocks   one buffer per kind of paged rows   [num_blocks * rows_per_block, width]
    slots    one buffer, uint8, with a typed     [num_slots, bytes_per_slot]
             view of each region

A ring row is valid for a position if its tag is that position + 1 (0: never written), so a slot
that changes hands needs no clearing: whatever the last owner left has another tag, or lies at a
position the new owner has written.

Knows nothing of requests or of who owns a block or slot. Invariant: writes and copies touch exactly
the rows, blocks and slots they name; rows come back as `decode(encode(x))` of their format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.errors import UserError
from deepinfer.models.hybrid.formats import RowFormat, quantise, row_format
from deepinfer.models.hybrid.geometry import (
    COMPRESSED,
    IDS,
    INDEX,
    OPEN,
    OPEN_INDEX,
    POSITIONS,
    STREAMS,
    WINDOW,
    Geometry,
    Region,
)
from deepinfer.models.hybrid.layer_plan import HybridConfig
from deepinfer.models.hybrid.tags import HybridTags

DIMS = {WINDOW: "head_dim", COMPRESSED: "head_dim", INDEX: "index_head_dim"}


class HybridCache:
    """Paged rows of all source layers, and the state slots.

    Args:
        config: whose `cache`, `qat` and `dtype` say how rows are stored and what they come back as.
        geometry: of `config`.
        num_blocks: blocks, block 0 included.
        num_slots: state slots, slot 0 included.
        tags: keep prefix tags beside the rows.

    Attributes:
        tags: of all rows, if they were asked for.
        bytes_per_block, bytes_per_slot: of one block and of one slot, over all layers.
    """

    def __init__(
        self,
        config: HybridConfig,
        geometry: Geometry,
        num_blocks: int,
        num_slots: int,
        device: torch.device,
        *,
        tags: bool = False,
    ) -> None:
        self.geometry = geometry
        self.num_blocks, self.num_slots = num_blocks, num_slots
        self.block_size = geometry.block_size
        self.bytes_per_block = geometry.bytes_per_block
        self.bytes_per_slot = geometry.bytes_per_slot
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._quantises = config.qat and config.cache != "packed"  # packed rows do so themselves
        self._formats = {
            kind: row_format(config.cache, kind, getattr(config, dim))
            for kind, dim in DIMS.items()
            if kind == WINDOW or any(rows.kind == kind for rows in geometry.paged)
        }
        self._paged: dict[tuple[str, int], Tensor] = {}
        try:
            for rows in geometry.paged:
                stored = self._formats[rows.kind]
                self._paged[rows.kind, rows.layer] = torch.zeros(
                    (num_blocks * rows.rows_per_block, stored.width),
                    dtype=stored.dtype,
                    device=device,
                )
            self._slots = torch.zeros(
                (num_slots, geometry.bytes_per_slot), dtype=torch.uint8, device=device
            )
        except (MemoryError, RuntimeError) as error:  # the CPU allocator has no type of its own
            num_bytes = num_blocks * geometry.bytes_per_block + num_slots * geometry.bytes_per_slot
            raise UserError(
                f"out of memory for {num_blocks} blocks and {num_slots} state slots: "
                f"{num_bytes} bytes needed: {str(error).splitlines()[0]}",
                hint="less of num_blocks or max_num_seqs",
            ) from error
        self.tags = HybridTags(geometry, num_blocks, num_slots, device) if tags else None
        # Views are made once: a step asks for several in every layer.
        self._regions = {
            (part.kind, part.layer): self._view(part, self._dtype_of(part.kind))
            for part in geometry.slot
        }

    def _dtype_of(self, kind: str) -> torch.dtype:
        if kind in (OPEN, OPEN_INDEX):
            stored = self._formats[WINDOW].dtype
            return stored if stored == torch.float64 else torch.float32
        if kind == STREAMS:
            return self._dtype
        return torch.int64 if kind in (IDS, POSITIONS) else self._formats[kind].dtype

    def _view(self, region: Region, dtype: torch.dtype) -> Tensor:
        """[num_slots, num_rows, width] over the region's bytes of every slot."""
        part = self._slots[:, region.offset : region.offset + region.num_bytes].view(dtype)
        return part.view(self.num_slots, region.num_rows, -1)

    def region(self, kind: str, layer: int | None = None) -> Tensor:
        """A region of every slot, a typed view [num_slots, num_rows, width]."""
        return self._regions[kind, layer]

    def paged(self, kind: str, layer: int) -> Tensor:
        """The stored rows of a source, a view [num_blocks, rows_per_block, width]."""
        rows = self._paged[kind, layer]
        return rows.view(self.num_blocks, -1, rows.shape[1])

    def round_trip(self, kind: str, x: Tensor) -> Tensor:
        """`x` [n, dim] as it will be read back."""
        return self._formats[kind].decode(self._encode(kind, x), self._dtype)

    def _encode(self, kind: str, x: Tensor) -> Tensor:
        return self._formats[kind].encode(quantise(kind, x) if self._quantises else x)

    def _decode(self, kind: str, rows: Tensor) -> Tensor:
        stored: RowFormat = self._formats[kind]
        if stored.dtype == self._dtype:
            return rows
        flat = stored.decode(rows.reshape(-1, stored.width), self._dtype)
        return flat.view(*rows.shape[:-1], stored.dim)

    # -- paged rows ------------------------------------------------------------------------------

    def write_rows(self, kind: str, layer: int, rows: Tensor, x: Tensor) -> None:
        """Store `x` [n, dim] at `rows`, int64 [n], distinct: block * rows_per_block + row.

        Of several for row 0, which is nobody's, any is stored.
        """
        self._paged[kind, layer].index_copy_(0, rows, self._encode(kind, x))

    def read_rows(self, kind: str, layer: int, rows: Tensor) -> Tensor:
        """Rows one by one: `rows` int64 [..., k] -> [..., k, dim]."""
        found = self._paged[kind, layer].index_select(0, rows.flatten())
        return self._decode(kind, found.view(*rows.shape, -1))

    def read_blocks(self, kind: str, layer: int, blocks: Tensor) -> Tensor:
        """All rows of whole blocks: `blocks` int64 [n, b] -> [n, b * rows_per_block, dim]."""
        found = self.paged(kind, layer).index_select(0, blocks.flatten())
        return self._decode(kind, found.view(len(blocks), -1, found.shape[-1]))

    # -- state slots -----------------------------------------------------------------------------

    def write_window(self, layer: int, slots: Tensor, rows: Tensor, x: Tensor) -> None:
        """Store `x` [n, dim] in rings: `slots` and `rows` int64 [n], distinct as pairs."""
        self._regions[WINDOW, layer][slots, rows] = self._encode(WINDOW, x)

    def read_window(self, layer: int, slots: slice | Tensor) -> Tensor:
        """Whole rings, in ring order: `slots` int64 [n] -> [n, ring_len, dim].

        With a slice it is a view, if rows are stored as they are read. The caller masks the rows
        whose tag is not the position it wants.
        """
        rings = self._regions[WINDOW, layer]
        found = rings[slots] if isinstance(slots, slice) else rings.index_select(0, slots)
        return self._decode(WINDOW, found)

    def write_tags(self, slots: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Say which positions ring rows hold from now on, in the rings of all layers."""
        self._regions[POSITIONS, None][slots, rows, 0] = positions + 1

    def read_tags(self, slots: Tensor) -> Tensor:
        """Position + 1 of each ring row: int64 [n, ring_len]; 0 = never written."""
        return self._regions[POSITIONS, None].index_select(0, slots)[..., 0]

    # -- copies ----------------------------------------------------------------------------------

    def copy_blocks(self, pairs: Tensor) -> None:
        """Copy all rows of whole blocks; all sources are read before any destination is written.

        Args:
            pairs: int32 [C, 2], (source, destination); destinations distinct.
        """
        sources, destinations = pairs.long().unbind(1)
        for kind, layer in self._paged:
            blocks = self.paged(kind, layer)
            blocks.index_copy_(0, destinations, blocks.index_select(0, sources))
        if self.tags is not None:
            self.tags.copy_blocks(sources, destinations)

    def copy_states(self, pairs: Tensor) -> None:
        """Copy whole slots, as `copy_blocks` copies blocks."""
        sources, destinations = pairs.long().unbind(1)
        self._slots.index_copy_(0, destinations, self._slots.index_select(0, sources))
        if self.tags is not None:
            self.tags.copy_states(sources, destinations)

    def block_parts(self) -> list[Tensor]:
        """All that a block has: tensors [num_blocks, ...], tags among them."""
        rows = [self.paged(kind, layer) for kind, layer in self._paged]
        return rows if self.tags is None else [*rows, *self.tags.block_parts()]

    def slot_parts(self) -> list[Tensor]:
        """All that a state slot has: tensors [num_slots, ...], tags among them."""
        return [self._slots] if self.tags is None else [self._slots, *self.tags.slot_parts()]

    def erase(self, position: int, block_id: int, slot: int) -> None:
        """Zero what the token at `position` left behind: its row of each ring, the rows it closed.

        Args:
            block_id: of the block of that position.
            slot: the state slot of its request.
        """
        for (kind, _), rows in self._regions.items():
            if kind != POSITIONS:
                rows[slot, position % rows.shape[1]] = 0
        for part in self.geometry.paged:
            if (position + 1) % part.ratio == 0:
                row = position % self.block_size // part.ratio
                self.paged(part.kind, part.layer)[block_id, row] = 0
