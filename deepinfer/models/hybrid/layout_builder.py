"""Lays out a step: from a plan's sequences to the indices that its layers use.

Index arithmetic, once per step: on the host, and what it makes is uploaded. Where the device alone
knows where the sequences are (`StepInputs.back`), the same lines run on tensors there
(`deepinfer.models.hybrid.places`). Sizes are the plan's then too: there may be room for rows that
no query sees, and for groups that do not close.

Knows plans, geometry and the tags of ring rows; no weights. Invariant: whether a step may read a
ring row is decided here and nowhere else; nothing here makes the host wait for the device.
"""

from __future__ import annotations

from typing import Any, cast

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
from deepinfer.models.hybrid.places import Places, as_slice
from deepinfer.plan import Ints, StepPlan
from deepinfer.step_inputs import StepInputs

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

    def of(self, inputs: StepInputs) -> StepLayout:
        """Inside submitted work: the layout of a step.

        Tags of the rings it reads are compared, and those of its new rows are written.
        """
        places = Places(inputs, self._device)
        layout = StepLayout(
            token_ids=inputs.token_ids.long(),
            positions=places.on_device(places.positions),
            window=self._kept(places, self._geometry.ring_len),
            closings={
                compressor: self._closing(places, compressor, num_rows)
                for compressor, num_rows in self._compressors.items()
            },
            ids=None,
            kept_ids=None,
        )
        if self._look_back:
            wanted = places.positions[:, None] - places.numbers(self._look_back + 1)
            pairs = np.repeat(places.seqs, self._look_back + 1), wanted.ravel()
            least = int(places.earliest.min()) - self._look_back
            layout.ids = self._lookback(places, *pairs, least, self._num_ids)
            layout.kept_ids = self._kept(places, self._num_ids)
        if self._num_streams:
            tokens = places.last(self._geometry.ring_len)
            seqs, before = places.seqs[tokens], places.positions_of(tokens) - 1
            least = int(places.earliest.min()) - 1
            layout.streams = self._lookback(places, seqs, before, least, self._num_streams)
            layout.kept_streams = self._kept(places, self._num_streams)
        self._add_tiles(layout, places)
        return layout

    # -- tokens of earlier and of later steps ----------------------------------------------------

    def _kept(self, places: Places, num_rows: int) -> Kept:
        """Each sequence's last `num_rows` tokens of the step, at position % num_rows."""
        plan, tokens = places.plan, places.last(num_rows)
        return Kept(
            as_slice(tokens) or self._upload(tokens),
            self._upload(plan.state_ids[places.seqs[tokens]]),
            places.on_device(places.positions_of(tokens) % num_rows),
            num_rows,
        )

    def _lookback(
        self,
        places: Places,
        seqs: Ints,
        positions: Ints,
        least: int,
        num_rows: int,
        series: Ints | None = None,
        num_series: int = 1,
    ) -> Lookback:
        """Of (sequence, position) pairs, int64 [n] each; of each token's values one series.

        No position can be below `least`.
        """
        plan, of = places.plan, places.index(seqs)
        number = positions - places.firsts[of]  # among the tokens of its sequence
        is_old = number < 0
        tokens, rows = number.clip(min=0) + places.starts[of], positions % num_rows
        if series is not None:
            which = places.index(series)
            tokens, rows = tokens * num_series + which, rows * num_series + which
        missing = positions < 0 if least < 0 else None
        if places.moved:
            return Lookback(
                tokens=places.on_device(tokens),
                old=places.on_device(is_old),
                old_slots=self._upload(plan.state_ids[seqs]),
                old_rows=places.on_device(rows),
                missing=None if missing is None else places.on_device(missing),
                num_series=num_series,
            )
        old = np.flatnonzero(is_old if missing is None else is_old & ~missing)
        some, old_seqs = len(old) > 0, seqs[old]
        return Lookback(
            tokens=self._upload(tokens),
            old=self._upload(old) if some else None,
            old_slots=self._upload(plan.state_ids[old_seqs]) if some else None,
            old_rows=self._upload(rows[old]) if some else None,
            missing=None if missing is None else places.on_device(missing),
            old_seqs=old_seqs,
            old_positions=positions[old],
            num_series=num_series,
        )

    def _closing(self, places: Places, compressor: Compressor, num_rows: int) -> Closing:
        """The rows whose last token is in the step."""
        ratio, size = compressor.ratio, self._geometry.block_size
        seqs, ends, closes = places.ends_of_groups(ratio)
        rows = ends // ratio
        members = kept = None
        if compressor.gated and len(seqs):
            num_series = 1 + compressor.overlap
            span = ratio * num_series
            wanted = (rows + 1 - num_series)[:, None] * ratio + places.numbers(span)
            if closes is not None:
                wanted = wanted.clip(max=ends[:, None])  # of a group that is not whole: any
            series = np.tile(np.arange(span) // ratio, len(seqs))
            pairs = np.repeat(seqs, span), wanted.ravel()
            least = (int(places.earliest[seqs].min()) // ratio + 1 - num_series) * ratio
            members = self._lookback(places, *pairs, least, num_rows, series, num_series)
        if compressor.gated:
            kept = self._kept(places, num_rows)
        per_block = max(size // ratio, 1)
        stored = places.blocks(seqs, ends // size) * per_block + rows % per_block
        if closes is not None:
            stored = stored * closes  # nobody's row 0
        return Closing(
            rows=places.on_device(stored),
            positions=places.on_device(rows * ratio),
            members=members,
            phases=places.on_device(places.positions % ratio),
            kept=kept,
        )

    # -- tiles -----------------------------------------------------------------------------------

    def _add_tiles(self, layout: StepLayout, places: Places) -> None:
        """Those that read rings as they were before the step; the step's tags; the others."""
        groups = self._groups(places.plan)
        whole = self._geometry.ring_len - self._window + 1  # tokens that leave the window whole
        for before in (True, False):
            for seqs, num_tokens in groups:
                if (num_tokens > whole) is before:
                    for begin in range(0, num_tokens, MAX_QUERIES):
                        end = min(begin + MAX_QUERIES, num_tokens)
                        tile = self._tile(layout, places, seqs, (begin, end), before)
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
        places: Places,
        seqs: Ints,
        queries: tuple[int, int],
        before: bool,
    ) -> Tile:
        begin, end = queries
        plan, of = places.plan, places.index(seqs)
        first = places.firsts[of]
        positions = first[:, None] + places.numbers(end - begin, begin)
        num_tokens = int(plan.num_scheduled[seqs[0]])
        longest = int(plan.context_lens[seqs].max()) - num_tokens + end  # up to the last query
        slots = self._upload(plan.state_ids[seqs])
        ring = own = None
        if not before:
            ring = self._ring(layout, places, seqs, slots, places.lens[of] - 1, positions, False)
        else:
            if begin < self._window - 1 and longest > end:
                ring = self._ring(layout, places, seqs, slots, first - 1, positions, True)
            own = self._own(plan, seqs, queries)
        rows = self._rows(places, seqs, positions, longest)
        if end == num_tokens and not places.moved:
            for ratio, seen in rows.items():
                visible = (positions[:, -1] + 1) // ratio
                layout.rows_read.append(RowsRead(ratio, seqs, visible, seen))
        return Tile(
            tokens=self._tokens(plan, seqs, begin, end),
            num_seqs=len(seqs),
            num_queries=end - begin,
            slots=slots if before else as_slice(plan.state_ids[seqs]) or slots,
            ring=ring,
            own=own,
            rows=rows,
        )

    def _tokens(self, plan: StepPlan, seqs: Ints, begin: int, end: int) -> slice | Tensor:
        """Tokens [begin, end) of each sequence's part of the step."""
        starts = plan.query_start[seqs].astype(np.int64)
        tokens = (starts[:, None] + np.arange(begin, end)).ravel()
        return as_slice(tokens) or self._upload(tokens)

    def _ring(
        self,
        layout: StepLayout,
        places: Places,
        seqs: Ints,
        slots: Tensor,
        last: Ints,
        positions: Ints,
        before: bool,
    ) -> RingRead:
        """The rings whose newest row is that of position `last`, int64 [n]."""
        ring_len = self._geometry.ring_len
        wanted = last[:, None] - (last[:, None] - places.numbers(ring_len)) % ring_len
        at = positions[:, :, None]
        read = wanted[:, None] > (at - self._window).clip(min=-1)
        read &= wanted[:, None] <= at
        found, wanted_there = self._cache.read_tags(slots), places.on_device(wanted)
        hidden = ~(places.on_device(read) & (found == wanted_there + 1)[:, None])
        asked = cast(Bools, read.any(1))
        if places.moved:
            layout.asked_tags.append(wanted_there.where(places.on_device(asked), -1))
            wanted, asked = np.empty((0, ring_len), np.int64), np.empty((0, ring_len), np.bool_)
        layout.tags.append(RingTags(seqs, wanted, asked, before))
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

    def _rows(self, places: Places, seqs: Ints, positions: Ints, longest: int) -> dict[int, RowsOf]:
        """What queries at `positions` [n, q] see, of which no context is longer than `longest`."""
        size, rows = self._geometry.block_size, {}
        for ratio in self._ratios:
            num_rows = longest // ratio
            if not num_rows:
                continue
            stride, per_block = max(ratio // size, 1), max(size // ratio, 1)
            num_blocks = -(-num_rows // per_block)
            columns = np.arange(num_blocks) * stride + stride - 1
            blocks = places.plan.block_tables[seqs][:, columns]
            held_by = self._upload(blocks)
            visible = places.on_device((positions + 1) // ratio)
            row = torch.arange(num_blocks * per_block, device=held_by.device)
            rows[ratio] = RowsOf(
                num_rows,
                held_by,
                (held_by[:, :, None] * per_block + row[:per_block]).flatten(1),
                visible,
                (row[:num_rows] >= visible[..., None])[:, :, None],
            )
        return rows

    def _upload(self, array: NDArray[np.integer[Any]]) -> Tensor:
        tensor: Tensor = self._device.upload(np.ascontiguousarray(array, np.int64))
        return tensor
