"""Integer hashing of tensors, for randomness that belongs to what it is drawn for.

The function is the 32-bit finaliser `lowbias32` (C. Wellons, "Prospecting for Hash Functions",
2018; the constants are those of https://nullprogram.com/blog/2018/07/31/), a bijection:

    x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16

All of it is int32 arithmetic, which wraps modulo 2^32 in torch. Names that end in `_` work in
place, give their argument, and take int32 tensors of any shape that own their memory.

Knows nothing of what is hashed. Invariant: the bits are the same on every device.
"""

from __future__ import annotations

from torch import Tensor

LOW_32 = 0xFFFFFFFF


def signed(constant: int) -> int:
    """The int32 with the bits of an unsigned 32-bit constant."""
    return constant - (1 << 32) if constant >> 31 else constant


def unsigned(x: Tensor) -> Tensor:
    """int64, 0 to 2^32 - 1: the bits of an int32 tensor read as unsigned numbers."""
    return x.long().bitwise_and_(LOW_32)


def shift_xor_(x: Tensor, bits: int) -> Tensor:
    """x ^= x >>> bits. torch shifts int32 arithmetically: the mask clears the copied sign bits."""
    return x.bitwise_xor_((x >> bits).bitwise_and_(LOW_32 >> bits))


def middle_(x: Tensor) -> Tensor:
    """The middle of lowbias32: what stands between its first shift and its last."""
    x.mul_(0x7FEB352D)
    return shift_xor_(x, 15).mul_(signed(0x846CA68B))


def lowbias32_(x: Tensor) -> Tensor:
    """Hash each number."""
    return shift_xor_(middle_(shift_xor_(x, 16)), 16)
