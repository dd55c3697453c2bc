"""Prefix tags of all rows in blocks and slots: written, copied and compared where the rows are.

    rings          int64 [num_slots, ring_len]          of the position the ring row holds
    rest of slots  int64 [num_slots, num_rows]          of the position whose projections (open
                                                        groups), token id or streams a row holds
    ratio r        int64 [num_blocks, rows_per_block]   of the last position of the row's group

All rings of a slot hold the same positions, and so do open groups of as many rows, and the
compressed rows and index keys of all sources of one ratio: one tag stands for them. Before
attention a step writes the tags of its new rows and compares those of the rows it may read with
what the sequences' own tokens demand (`StepPlan.tags`):

    ring read before the step's rows are written;
    what a closing group, an n-gram or a draft
    layer takes from earlier steps                   compared before the step's tags are written
    other rings; all rows a sequence's last query
    sees, those of this step among them              compared behind

Knows neither requests nor networks. Sees which row is read, not what is in it. Invariant: nothing
here waits for the device, and no tensor's size depends on what is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer.checks.prefix_tags import POSITION_BITS
from deepinfer.checks.row_tags import NUM_SHOWN, first_wrong, new_tags
from deepinfer.device.base import Device, Readback
from deepinfer.models.hybrid.geometry import IDS, OPEN, STREAMS, Geometry
from deepinfer.models.hybrid.layout import Lookback, RingTags, RowsRead, StepLayout
from deepinfer.plan import Int64, Ints, StepPlan, WrongRows

_ANY = -1  # stands for the tag of a row that nobody reads
_POSITION_MASK = (1 << POSITION_BITS) - 1
_RING = "ring"
_NAMES = {OPEN: "open group", IDS: "token ids", STREAMS: "streams"}  # of what lies beside rings


class _Part(NamedTuple):
    """Rows compared together.

    Attributes:
        seqs: int [n], indices into the plan's sequences.
        positions: int64 [n, length] or [1, length].
        expected: int64 [n, length], `_ANY` where nobody reads.
        slots: int [n], the state slots they lie in; None for rows in blocks.
        name: of the part of a slot.
    """

    seqs: Ints
    positions: Ints
    expected: Int64
    slots: Ints | None = None
    name: str = ""


class Comparison:
    """The outcome of one step's comparison on its way to the host."""

    def __init__(self, parts: Sequence[_Part], readback: Readback) -> None:
        self._parts, self._readback = parts, readback
        self._ends = np.cumsum([part.expected.size for part in parts])

    def result(self) -> WrongRows:
        """What was found; valid once an event recorded behind the step has passed."""
        report = self._readback.numpy()
        count = int(report[0])
        shown = min(count, NUM_SHOWN)
        rows = [self._place(index) for index in report[1 : 1 + shown].tolist()]
        seqs, positions = np.array([row[:2] for row in rows], np.int32).reshape(shown, 2).T
        found = report[1 + NUM_SHOWN : 1 + NUM_SHOWN + shown].astype(np.int64)
        return WrongRows(count, seqs, positions, found, [row[2] for row in rows])

    def _place(self, index: int) -> tuple[int, int, str]:
        """Sequence and position of a row compared, and where in state slots; empty: in a block."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        part = self._parts[number]
        within = index - int(self._ends[number]) + part.expected.size
        reader, column = divmod(within, part.expected.shape[1])
        positions = np.broadcast_to(part.positions, part.expected.shape)
        place = "" if part.slots is None else f"{part.name} in slot {part.slots[reader]}"
        return int(part.seqs[reader]), int(positions[reader, column]), place


class HybridTags:
    """The tags of both pools, 0 where nothing was written.

    Attributes:
        rings: int64 [num_slots, ring_len].
        beside: of the rest of the slots, by kind and number of rows int64 [num_slots, num_rows].
        rows: by ratio int64 [num_blocks, rows_per_block].
    """

    def __init__(
        self, geometry: Geometry, num_blocks: int, num_slots: int, torch_device: torch.device
    ) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=torch_device)

        self.rings = zeros(num_slots, geometry.ring_len)
        self.beside = {
            (part.kind, part.num_rows): zeros(num_slots, part.num_rows)
            for part in geometry.slot
            if part.kind in _NAMES
        }
        per_block = {rows.ratio: rows.rows_per_block for rows in geometry.paged}
        self.rows = {ratio: zeros(num_blocks, num) for ratio, num in per_block.items()}
        self._ranks = torch.arange(1, NUM_SHOWN + 1, device=torch_device)

    def block(self, ratio: int, block_id: int) -> Tensor:
        """The tags of one block's compressed rows of a ratio, a view [rows_per_block]."""
        return self.rows[ratio][block_id]

    def block_parts(self) -> list[Tensor]:
        """The tags of blocks, tensors [num_blocks, ...]."""
        return list(self.rows.values())

    def slot_parts(self) -> list[Tensor]:
        """The tags of state slots, tensors [num_slots, ...]."""
        return [self.rings, *self.beside.values()]

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy whole blocks' tags, int64 [C] each; all sources are read first."""
        for tags in self.rows.values():
            tags.index_copy_(0, destinations, tags.index_select(0, sources))

    def copy_states(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy whole slots' tags, as `copy_blocks` copies blocks'."""
        for tags in self.slot_parts():
            tags.index_copy_(0, destinations, tags.index_select(0, sources))

    @torch.inference_mode()
    def write_and_compare(
        self, plan: StepPlan, layout: StepLayout, device: Device
    ) -> Comparison | None:
        """Inside submitted work: tag the step's new rows, compare all that it reads.

        None if it reads nothing: the first chunk of a prompt that closes no row.
        """
        rings = [
            (read, found)
            for before in (True, False)
            for read, found in zip(layout.tags, layout.found_tags, strict=True)
            if read.before is before
        ]
        beside = layout.beside_rings
        reads = [
            (kind, kept.num_rows, back)
            for kind, back, kept in beside
            if back is not None and len(back.old_seqs)
        ]
        parts = [_back_part(plan, kind, back) for kind, _, back in reads]
        parts += [_ring_part(plan, read) for read, _ in rings]
        parts += [_rows_part(plan, read) for read in layout.rows_read]
        # One copy to the device for all: new tags, those of closing rows, then those expected.
        new = new_tags(plan)
        closings = {key.ratio: closing.rows for key, closing in layout.closings.items()}
        closed = [new[(plan.positions + 1) % ratio == 0] for ratio in closings]
        expected = [part.expected.ravel() for part in parts]
        arrays = [new, *closed, *expected]
        uploaded = device.upload(np.concatenate(arrays)).split([len(array) for array in arrays])

        before = [back.old_of(self.beside[kind, num_rows]) for kind, num_rows, back in reads]
        before += [self._ring(*ring, plan, device) for ring in rings if ring[0].before]
        tagged = [(self.rings, layout.window)]
        tagged += [(self.beside[kind, kept.num_rows], kept) for kind, _, kept in beside]
        for tags, kept in tagged:
            tags[kept.slots, kept.rows] = kept.of(uploaded[0])
        for (ratio, rows), tags in zip(closings.items(), uploaded[1:], strict=False):
            self.rows[ratio].view(-1).index_copy_(0, rows, tags)
        if not parts:
            return None
        found = torch.cat(
            [
                *before,
                *(self._ring(*ring, plan, device) for ring in rings if not ring[0].before),
                *(self._rows(read) for read in layout.rows_read),
            ]
        )
        demanded = torch.cat(uploaded[1 + len(closed) :])
        wrong = (found != demanded) & (demanded != _ANY)
        return Comparison(parts, device.download(first_wrong(wrong, found, self._ranks)))

    def _ring(self, read: RingTags, positions: Tensor, plan: StepPlan, device: Device) -> Tensor:
        """Found in the rings of a read, int64 [n * ring_len]; a row whose position tag disagrees
        counts as found what that says."""
        tags = self.rings.index_select(0, device.upload(plan.state_ids[read.seqs]))
        return torch.where(positions == tags & _POSITION_MASK, tags, positions).flatten()

    def _rows(self, read: RowsRead) -> Tensor:
        """Found in the compressed rows of a read, int64 [n * num_rows], through its block table."""
        tags = self.rows[read.ratio].index_select(0, read.rows.blocks.flatten())
        return tags.view(len(read.seqs), -1)[:, : read.rows.num_rows].flatten()


def _ring_part(plan: StepPlan, read: RingTags) -> _Part:
    assert plan.tags is not None, "the plan was made with tags"
    expected = plan.tags[read.seqs[:, None], np.maximum(read.wanted, 0)]
    expected[~read.read] = _ANY
    return _Part(read.seqs, read.wanted, expected, plan.state_ids[read.seqs], _RING)


def _back_part(plan: StepPlan, kind: str, back: Lookback) -> _Part:
    """One row for each value; what several tokens want is expected, and counted, once."""
    assert plan.tags is not None, "the plan was made with tags"
    seqs, positions = back.old_seqs, back.old_positions
    expected = np.full((len(seqs), 1), _ANY, np.int64)
    _, once = np.unique(seqs * plan.tags.shape[1] + positions, return_index=True)
    expected[once, 0] = plan.tags[seqs[once], positions[once]]
    return _Part(seqs, positions[:, None], expected, plan.state_ids[seqs], _NAMES[kind])


def _rows_part(plan: StepPlan, read: RowsRead) -> _Part:
    assert plan.tags is not None, "the plan was made with tags"
    rows = np.arange(read.rows.num_rows)
    positions = (rows + 1) * read.ratio - 1
    expected = plan.tags[read.seqs[:, None], positions]
    expected[rows >= read.visible[:, None]] = _ANY
    return _Part(read.seqs, positions[None], expected)
