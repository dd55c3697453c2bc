"""Rotary position embedding as complex multiplication (RoFormer, arXiv:2104.09864).

Channels 2i and 2i + 1 of a head are the real and imaginary part of pair i. Hugging Face pairs i
with i + head_dim / 2 instead; `deepinfer.models.weights` reorders the rows of the q and k
projections (and q_norm, k_norm) once at loading, which leaves every dot product as it was and
makes a rotation one multiplication over contiguous memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.config import ModelConfig


def rope_table(config: ModelConfig, num_positions: int, torch_device: torch.device) -> Tensor:
    """exp(i * position * theta^(-2j / head_dim)), complex64 [num_positions, head_dim / 2].

    Angles are float32 products, as in the reference implementations.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponent
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles).to(torch_device)


def apply_rope(x: Tensor, rope: Tensor, *, inplace: bool = False) -> Tensor:
    """Rotate `x` [..., head_dim] by `rope` [..., head_dim / 2] (broadcast); same dtype as `x`.

    With `inplace`, contiguous float32 `x` is overwritten; other dtypes have no complex form and are
    rotated in float32.
    """
    wide = x.float().contiguous()
    pairs = torch.view_as_complex(wide.view(*x.shape[:-1], -1, 2))
    rotated = pairs.mul_(rope) if inplace else pairs * rope
    return torch.view_as_real(rotated).flatten(-2).to(x.dtype)
