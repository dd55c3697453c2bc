"""Index arithmetic of one step: which rows every layer reads and writes, worked out once.

Sequences with the same number of tokens Q are computed together, in tiles of n sequences x q
queries: decodes are one tile with q = 1, a long chunk is several with n = 1. What a tile's queries
see of their windows:

    Q + window - 1 <= ring_len    the step's rows are written first, and all is read from the ring
    otherwise                     the ring as it was before the step, and the chunk's own rows:

        ring   ... s-3 s-2 s-1 |                s: first position of the chunk
        own                    | s s+1 ... e-1      [max(0, b-W+1), e) for queries [b, e)

What a step's tokens need of earlier tokens (an open group's projections, ids of an n-gram) is a
`Lookback`; what later steps will need of them is a `Kept`.

Knows plans and geometry; no weights and no layers. Invariant: indices of one `Kept` or of one
`Closing.rows` are distinct.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.device.base import Device
from deepinfer.models.hybrid.cache import HybridCache
from deepinfer.models.hybrid.geometry import IDS, OPEN, Geometry
from deepinfer.models.hybrid.layer_plan import Compressor, HybridConfig
from deepinfer.plan import StepPlan

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MAX_QUERIES = 256
"""Queries of one tile and sequence: bounds a chunk's scores, and what its window part wastes."""

MAX_POSITIONS = 1 << 17
"""Positions of one tile's sequences, padding included: bounds the rows gathered at once."""


@dataclass(frozen=True, slots=True)
class Lookback:
    """Where the values of n wanted (sequence, position) pairs are.

    Attributes:
        tokens: int64 [n], the step's token; of another step: any.
        old: int64 [k], which of the n an earlier step had, or None if none; they are in row
            `old_rows` of state slot `old_slots`, int64 [k].
        missing: int64 [m], which of the n lie before the start of their sequence; None if none.
    """

    tokens: Tensor
    old: Tensor | None
    old_slots: Tensor | None
    old_rows: Tensor | None
    missing: Tensor | None

    def gather(self, new: Tensor, kept: Tensor) -> Tensor:
        """The n values, [n, width]; missing ones are any.

        Args:
            new: [T, width], of the step's tokens.
            kept: [num_slots, num_rows, width], before this step's are stored.
        """
        found = new.index_select(0, self.tokens)
        if self.old is not None:
            found.index_copy_(0, self.old, kept[self.old_slots, self.old_rows].to(found.dtype))
        return found


@dataclass(frozen=True, slots=True)
class Kept:
    """The last tokens of each sequence: `tokens` of the step go to `rows` of state slots `slots`.

    All int64 [k].
    """

    tokens: Tensor
    slots: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Closing:
    """The C compressed rows of one kind of compressor that the step makes.

    Attributes:
        rows: int64 [C], where they go: block * rows_per_block + row.
        positions: int64 [C], of their rotation: the first token of each group.
        members: of C * span tokens (two groups with overlap); None for ratio 1 without a gate,
            whose rows are the step's tokens in order.
        phases: int64 [T], place of each token in its group.
        kept: what of the step's projections later groups need; None without a gate.
    """

    rows: Tensor
    positions: Tensor
    members: Lookback | None
    phases: Tensor
    kept: Kept | None


