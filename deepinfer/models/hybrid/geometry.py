"""Where every byte of a hybrid model's cache lies: rows in paged blocks, regions in state slots.

A block holds what belongs to `block_size` tokens, for each source layer:

    compressed rows   rows_per_block x bytes_per_row     ratio tokens to a row
    index keys        rows_per_block x bytes_per_row     one per compressed row, if it has an index

    Row j of ratio r covers tokens j*r .. (j+1)*r-1 and lies in the block of the last of them:

        block  table[((j+1)*r - 1) // B]      row  (((j+1)*r - 1) % B) // r

    B = 8, r = 2   tokens   0 1 | 2 3 | 4 5 | 6 7   8 9 | ...
                   block    0 . . . . . . . . . .   1 . .
                   row        0     1     2     3     0

    B = 4, r = 16  row 0 closes with token 15: row 0 of block 3; blocks 0, 1 and 2 hold none.

So a block whose tokens are all committed holds final rows only, and may be shared.

A slot holds what one running request needs besides, in this order:

    | rings of the stored layers | other rings | open groups | ids | streams | ring positions |
    |<------ stored_bytes ------>|                                                            |
    |<------------------------------ bytes_per_slot ----------------------------------------->|

    ring             ring_len window rows; position p in row p % ring_len
    open group       [kv | gate] of the tokens whose row is not made yet, fp32 (fp64 where the rows
                     are); p in row p % num_rows
    token ids        int64, what n-gram embeddings look back at; p in row p % num_rows
    streams          behind the last layer, if draft layers read them; p in row p % num_rows
    ring positions   int64, the position each ring row holds; one for all rings of the slot

Every part has rows for a whole step of 1 + `max_draft_tokens` tokens beside those looked back at,
so such a step can be written and then cut to any length without anything to undo.

Knows sizes and offsets; no tensors, no torch, no requests. Invariant: regions do not overlap, each
starts on a multiple of `ALIGNMENT` bytes, and the first `stored_bytes` of a slot are the stored
layers' rings and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from deepinfer.errors import UserError, check_int, check_name
from deepinfer.models.hybrid.layer_plan import HybridConfig, Layer

ALIGNMENT = 32  # bytes
CACHES = ("fp64", "fp32", "bf16", "packed")  # fp64: for comparison with other implementations
WINDOW, COMPRESSED, INDEX = "window", "compressed", "index"
OPEN, OPEN_INDEX, IDS, POSITIONS = "open", "open_index", "ids", "positions"
STREAMS = "streams"

SCALE_BLOCK = {WINDOW: 32, COMPRESSED: 16, INDEX: 32}  # elements that share a one-byte scale
_ELEMENT_BITS = {WINDOW: 8, COMPRESSED: 4, INDEX: 4}
_FLOAT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}
_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def row_bytes(cache: str, kind: str, dim: int) -> int:
    """Bytes of one row of `dim` elements.

    Args:
        cache: `fp64`, `fp32`, `bf16`, or `packed`: e4m3 or e2m1 elements, then their scales.
        kind: `window`, `compressed` or `index`.

    Raises:
        UserError: an unknown name, or `dim` cannot be split into blocks that share a scale.
    """
    check_name("cache", cache, CACHES)
    check_name("kind of row", kind, SCALE_BLOCK)
    if cache in _FLOAT_BYTES:
        return dim * _FLOAT_BYTES[cache]
    _check_width("cache: 'packed'", kind, dim)
    return dim * _ELEMENT_BITS[kind] // 8 + dim // SCALE_BLOCK[kind]


def _check_width(rounding: str, kind: str, dim: int) -> None:
    """Rows that are rounded fall into blocks that share a scale."""
    block = SCALE_BLOCK[kind]
    if dim % block:
        raise UserError(
            f"{rounding} {kind} rows have a scale for every {block} elements, and their width "
            f"{dim} is not a multiple of it",
            hint="fp32 and bf16 rows without `qat` can have any width",
        )


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of one kind that one source layer keeps in every block."""

    layer: int
    kind: str
    ratio: int
    rows_per_block: int
    bytes_per_row: int

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block that these rows take."""
        return self.rows_per_block * self.bytes_per_row


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a slot: `num_rows` rows, the first of them `offset` bytes from the slot's start.

    `layer` is None for what all layers share. `stored`: a store of finished requests keeps it.
    `draft`: only draft layers use it.
    """

    name: str
    layer: int | None
    kind: str
    offset: int
    num_rows: int
    bytes_per_row: int
    stored: bool = False
    draft: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of its rows, without the padding behind them."""
        return self.num_rows * self.bytes_per_row


@dataclass(frozen=True, slots=True)
class Geometry:
    """The cache of one model: `paged` rows of each block, regions of each `slot`.

    Attributes:
        block_size: token positions per block.
        ring_len: rows of a window ring.
        stored_bytes: of a slot, from its start, that a store would keep.
        bytes_per_slot: a multiple of `ALIGNMENT`; 0 if requests have no state.
    """

    block_size: int
    ring_len: int
    paged: tuple[PagedRows, ...]
    slot: tuple[Region, ...]
    stored_bytes: int
    bytes_per_slot: int

    @classmethod
    def of(cls, config: HybridConfig, block_size: int, ring_len: int | None = None) -> Geometry:
        """The geometry of a model.

        Args:
            config: the model.
            block_size: token positions per block.
            ring_len: rows of a ring if not `config.ring_len`: more, to keep older rows while a
                prompt is computed (`deepinfer.models.hybrid.stored`).

        Raises:
            UserError: a ratio and `block_size` of which neither divides the other, rows that cannot
                be rounded or packed, or a ring shorter than the model needs.
        """
        check_int("block_size", block_size, 1)
        if ring_len is None:
            ring_len = config.ring_len
        elif ring_len < config.ring_len:
            raise UserError(
                f"ring_len: {ring_len}; at least {config.ring_len}: the window, the newest token "
                f"and {config.max_draft_tokens} drafts"
            )
        if not 0 <= config.num_stored_layers <= config.num_hidden_layers:
            raise UserError(
                f"num_stored_layers: {config.num_stored_layers}; 0 to {config.num_hidden_layers}"
            )
        slot, stored_bytes, bytes_per_slot = _laid_out(_regions(config, ring_len))
        paged = tuple(rows for layer in config.sources for rows in _rows(config, layer, block_size))
        return cls(block_size, ring_len, paged, slot, stored_bytes, bytes_per_slot)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all source layers."""
        return sum(rows.bytes_per_block for rows in self.paged)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes of paged rows that one more token costs in the long run."""
        return sum((Fraction(rows.bytes_per_row, rows.ratio) for rows in self.paged), Fraction(0))

    @property
    def ring_bytes(self) -> int:
        """Bytes of one layer's ring."""
        return next(region.num_bytes for region in self.slot if region.kind == WINDOW)

    def rows(self, kind: str, layer: int) -> PagedRows | None:
        """The paged rows of a kind that a layer makes; None if it makes none."""
        found = (rows for rows in self.paged if (rows.kind, rows.layer) == (kind, layer))
        return next(found, None)

    def region(self, kind: str, layer: int | None = None) -> Region | None:
        """The region of a kind, of a layer or of all; None if the slot has none."""
        found = (part for part in self.slot if (part.kind, part.layer) == (kind, layer))
        return next(found, None)


