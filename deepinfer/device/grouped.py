"""Products of groups of rows, each with the weight of its group: experts of a mixture.

    rows    [ 0 0 0 | 2 2 | 3 3 3 3 ]     ends = [3, 3, 5, 9]: group 1 has none

Two forms. On the CPU the host knows the ends, and each group that has rows is a product of its own.
On CUDA the host would have to wait for them: one kernel takes them from device memory.

Knows nothing of models. Invariant: a row is multiplied with the weight of its own group alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
GroupedLinear = Callable[[Tensor, Tensor], Tensor]


def one_by_one(linears: Sequence[Linear]) -> GroupedLinear:
    """See `deepinfer.device.base.Device.grouped_linear`; a function for each group."""

    def grouped(x: Tensor, ends: Tensor) -> Tensor:
        found, begin = [], 0
        for linear, end in zip(linears, ends.tolist(), strict=True):
            if end > begin:
                found.append(linear(x[begin:end]))
            begin = end
        return torch.cat(found)

    return grouped


def in_one_kernel(weights: Sequence[Tensor]) -> GroupedLinear:
    """The same by torch's grouped product; `weights` [out, in] are copied. Not for float64."""
    stacked = torch.stack(tuple(weights)).mT  # [groups, in, out]

    def grouped(x: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, stacked, offs=ends.int())

    return grouped