@dataclass(frozen=True, slots=True)
class RowsOf:
    """What a tile sees of the compressed rows of one ratio.

    Attributes:
        num_rows: L, the most that any query sees, > 0.
        blocks: int64 [n, b], the blocks that hold them, in order of rows.
        rows_per_block: rows of each of these.
        visible: int64 [n, q], rows each query sees.
        hidden: bool [n, q, 1, L], True where a row is not visible to a query.
    """

    num_rows: int
    blocks: Tensor
    rows_per_block: int
    visible: Tensor
    hidden: Tensor

    def places(self, rows: Tensor) -> Tensor:
        """block * rows_per_block + row of compressed rows [n, ...]; those < 0 read row 0."""
        rows = rows.clamp(min=0)
        blocks = self.blocks.gather(1, (rows // self.rows_per_block).flatten(1)).view(rows.shape)
        return blocks * self.rows_per_block + rows % self.rows_per_block


@dataclass(frozen=True, slots=True)
class RingRead:
    """Rings that a tile's queries see.

    Attributes:
        before: read before this step's rows are written.
        hidden: bool [n, q, 1, ring_len], True where a row is not in a query's window, or not the
            row of that position.
    """

    before: bool
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Rows of the chunk itself: k `tokens` per sequence; `hidden` bool [1, q, 1, k]."""

    tokens: slice | Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """n sequences x q queries.

    Attributes:
        tokens: int64 [n * q] or a slice, the queries among the step's tokens.
        slots: int64 [n], state slots.
        rows: by ratio; without the ratios of which no query sees a row.
    """

    tokens: slice | Tensor
    num_seqs: int
    num_queries: int
    slots: Tensor
    ring: RingRead | None
    own: OwnRows | None
    rows: dict[int, RowsOf]

    def of(self, x: Tensor) -> Tensor:
        """The tile's part of `x` [T, ...]: [n, q, ...]."""
        part = x[self.tokens]
        return part.view(self.num_seqs, self.num_queries, *x.shape[1:])


@dataclass(frozen=True, slots=True)
class RingTags:
    """The tags of the rings read, on the host's side: what must be found where.

    Attributes:
        seqs: int64 [n], indices into the step's sequences.
        wanted: int64 [n, ring_len], the position each ring row must hold.
        read: bool [n, ring_len], whether anybody reads it.
    """

    seqs: Ints
    wanted: Ints
    read: Bools


@dataclass(slots=True)
class StepLayout:
    """What all layers of one step share. `token_ids`, `positions`: int64 [T]."""

    token_ids: Tensor
    positions: Tensor
    window: Kept
    closings: dict[Compressor, Closing]
    ids: Lookback | None
    kept_ids: Kept | None
    tiles: list[Tile] = field(default_factory=list)
    tags: list[RingTags] = field(default_factory=list)
    found_tags: list[Tensor] = field(default_factory=list)


class Layouts:
    """Makes the layout of each step of one model."""

    def __init__(self, config: HybridConfig, geometry: Geometry, device: Device) -> None:
        self._geometry = geometry
        self._device = device
        self._window = config.sliding_window
        self._ratios = sorted({layer.ratio for layer in config.layers if layer.ratio})
        self._compressors: dict[Compressor, int] = {}  # rows kept of open groups
        for layer in config.sources:
            assert layer.compressor is not None
            region = geometry.region(OPEN, layer.index)
            self._compressors[layer.compressor] = region.num_rows if region else 0
        ids = geometry.region(IDS)
        self._num_ids = ids.num_rows if ids else 0
        self._look_back = config.engram.look_back if config.engram else 0

    def of(self, plan: StepPlan) -> StepLayout:
        """The layout of `plan`, but for its tiles, which `add_tiles` makes."""
        positions = plan.positions.astype(np.int64)
        layout = StepLayout(
            token_ids=self._device.upload(plan.token_ids).long(),
            positions=self._device.upload(positions),
            window=self._kept(plan, self._geometry.ring_len),
            closings={
                compressor: self._closing(plan, compressor, num_rows)
                for compressor, num_rows in self._compressors.items()
            },
            ids=None,
            kept_ids=None,
        )
        if self._look_back:
            seqs = np.repeat(np.arange(plan.num_seqs), plan.num_scheduled)
            wanted = positions[:, None] - np.arange(self._look_back + 1)
            pairs = np.repeat(seqs, self._look_back + 1), wanted.ravel()
            layout.ids = self._lookback(plan, *pairs, self._num_ids)
            layout.kept_ids = self._kept(plan, self._num_ids)
        return layout

    # -- tokens of earlier and of later steps ----------------------------------------------------

    def _kept(self, plan: StepPlan, num_rows: int) -> Kept:
        """Each sequence's last `num_rows` tokens of the step, at position % num_rows."""
        last = plan.context_lens.repeat(plan.num_scheduled) - num_rows
        tokens = np.flatnonzero(plan.positions >= last)
        slots = plan.state_ids.repeat(plan.num_scheduled)[tokens]
        rows = plan.positions[tokens] % num_rows
        return Kept(self._upload(tokens), self._upload(slots), self._upload(rows))

    def _lookback(self, plan: StepPlan, seqs: Ints, positions: Ints, num_rows: int) -> Lookback:
        """Of (sequence, position) pairs, int64 [n] each."""
        first = plan.context_lens[seqs] - plan.num_scheduled[seqs]
        tokens = plan.query_start[seqs] + positions - first
        is_old = positions < first
        tokens[is_old] = 0
        old = np.flatnonzero(is_old & (positions >= 0))
        missing = np.flatnonzero(positions < 0)
        some = len(old) > 0
        return Lookback(
            self._upload(tokens),
            self._upload(old) if some else None,
            self._upload(plan.state_ids[seqs[old]]) if some else None,
            self._upload(positions[old] % num_rows) if some else None,
            self._upload(missing) if len(missing) else None,
        )

    def _closing(self, plan: StepPlan, compressor: Compressor, num_rows: int) -> Closing:
        """The rows whose last token is in the step."""
        ratio = compressor.ratio
        ends = np.flatnonzero((plan.positions + 1) % ratio == 0)
        seqs = np.repeat(np.arange(plan.num_seqs), plan.num_scheduled)[ends]
        rows = plan.positions[ends].astype(np.int64) // ratio
        members = kept = None
        if compressor.gated:
            first = (rows - compressor.overlap) * ratio
            span = ratio * (1 + compressor.overlap)
            wanted = first[:, None] + np.arange(span)
            members = self._lookback(plan, np.repeat(seqs, span), wanted.ravel(), num_rows)
            kept = self._kept(plan, num_rows)
        size = self._geometry.block_size
        blocks = plan.block_tables[seqs, plan.positions[ends] // size].astype(np.int64)
        per_block = max(size // ratio, 1)
        return Closing(
            rows=self._upload(blocks * per_block + rows % per_block),
            positions=self._upload(rows * ratio),
            members=members,
            phases=self._upload(plan.positions % ratio),
            kept=kept,
        )

    # -- tiles -----------------------------------------------------------------------------------

    def add_tiles(self, layout: StepLayout, plan: StepPlan, cache: HybridCache) -> None:
        """Make the tiles; tags of the rings are compared, and those of the step's rows written."""
        groups = self._groups(plan)
        whole = self._geometry.ring_len - self._window + 1  # tokens that leave the window whole
        for before in (True, False):
            for seqs, num_tokens in groups:
                if (num_tokens > whole) is before:
                    for begin in range(0, num_tokens, MAX_QUERIES):
                        end = min(begin + MAX_QUERIES, num_tokens)
                        tile = self._tile(layout, plan, seqs, (begin, end), before, cache)
                        layout.tiles.append(tile)
            if before:
                window = layout.window
                cache.write_tags(
                    window.slots, window.rows, layout.positions.index_select(0, window.tokens)
                )

    def _groups(self, plan: StepPlan) -> list[tuple[Ints, int]]:
        """Sequences with the same number of tokens, the longest first, within `MAX_POSITIONS`."""
        groups = []
        for num_tokens in np.unique(plan.num_scheduled).tolist():
            seqs = np.flatnonzero(plan.num_scheduled == num_tokens)
            seqs = seqs[np.argsort(-plan.context_lens[seqs], kind="stable")]
            while len(seqs):
                count = max(MAX_POSITIONS // int(plan.context_lens[seqs[0]]), 1)
                groups.append((seqs[:count], num_tokens))
                seqs = seqs[count:]
        return groups

    def _tile(
        self,
        layout: StepLayout,
        plan: StepPlan,
        seqs: Ints,
        queries: tuple[int, int],
        before: bool,
        cache: HybridCache,
    ) -> Tile:
        begin, end = queries
        first = (plan.context_lens - plan.num_scheduled)[seqs].astype(np.int64)
        positions = first[:, None] + np.arange(begin, end)
        slots = self._upload(plan.state_ids[seqs])
        ring = own = None
        if not before:
            last = plan.context_lens[seqs].astype(np.int64) - 1
            ring = self._ring(layout, seqs, slots, last, positions, False, cache)
        else:
            if begin < self._window - 1 and first.any():
                ring = self._ring(layout, seqs, slots, first - 1, positions, True, cache)
            own = self._own(plan, seqs, queries)
        return Tile(
            tokens=self._tokens(plan, seqs, begin, end),
            num_seqs=len(seqs),
            num_queries=end - begin,
            slots=slots,
            ring=ring,
            own=own,
            rows=self._rows(plan, seqs, positions),
        )

    def _tokens(self, plan: StepPlan, seqs: Ints, begin: int, end: int) -> slice | Tensor:
        """Tokens [begin, end) of each sequence's part of the step."""
        starts = plan.query_start[seqs].astype(np.int64)
        tokens = (starts[:, None] + np.arange(begin, end)).ravel()
        if tokens[-1] - tokens[0] == len(tokens) - 1 and (np.diff(tokens) == 1).all():
            return slice(int(tokens[0]), int(tokens[-1]) + 1)
        return self._upload(tokens)

    def _ring(
        self,
        layout: StepLayout,
        seqs: Ints,
        slots: Tensor,
        last: Ints,
        positions: Ints,
        before: bool,
        cache: HybridCache,
    ) -> RingRead:
        """The rings whose newest row is that of position `last`, int64 [n]."""
        ring_len = self._geometry.ring_len
        wanted = last[:, None] - (last[:, None] - np.arange(ring_len)) % ring_len
        at = positions[:, :, None]
        read: Bools = wanted[:, None] > np.maximum(at - self._window, -1)
        read &= wanted[:, None] <= at
        found = cache.read_tags(slots)
        is_right = found == self._upload(wanted + 1)
        hidden = ~(self._device.upload(read) & is_right[:, None])
        layout.tags.append(RingTags(seqs, wanted, np.any(read, axis=1)))
        layout.found_tags.append(found)
        return RingRead(before, hidden[:, :, None])

    def _own(self, plan: StepPlan, seqs: Ints, queries: tuple[int, int]) -> OwnRows:
        begin, end = queries
        low = max(begin - self._window + 1, 0)
        ages = np.arange(begin, end)[:, None] - np.arange(low, end)
        hidden = (ages < 0) | (ages >= self._window)
        return OwnRows(
            self._tokens(plan, seqs, low, end), self._device.upload(hidden[None, :, None])
        )

    def _rows(self, plan: StepPlan, seqs: Ints, positions: Ints) -> dict[int, RowsOf]:
        size, rows = self._geometry.block_size, {}
        for ratio in self._ratios:
            visible = (positions + 1) // ratio
            num_rows = int(visible.max())
            if not num_rows:
                continue
            stride, per_block = max(ratio // size, 1), max(size // ratio, 1)
            num_blocks = -(-num_rows // per_block)
            columns = np.arange(num_blocks) * stride + stride - 1
            blocks = plan.block_tables[seqs][:, columns]
            visible_rows = self._upload(visible)
            row = torch.arange(num_rows, device=visible_rows.device)
            rows[ratio] = RowsOf(
                num_rows,
                self._upload(blocks),
                per_block,
                visible_rows,
                (row >= visible_rows[..., None])[:, :, None],
            )
        return rows

    def _upload(self, array: NDArray[np.integer[Any]]) -> Tensor:
        tensor: Tensor = self._device.upload(np.ascontiguousarray(array, np.int64))
        return tensor