def _rows(config: HybridConfig, layer: Layer, block_size: int) -> tuple[PagedRows, ...]:
    """What a source layer keeps in every block."""
    ratio = layer.ratio
    if block_size % ratio and ratio % block_size:
        every = math.lcm(*(source.ratio for source in config.sources))
        near = [size for size in (block_size // every * every, _ceil(block_size, every)) if size]
        raise UserError(
            f"block_size: {block_size} and the ratio {ratio} of layer {layer.index} do not divide "
            "one another",
            hint=f"a block would hold part of a row; {' or '.join(map(str, near))} "
            "fits every layer",
        )
    per_block = max(block_size // ratio, 1)
    kinds = [(COMPRESSED, config.head_dim)]
    if layer.index_keys is not None:
        kinds.append((INDEX, config.index_head_dim))
    return tuple(
        PagedRows(layer.index, kind, ratio, per_block, _row_bytes(config, kind, dim))
        for kind, dim in kinds
    )


def _row_bytes(config: HybridConfig, kind: str, dim: int) -> int:
    """Bytes of one row of a model, whose rows may be rounded without being stored packed."""
    num_bytes = row_bytes(config.cache, kind, dim)
    if config.qat:
        _check_width("qat: rounded", kind, dim)
    return num_bytes


def _regions(config: HybridConfig, ring_len: int) -> list[Region]:
    """The parts of a slot in order, not placed yet."""
    window = _row_bytes(config, WINDOW, config.head_dim)
    regions = [
        Region(
            f"layer {layer.index} window",
            layer.index,
            WINDOW,
            0,
            ring_len,
            window,
            stored=layer.index < config.num_stored_layers,
        )
        for layer in config.layers
    ]
    regions += [
        Region(f"draft layer {number} window", layer.index, WINDOW, 0, ring_len, window, draft=True)
        for number, layer in enumerate(config.draft_layers)
    ]
    for layer in config.sources:
        regions += _open_groups(config, layer)
    num_kept = 1 + config.max_draft_tokens  # beside those looked back at
    if config.engram is not None:
        regions.append(Region("token ids", None, IDS, 0, config.engram.look_back + num_kept, 8))
    if config.kept_width:
        num_bytes = config.kept_width * _DTYPE_BYTES[config.dtype]
        regions.append(Region("streams", None, STREAMS, 0, 1 + num_kept, num_bytes, draft=True))
    regions.append(Region("ring positions", None, POSITIONS, 0, ring_len, 8))
    return regions


def _open_groups(config: HybridConfig, layer: Layer) -> list[Region]:
    """The `[kv | gate]` rows of a source whose rows are pooled."""
    compressor = layer.compressor
    assert compressor is not None
    if not compressor.open_rows:
        return []
    num_rows = compressor.open_rows + config.max_draft_tokens
    number = max(_FLOAT_BYTES.get(config.cache, 4), 4)  # bytes
    row = number * 2 * (2 if compressor.overlap else 1)  # per channel: kv and gate, both series
    name = f"layer {layer.index} open group"
    regions = [Region(name, layer.index, OPEN, 0, num_rows, row * config.head_dim)]
    if layer.index_keys == "pooled":
        width = row * config.index_head_dim
        regions.append(Region(f"{name} of keys", layer.index, OPEN_INDEX, 0, num_rows, width))
    return regions


def _laid_out(regions: list[Region]) -> tuple[tuple[Region, ...], int, int]:
    """The regions one behind the other, the bytes of the stored ones, and of all."""
    placed, end, stored_bytes = [], 0, 0
    for region in regions:
        placed.append(replace(region, offset=end))
        end += _ceil(region.num_bytes, ALIGNMENT)
        if region.stored:
            stored_bytes = end
    return tuple(placed), stored_bytes, end


def _ceil(number: int, step: int) -> int:
    """The least multiple of `step` that is not below `number`."""
    return -(-number // step) * step
