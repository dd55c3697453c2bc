"""Lays out a step: from a plan's sequences to the indices that its layers use.

Index arithmetic on the host, once per step; what it makes is uploaded.

Knows plans, geometry and the tags of ring rows; no weights. Invariant: whether a step may read a
ring row is decided here and nowhere else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.device.base import Device
from deepinfer.models.hybrid.cache import HybridCache
from deepinfer.models.hybrid.geometry import IDS, OPEN, STREAMS
from deepinfer.models.hybrid.layer_plan import Compressor, HybridConfig
from deepinfer.models.hybrid.layout import (
    Bools,
    Closing,
    Ints,
    Kept,
    Lookback,
    OwnRows,
    RingRead,
    RingTags,
    RowsOf,
    RowsRead,
    StepLayout,
    Tile,
)
from deepinfer.plan import StepPlan

MAX_QUERIES = 256
"""Queries of one tile and sequence: bounds a chunk's scores, and what its window part wastes."""

MAX_POSITIONS = 1 << 17
"""Positions of one tile's sequences, padding included: bounds the rows gathered at once."""


class Layouts:
    """Makes the layout of each step of one model."""

    def __init__(self, config: HybridConfig, cache: HybridCache, device: Device) -> None:
        self._cache, self._device = cache, device
        self._geometry = geometry = cache.geometry
        self._window = config.sliding_window
        self._ratios = sorted({layer.ratio for layer in config.layers if layer.ratio})
        self._compressors: dict[Compressor, int] = {}  # rows kept of open groups
        for layer in config.sources:
            assert layer.compressor is not None
            region = geometry.region(OPEN, layer.index)
            self._compressors[layer.compressor] = region.num_rows if region else 0
        streams = geometry.region(STREAMS)
        self._num_streams = streams.num_rows if streams else 0
        ids = geometry.region(IDS)
        self._num_ids = ids.num_rows if ids else 0
        self._look_back = config.engram.look_back if config.engram else 0

    def of(self, plan: StepPlan) -> StepLayout:
        """Inside submitted work: the layout of `plan`.

        Tags of the rings it reads are compared, and those of its new rows are written.
        """
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
        if self._num_streams:
            tokens = self._kept_tokens(plan, self._geometry.ring_len)
            seqs = np.repeat(np.arange(plan.num_seqs), plan.num_scheduled)[tokens]
            layout.streams = self._lookback(plan, seqs, positions[tokens] - 1, self._num_streams)
            layout.kept_streams = self._kept(plan, self._num_streams)
        self._add_tiles(layout, plan)
        return layout

    # -- tokens of earlier and of later steps ----------------------------------------------------

    def _kept(self, plan: StepPlan, num_rows: int) -> Kept:
        """Each sequence's last `num_rows` tokens of the step, at position % num_rows."""
        tokens = self._kept_tokens(plan, num_rows)
        slots = plan.state_ids.repeat(plan.num_scheduled)[tokens]
        rows = plan.positions[tokens] % num_rows
        return Kept(
            _as_slice(tokens) or self._upload(tokens),
            self._upload(slots),
            self._upload(rows),
            num_rows,
        )

    def _kept_tokens(self, plan: StepPlan, num_rows: int) -> Ints:
        last = plan.context_lens.repeat(plan.num_scheduled) - num_rows
        return np.flatnonzero(plan.positions >= last)

    def _lookback(
        self,
        plan: StepPlan,
        seqs: Ints,
        positions: Ints,
        num_rows: int,
        series: Ints | int = 0,
        num_series: int = 1,
    ) -> Lookback:
        """Of (sequence, position) pairs, int64 [n] each; of each token's values one series."""
        first = plan.context_lens[seqs] - plan.num_scheduled[seqs]
        tokens: Ints = plan.query_start[seqs] + positions - first
        is_old = positions < first
        tokens[is_old] = 0
        old = np.flatnonzero(is_old & (positions >= 0))
        missing = np.flatnonzero(positions < 0)
        some, old_seqs, old_positions = len(old) > 0, seqs[old], positions[old]
        which = np.broadcast_to(np.asarray(series, np.int64), len(seqs))
        return Lookback(
            self._upload(tokens * num_series + which),
            self._upload(old) if some else None,
            self._upload(plan.state_ids[old_seqs]) if some else None,
            self._upload(old_positions % num_rows * num_series + which[old]) if some else None,
            self._upload(missing) if len(missing) else None,
            old_seqs,
            old_positions,
            num_series,
        )

    def _closing(self, plan: StepPlan, compressor: Compressor, num_rows: int) -> Closing:
        """The rows whose last token is in the step."""
        ratio = compressor.ratio
        ends = np.flatnonzero((plan.positions + 1) % ratio == 0)
        seqs = np.repeat(np.arange(plan.num_seqs), plan.num_scheduled)[ends]
        rows = plan.positions[ends].astype(np.int64) // ratio
        members = kept = None
        if compressor.gated and len(ends):
            num_series = 1 + compressor.overlap
            span = ratio * num_series
            wanted = (rows - compressor.overlap)[:, None] * ratio + np.arange(span)
            series = np.tile(np.arange(span) // ratio, len(rows))
            pairs = np.repeat(seqs, span), wanted.ravel()
            members = self._lookback(plan, *pairs, num_rows, series, num_series)
        if compressor.gated:
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

    def _add_tiles(self, layout: StepLayout, plan: StepPlan) -> None:
        """Those that read rings as they were before the step; the step's tags; the others."""
        groups = self._groups(plan)
        whole = self._geometry.ring_len - self._window + 1  # tokens that leave the window whole
        for before in (True, False):
            for seqs, num_tokens in groups:
                if (num_tokens > whole) is before:
                    for begin in range(0, num_tokens, MAX_QUERIES):
                        end = min(begin + MAX_QUERIES, num_tokens)
                        tile = self._tile(layout, plan, seqs, (begin, end), before)
                        layout.tiles.append(tile)
            if before:
                window = layout.window
                self._cache.write_tags(window.slots, window.rows, window.of(layout.positions))

    def _groups(self, plan: StepPlan) -> list[tuple[Ints, int]]:
        """Sequences with the same number of tokens, the longest first, within `MAX_POSITIONS`."""
        groups: list[tuple[Ints, int]] = []
        for num_tokens in np.unique(plan.num_scheduled).tolist():
            seqs = np.flatnonzero(plan.num_scheduled == num_tokens)
            seqs = seqs[np.argsort(-plan.context_lens[seqs], kind="stable")]
            while len(seqs):
                count = max(MAX_POSITIONS // int(plan.context_lens[seqs[0]]), 1)
                groups.append((np.sort(seqs[:count]), num_tokens))  # a slice, where it can be
                seqs = seqs[count:]
        return groups

    def _tile(
        self,
        layout: StepLayout,
        plan: StepPlan,
        seqs: Ints,
        queries: tuple[int, int],
        before: bool,
    ) -> Tile:
        begin, end = queries
        first = (plan.context_lens - plan.num_scheduled)[seqs].astype(np.int64)
        positions = first[:, None] + np.arange(begin, end)
        slots = self._upload(plan.state_ids[seqs])
        ring = own = None
        if not before:
            last = plan.context_lens[seqs].astype(np.int64) - 1
            ring = self._ring(layout, seqs, slots, last, positions, False)
        else:
            if begin < self._window - 1 and first.any():
                ring = self._ring(layout, seqs, slots, first - 1, positions, True)
            own = self._own(plan, seqs, queries)
        rows = self._rows(plan, seqs, positions)
        if end == plan.num_scheduled[seqs[0]]:
            for ratio, seen in rows.items():
                visible = (positions[:, -1] + 1) // ratio
                layout.rows_read.append(RowsRead(ratio, seqs, visible, seen))
        return Tile(
            tokens=self._tokens(plan, seqs, begin, end),
            num_seqs=len(seqs),
            num_queries=end - begin,
            slots=slots if before else _as_slice(plan.state_ids[seqs]) or slots,
            ring=ring,
            own=own,
            rows=rows,
        )

    def _tokens(self, plan: StepPlan, seqs: Ints, begin: int, end: int) -> slice | Tensor:
        """Tokens [begin, end) of each sequence's part of the step."""
        starts = plan.query_start[seqs].astype(np.int64)
        tokens = (starts[:, None] + np.arange(begin, end)).ravel()
        return _as_slice(tokens) or self._upload(tokens)

    def _ring(
        self,
        layout: StepLayout,
        seqs: Ints,
        slots: Tensor,
        last: Ints,
        positions: Ints,
        before: bool,
    ) -> RingRead:
        """The rings whose newest row is that of position `last`, int64 [n]."""
        ring_len = self._geometry.ring_len
        wanted = last[:, None] - (last[:, None] - np.arange(ring_len)) % ring_len
        at = positions[:, :, None]
        read: Bools = wanted[:, None] > np.maximum(at - self._window, -1)
        read &= wanted[:, None] <= at
        found = self._cache.read_tags(slots)
        is_right = found == self._upload(wanted + 1)
        hidden = ~(self._device.upload(read) & is_right[:, None])
        layout.tags.append(RingTags(seqs, wanted, np.any(read, axis=1), before))
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
            held_by, visible_rows = self._upload(blocks), self._upload(visible)
            row = torch.arange(num_blocks * per_block, device=held_by.device)
            rows[ratio] = RowsOf(
                num_rows,
                held_by,
                (held_by[:, :, None] * per_block + row[:per_block]).flatten(1),
                visible_rows,
                (row[:num_rows] >= visible_rows[..., None])[:, :, None],
            )
        return rows

    def _upload(self, array: NDArray[np.integer[Any]]) -> Tensor:
        tensor: Tensor = self._device.upload(np.ascontiguousarray(array, np.int64))
        return tensor


def _as_slice(numbers: NDArray[np.integer[Any]]) -> slice | None:
    """The same numbers, not none, as a slice; None unless each is the one before plus 1."""
    first = int(numbers[0])
    if (numbers == np.arange(first, first + len(numbers))).all():
        return slice(first, first + len(numbers))
    return None
