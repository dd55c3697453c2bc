"""The CPU's root mean square norm: torch's own is nine small kernels there, this one is five.

The mean of squares is that of a vector norm, which is one reduction, and what follows up to the
last products is one number per row.

Knows nothing of models. Invariant: the result is torch's `rms_norm`, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Norm = Callable[[Tensor], Tensor]


def cpu_rms_norm(weight: Tensor | None, eps: float) -> Norm:
    """`x -> x * rsqrt(mean(x^2) + eps) [* weight]` over the last dimension, in new memory."""
    # Floats of 16 bits need wider squares, which torch's form has.
    epsilons = {dtype: torch.tensor(eps, dtype=dtype) for dtype in (torch.float32, torch.float64)}

    def rms_norm(x: Tensor) -> Tensor:
        epsilon, size = epsilons.get(x.dtype), x.shape[-1]
        if epsilon is None:
            return torch.rms_norm(x, (size,), weight, eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        result = x * torch.addcmul(epsilon, length, length, value=1 / size).rsqrt_()
        return result if weight is None else result.mul_(weight)

    return rms_norm
