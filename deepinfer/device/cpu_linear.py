"""The CPU's matrix product with a fixed weight: oneDNN with the weight packed once.

torch's own `F.linear` calls MKL, which on this product reaches 130 to 210 GFLOP/s where oneDNN,
with the weight laid out for it beforehand, reaches 320 to 520 (AMD EPYC with AVX-512, two cores;
shapes of the profile `cpu-small`, 16 and 1024 rows). It also gives a row the same bits whatever
other rows it is computed with. The two operators are those that torch's compiler calls; they are no
public API, so they are tried once on the weight itself, and MKL serves where they are missing or
differ.

Knows nothing of models. Invariant: the result is x @ weight.T in the weight's precision.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]

FEW_ROWS = 32  # up to here MKL is faster at weight @ x.T than at x @ weight.T
RELATIVE_TOLERANCE = 1e-5  # of the largest result: float32, summed in another order


def cpu_linear(weight: Tensor) -> Linear:
    """`x -> x @ weight.T` for x [rows, in]; `weight` [out, in] must not be written afterwards."""
    packed = _packed_linear(weight)
    return _mkl_linear(weight) if packed is None else packed


def _packed_linear(weight: Tensor) -> Linear | None:
    """oneDNN's product, or None where it cannot be had."""
    if weight.dtype != torch.float32:
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        multiply = torch.ops.mkldnn._linear_pointwise

        def linear(x: Tensor) -> Tensor:
            result: Tensor = multiply(x, packed, None, "none", [], "")
            return result

        trial = torch.ones(2, weight.shape[1])
        expected = F.linear(trial, weight)
        close = RELATIVE_TOLERANCE * weight.abs().sum(1).max()
        agrees = (linear(trial) - expected).abs().max() <= close
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return linear if agrees else None


def _mkl_linear(weight: Tensor) -> Linear:
    def linear(x: Tensor) -> Tensor:
        if x.shape[0] <= FEW_ROWS:
            return torch.mm(weight, x.t()).t()
        return F.linear(x, weight)

    return linear
