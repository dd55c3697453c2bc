"""Where the sequences of a step are: as planned on the host, or as the device alone knows.

One interface over arrays on the host and tensors on the device, so that a layout is built by the
same lines from either. Knows plans; no layers. Invariant: nothing here makes the host wait for the
device.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.device.base import Device
from deepinfer.models.hybrid.layout import Bools
from deepinfer.plan import Ints
from deepinfer.step_inputs import StepInputs


class Places:
    """Where the sequences of a step are.

    What depends on it are arrays on the host, or with `moved` tensors on the device, int64 either
    way. The types say arrays: who computes with them uses what the two have in common, indexes them
    with `index(...)` alone, and takes counts and sizes from the plan.

    Attributes:
        plan: with `moved`, its positions are not where the sequences are.
        moved: whether only the device knows.
        seqs: int64 [T], on the host, whose each token is.
        positions: [T], of the tokens.
        lens, firsts, starts: [S], tokens each sequence has after the step; the position of its
            first one of the step; which of the step's tokens that is.
        earliest: int [S], on the host: the first one is at no earlier position.
    """

    def __init__(self, inputs: StepInputs, device: Device) -> None:
        self.plan = plan = inputs.plan
        self.moved = inputs.back is not None
        self._device = device
        self.seqs = plan.token_seqs
        self.starts: Ints = self.index(plan.query_start[:-1])
        if not self.moved:
            self.positions: Ints = plan.positions.astype(np.int64)
            self.lens: Ints = plan.context_lens.astype(np.int64)
            self.firsts: Ints = self.lens - plan.num_scheduled
            self.earliest = self.firsts
            return
        assert plan.tags is None, "tags are of positions that the host knows"
        lens = inputs.really(plan.context_lens, np.arange(plan.num_seqs), device)
        self.lens, self.firsts = cast(Ints, lens), lens - self.index(plan.num_scheduled)
        positions = inputs.really(plan.positions, self.seqs, device)
        self.positions = cast(Ints, positions)
        self._tables = self.index(plan.block_tables)
        assert plan.ahead is not None, "only plans made ahead are moved"
        self.earliest = plan.context_lens - plan.num_scheduled - plan.ahead.num_unsure

    def index(self, numbers: Ints) -> Ints:
        """Numbers the plan fixes, to compute with and to index with."""
        if not self.moved:
            return numbers
        return cast(Ints, self._device.upload(np.ascontiguousarray(numbers, np.int64)))

    def numbers(self, num: int, begin: int = 0) -> Ints:
        """`num` numbers from `begin` on."""
        if not self.moved:
            return np.arange(begin, begin + num)
        numbers = torch.arange(begin, begin + num, device=self._device.torch_device)
        return cast(Ints, numbers)

    def on_device(self, values: NDArray[Any]) -> Tensor:
        """Any of them as a tensor."""
        if self.moved:
            return cast(Tensor, values)
        tensor: Tensor = self._device.upload(np.ascontiguousarray(values))
        return tensor

    def last(self, num: int) -> Ints:
        """Each sequence's last `num` tokens, on the host: which of the step's these are."""
        plan = self.plan
        last = plan.context_lens.repeat(plan.num_scheduled) - num
        return np.flatnonzero(plan.positions >= last)  # the same wherever the sequence is

    def positions_of(self, tokens: Ints) -> Ints:
        """The positions of some tokens; the numbers are on the host."""
        part = as_slice(tokens) if self.moved else None
        return self.positions[self.index(tokens) if part is None else part]

    def blocks(self, seqs: Ints, columns: Ints) -> Ints:
        """Entries of the block tables, [n]; `seqs` on the host."""
        if not self.moved:
            return self.plan.block_tables[seqs, columns].astype(np.int64)
        return self._tables[self.index(seqs), columns]

    def ends_of_groups(self, ratio: int) -> tuple[Ints, Ints, Bools | None]:
        """The last positions of groups of `ratio` that close in the step.

        Of a moved sequence with Q tokens as many as can close: at most ceil(Q / ratio), and no more
        than end in all the positions where it may be.

        Returns:
            Of each group its sequence, on the host, where it ends, and whether it closes at all;
            None if all do. One that does not "ends" at the last token of its sequence.
        """
        plan = self.plan
        if not self.moved:
            tokens = np.flatnonzero((plan.positions + 1) % ratio == 0)
            return self.seqs[tokens], self.positions[tokens], None
        most = -(-plan.num_scheduled // ratio)
        counts = np.minimum(most, plan.context_lens // ratio - self.earliest // ratio)
        seqs = np.repeat(np.arange(plan.num_seqs), counts)
        number = np.arange(len(seqs)) - np.repeat(counts.cumsum() - counts, counts)
        of = self.index(seqs)
        first, last = self.firsts[of], self.lens[of] - 1
        ends: Ints = first + (-1 - first) % ratio + self.index(number * ratio)
        return seqs, ends.clip(max=last), ends <= last


def as_slice(numbers: NDArray[np.integer[Any]]) -> slice | None:
    """The same numbers, not none, as a slice; None unless each is the one before plus 1."""
    first = int(numbers[0])
    if (numbers == np.arange(first, first + len(numbers))).all():
        return slice(first, first + len(numbers))
    return None
