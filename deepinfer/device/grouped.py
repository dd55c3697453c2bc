"""Products of groups of rows, each with the weight of its group: experts of a mixture.

    rows    [ 0 0 0 | 2 2 | 3 3 3 3 ]     ends = [3, 3, 5, 9]: group 1 has none

Two forms. One by one, each group that has rows is a product of its own, and the host must know the
ends: on CUDA it waits for them. In one kernel they are taken from device memory.

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
    """See `deepinfer.device.base.Device.grouped_linear`; a function for each group. There must be
    rows."""

    def grouped(x: Tensor, ends: Tensor) -> Tensor:
        found, begin = [], 0
        for linear, end in zip(linears, ends.tolist(), strict=True):
            if end > begin:
                found.append(linear(x[begin:end]))
            begin = end
        return torch.cat(found)

    return grouped


def has_kernel(weights: Tensor) -> bool:
    """Whether torch has one kernel for `weights` [G, out, in].

    In bfloat16, from Hopper GPUs on, for rows of whole 16 bytes. Elsewhere its grouped product
    waits for the host, or fails.
    """
    if not weights.is_cuda or weights.dtype != torch.bfloat16:
        return False
    if torch.cuda.get_device_capability(weights.device) < (9, 0):
        return False
    return weights.shape[1] % 8 == weights.shape[2] % 8 == 0


def in_one_kernel(weights: Tensor) -> GroupedLinear:
    """The same by torch's grouped product with `weights` [G, out, in]; see `has_kernel`."""
    transposed = weights.mT

    def grouped(x: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, transposed, offs=ends.int())

    return grouped
