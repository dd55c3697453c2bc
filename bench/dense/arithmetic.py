"""What both halves of the dense hybrid reference compute with.

Invariant: results have the dtype of the activations; a weight is cast where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Note = Callable[[str, Tensor], None]
"""Called with the name of a value between, and the value; names and shapes of the golden files."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`weight` [out, in] applied to `x` [.., in]."""
    return x @ weight.to(x.dtype).T


def unit(x: Tensor, eps: float) -> Tensor:
    """`x` over its root mean square in the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def best_of(scores: Tensor, num: int) -> Tensor:
    """bool, as `scores`: the `num` highest above -inf in each row; of equal ones the first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :num]
    best = torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, True)
    return best & (scores > -math.inf)
