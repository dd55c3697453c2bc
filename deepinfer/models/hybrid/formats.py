"""Formats of cache rows: plain floats, and e4m3 / e2m1 elements packed with their scales.

    kind         elements            scale of               the scale is rounded
    window       e4m3, |x| <= 448    32 elements, ue8m0     up
    compressed   e2m1, |x| <= 6      16 elements, e4m3      to nearest, so the largest may be cut
    index        e2m1, |x| <= 6      32 elements, ue8m0     up

    packed row   | data bytes | scale bytes |    two e2m1 to a byte, the even index in the low half

    ue8m0        2^(byte - 127); 255 is NaN
    e2m1         code 0..7 = 0 0.5 1 1.5 2 3 4 6, and a sign bit above

`quantise` is what V4.1 was trained with, whatever the cache stores; packed rows store exactly that.
A row with an infinity or NaN never decodes to finite numbers by chance: in window and index rows
its block becomes NaN, in compressed rows a NaN does and an infinity is cut like any large number.

Knows no cache and no layer. Invariant: `decode(encode(x)) == quantise(kind, x)` of packed rows, bit
for bit, and quantising a second time changes nothing, but for compressed blocks so small that their
scale is below e4m3's normal numbers (all elements under 6 * 2^-6).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from deepinfer.models.hybrid.geometry import COMPRESSED, INDEX, SCALE_BLOCK, WINDOW, row_bytes

E4M3_MAX, E2M1_MAX = 448.0, 6.0
# The least `amax` a scale is made from: zero blocks get a scale, and none is below the smallest.
_LEAST_AMAX = {WINDOW: 1e-4, COMPRESSED: E2M1_MAX * 2.0**-9, INDEX: E2M1_MAX * 2.0**-126}
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # a tie goes to the even code
E4M3 = torch.float8_e4m3fn
_STORED = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "packed": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How rows of `dim` elements are stored as rows of `width` elements of `dtype`."""

    cache: str
    kind: str
    dim: int
    dtype: torch.dtype
    width: int

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one stored row."""
        return self.width * self.dtype.itemsize

    def encode(self, x: Tensor) -> Tensor:
        """Rows to store, `dtype` [n, width], of `x`: float [n, dim]."""
        return (
            _pack(self.kind, *_parts(self.kind, x)) if self.cache == "packed" else x.to(self.dtype)
        )

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Stored rows, [n, width], as numbers: `dtype` [n, dim]."""
        if self.cache != "packed":
            return rows.to(dtype)
        return _numbers(self.kind, *_unpack(self.kind, rows, self.dim)).to(dtype)


def row_format(cache: str, kind: str, dim: int) -> RowFormat:
    """The format of rows of `dim` elements.

    Args:
        cache: `fp64`, `fp32`, `bf16` or `packed`.
        kind: `window`, `compressed` or `index`.

    Raises:
        UserError: an unknown name, or `dim` is not a multiple of the elements that share a scale.
    """
    num_bytes = row_bytes(cache, kind, dim)
    dtype = _STORED[cache]
    return RowFormat(cache, kind, dim, dtype, num_bytes // dtype.itemsize)


def quantise(kind: str, x: Tensor) -> Tensor:
    """`x` rounded to what a packed row of `kind` can hold; same shape and dtype.

    Args:
        x: float [..., dim]; dim a multiple of the elements that share a scale.
    """
    return _numbers(kind, *_parts(kind, x)).to(x.dtype)


def _parts(kind: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Element codes [..., blocks, block] and scale bytes [..., blocks] of `x` [..., dim]; uint8."""
    x = x.float().reshape(*x.shape[:-1], -1, SCALE_BLOCK[kind])
    # Compared, not clamped: a NaN must come through.
    amax = x.abs().amax(-1)
    amax = torch.where(amax < _LEAST_AMAX[kind], _LEAST_AMAX[kind], amax)
    if kind == COMPRESSED:
        scales = (amax / E2M1_MAX).clamp(max=E4M3_MAX).to(E4M3).view(torch.uint8)
    else:
        scales = _power_of_two_above(amax * (1 / (E4M3_MAX if kind == WINDOW else E2M1_MAX)))
    scaled = x / _scale_numbers(kind, scales).unsqueeze(-1)
    if kind == WINDOW:
        # torch makes NaN of what is beyond the largest number.
        codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).view(torch.uint8)
    else:
        codes = _e2m1_codes(scaled)
    return codes, scales


def _numbers(kind: str, codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., dim] of element codes and scale bytes."""
    if kind == WINDOW:
        elements = codes.view(E4M3).float()
    else:
        elements = _e2m1_table(codes.device)[codes.int()]
    return (elements * _scale_numbers(kind, scales).unsqueeze(-1)).flatten(-2)


def _power_of_two_above(x: Tensor) -> Tensor:
    """The ue8m0 byte of the least power of two that is not below `x`, float32 and normal."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return exponent.clamp(max=255).to(torch.uint8)


def _scale_numbers(kind: str, scales: Tensor) -> Tensor:
    """float32 of scale bytes."""
    if kind == COMPRESSED:
        return scales.view(E4M3).float()
    exponent = scales.int()
    return (exponent << 23).view(torch.float32).masked_fill(exponent == 255, torch.nan)


def _e2m1_codes(x: Tensor) -> Tensor:
    """The nearest codes, uint8 0..15; beyond the largest number the largest."""
    return torch.bucketize(x.abs(), _e2m1_borders(x.device)).to(torch.uint8) | (
        torch.signbit(x).to(torch.uint8) << 3
    )


def _pack(kind: str, codes: Tensor, scales: Tensor) -> Tensor:
    """Stored rows, uint8 [n, width]."""
    data = codes.flatten(-2)
    if kind in (COMPRESSED, INDEX):
        data = data[..., 0::2] | (data[..., 1::2] << 4)
    return torch.cat((data, scales), -1)


def _unpack(kind: str, rows: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Element codes and scale bytes of stored rows."""
    block = SCALE_BLOCK[kind]
    num_data = rows.shape[-1] - dim // block
    data, scales = rows[..., :num_data], rows[..., num_data:]
    if kind in (COMPRESSED, INDEX):
        data = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    return data.reshape(*rows.shape[:-1], -1, block), scales


@lru_cache
def _e2m1_table(device: torch.device) -> Tensor:
    """float32 [16]: the number of each code."""
    return torch.tensor([*_E2M1_VALUES, *(-value for value in _E2M1_VALUES)], device=device)


@lru_cache
def _e2m1_borders(device: torch.device) -> Tensor:
    """float32 [7]: a number's code is how many of these are below it.

    A tie above an odd code counts: that border is moved just below the tie.
    """
    borders = torch.tensor(_E2M1_BORDERS)
    below = torch.nextafter(borders, torch.zeros(()))
    return torch.where(torch.arange(7) % 2 == 1, below, borders).to(device)
