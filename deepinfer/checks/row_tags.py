"""One tag beside each KV row on the device: written, copied and compared where the rows are.

What happens to rows happens to their tags, inside the same submitted operation, so on the same
stream and in the same order. Each step writes the tags of its new rows and then compares, for every
request, the tags of exactly the slots that attention is about to gather with those that its own
tokens demand (`StepPlan.tags`); padding reads block 0, whose tag is 0.

    slots gathered      [ 40 41 42 43 | 96 97 | 0 ]       found      T0 T1 T2 T3 X4 X5 0
    of one request        its positions 0 ... 5  padding   expected   T0 T1 T2 T3 T4 T5 0

Knows neither requests nor networks. Sees which row is read, not what is in it: bytes that change
under their tag stay unseen. Invariant: nothing here waits for the device, and no tensor's size
depends on what is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer.device.base import Device, Readback
from deepinfer.plan import Int64, Ints, StepPlan, WrongRows

NUM_SHOWN = 8  # wrong rows of a step that come back one by one; the others are counted


class RowRead(NamedTuple):
    """Slots that attention gathers.

    Attributes:
        seqs: int [n], indices into the plan's S sequences: who reads them.
        position: of the first slot, the same for all.
        slots: int64 [n, length], or [1, length] where all read the same; 0 beyond a context.
    """

    seqs: Ints
    position: int
    slots: Tensor


class Comparison:
    """The outcome of one step's comparison on its way to the host."""

    def __init__(self, reads: Sequence[RowRead], readback: Readback) -> None:
        self._places = [(read.seqs, read.position, read.slots.shape[1]) for read in reads]
        self._readback = readback

    def result(self) -> WrongRows:
        """What was found; valid once an event recorded behind the step has passed."""
        report = self._readback.numpy()
        count = int(report[0])
        shown = min(count, NUM_SHOWN)
        where = report[1 : 1 + shown]
        ends = np.cumsum([len(seqs) * length for seqs, _, length in self._places])
        seqs, positions = [], []
        for index in where.tolist():
            part = int(np.searchsorted(ends, index, side="right"))
            readers, first, length = self._places[part]
            reader, offset = divmod(index - int(ends[part]) + len(readers) * length, length)
            seqs.append(int(readers[reader]))
            positions.append(first + offset)
        found = report[1 + NUM_SHOWN : 1 + NUM_SHOWN + shown].astype(np.int64)
        return WrongRows(count, np.array(seqs, np.int32), np.array(positions, np.int32), found)


class RowTags:
    """The tags of all slots of a KV pool, int64, 0 where nothing was written.

    Attributes:
        blocks: the same by blocks, int64 [num_blocks, block_size].
    """

    def __init__(self, num_blocks: int, block_size: int, torch_device: torch.device) -> None:
        self._tags = torch.zeros(num_blocks * block_size, dtype=torch.int64, device=torch_device)
        self.blocks = self._tags.view(num_blocks, block_size)
        self._ranks = torch.arange(1, NUM_SHOWN + 1, device=torch_device)

    def block(self, block_id: int) -> Tensor:
        """The tags of one block, a view [block_size]."""
        return self.blocks[block_id]

    def copy_blocks(self, pairs: Tensor) -> None:
        """Copy whole blocks' tags, (source, destination) int32 [C, 2]; reads all sources first."""
        sources, destinations = pairs.long().unbind(1)
        self.blocks.index_copy_(0, destinations, self.blocks.index_select(0, sources))

    @torch.inference_mode()
    def write_and_compare(
        self, plan: StepPlan, slots: Tensor, reads: Sequence[RowRead], device: Device
    ) -> Comparison:
        """Inside submitted work: tag the step's new rows, then compare all that it reads.

        Args:
            slots: int64 [T], where the new rows go.
            reads: what attention gathers, new rows included.
        """
        # One copy to the device for both: the new tags, then those expected.
        tags = device.upload(np.concatenate((new_tags(plan), *_expected(plan, reads))))
        num_new = len(plan.positions)
        self._tags.index_copy_(0, slots, tags[:num_new])
        gathered = [read.slots.expand(len(read.seqs), -1).reshape(-1) for read in reads]
        found = self._tags.index_select(0, torch.cat(gathered))
        report = first_wrong(found != tags[num_new:], found, self._ranks)
        return Comparison(reads, device.download(report))


def first_wrong(wrong: Tensor, found: Tensor, ranks: Tensor) -> Tensor:
    """How many rows are wrong, where the first of them are, and what was found there.

    Args:
        wrong: bool [n], n > 0.
        found: int64 [n], the tags.
        ranks: 1 ... `NUM_SHOWN`, on the device.

    Returns:
        int64 [1 + 2 * `NUM_SHOWN`]; places and tags behind the count's number are any.
    """
    num_wrong = wrong.cumsum(0)
    first = torch.searchsorted(num_wrong, ranks)
    shown = found.index_select(0, first.clamp(max=len(found) - 1))
    return torch.cat((num_wrong[-1:], first, shown))


def new_tags(plan: StepPlan) -> Int64:
    """Of the step's tokens, int64 [T]."""
    assert plan.tags is not None, "the plan was made with tags"
    new: Int64 = plan.tags[plan.token_seqs, plan.positions]
    return new


def _expected(plan: StepPlan, reads: Sequence[RowRead]) -> list[Int64]:
    """Of every row read, in the order of `reads`, int64 [n * length] each."""
    assert plan.tags is not None, "the plan was made with tags"
    return [
        plan.tags[read.seqs, read.position : read.position + read.slots.shape[1]].reshape(-1)
        for read in reads
    ]
