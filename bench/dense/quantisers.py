"""The cache quantisers of V4.1, from their formulas: quantise and dequantise in one go.

    window       blocks of 32, e4m3, scale a power of two:   2^ceil(log2(max(amax, 1e-4) / 448))
    index        blocks of 32, e2m1, scale a power of two:   2^ceil(log2(max(amax, 6 * 2^-126) / 6))
    compressed   blocks of 16, e2m1, scale in e4m3:          max(amax, 6 * 2^-9) / 6

Written apart from the engine's row formats, which are checked against it. Invariant: values and
scales are computed in float32, whatever dtype comes in, and the dtype goes out again.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX, E2M1_MAX = 448.0, 6.0


def quantised(kind: str, x: Tensor) -> Tensor:
    """`x` [.., dim] as a row of `kind` keeps it; `dim` a multiple of the block."""
    block = 16 if kind == "compressed" else 32
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // block, block)
    amax = blocks.abs().amax(-1, keepdim=True)
    if kind == "window":
        scale = _power_of_two_above(amax.clamp(min=1e-4) * (1 / E4M3_MAX))
        codes = _e4m3(blocks / scale)
    elif kind == "index":
        scale = _power_of_two_above(amax.clamp(min=E2M1_MAX * 2.0**-126) * (1 / E2M1_MAX))
        codes = _e2m1(blocks / scale)
    else:
        scale = _e4m3(amax.clamp(min=E2M1_MAX * 2.0**-9) / E2M1_MAX)
        codes = _e2m1(blocks / scale)
    return (codes * scale).flatten(-2).to(x.dtype)


def _e4m3(x: Tensor) -> Tensor:
    return _rounded(x.clamp(-E4M3_MAX, E4M3_MAX), bits=3, least_exponent=-6)


def _e2m1(x: Tensor) -> Tensor:
    return _rounded(x.clamp(-E2M1_MAX, E2M1_MAX), bits=1, least_exponent=0)


def _rounded(x: Tensor, bits: int, least_exponent: int) -> Tensor:
    """The nearest number with `bits` of mantissa behind the leading one, ties to the even code."""
    exponent = torch.frexp(x).exponent - 1  # |x| = 1.m * 2^exponent
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=least_exponent) - bits)
    return torch.round(x / step) * step


def _power_of_two_above(x: Tensor) -> Tensor:
    """The smallest power of two that is at least `x` > 0."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())
