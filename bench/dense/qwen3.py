"""The dense Qwen3 reference: full causal attention, keys rotated when they are made.

Knows nothing of the engine; shares the weights' layout with it. Invariant: results have the dtype
of the weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.models.weights import LayerWeights, Qwen3Weights


class Qwen3Dense:
    """States and logits of a Qwen3 network for sequences of one length."""

    def __init__(self, weights: Qwen3Weights, config: ModelConfig) -> None:
        self._weights = weights
        self._config = config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._weights.embedding.device

    def states(self, token_ids: Tensor) -> Tensor:
        """States [B, N, hidden_size] before the final norm, of int64 `token_ids` [B, N]."""
        config = self._config
        x = self._weights.embedding[token_ids]
        cos, sin = _rotation(config, token_ids.shape[1], x.device)
        for layer in self._weights.layers:
            x = x + self._attention(layer, _rms_norm(x, layer.input_norm, config), cos, sin)
            gate, up = (_rms_norm(x, layer.post_norm, config) @ layer.gate_up.T).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ layer.down.T
        return x

    def _attention(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal grouped-query attention of whole sequences, [B, N, hidden_size]."""
        config = self._config
        num_kv, size = config.num_key_value_heads, config.head_dim
        split = [config.num_attention_heads * size, num_kv * size, num_kv * size]
        q, k, v = (
            part.reshape(*x.shape[:2], -1, size).transpose(1, 2)
            for part in torch.split(x @ layer.qkv.T, split, dim=-1)
        )
        q = _rotate(_rms_norm(q, layer.q_norm, config), cos, sin)
        k = _rotate(_rms_norm(k, layer.k_norm, config), cos, sin)
        repeat = config.num_attention_heads // num_kv
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(2) @ layer.out.T

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [.., vocab_size] of such states."""
        normed = _rms_norm(hidden, self._weights.norm, self._config)
        return normed @ self._weights.head.T


def _rms_norm(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    return (wide * scale).to(x.dtype) * weight


def _rotation(config: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim / 2] of position * theta^(-2i / head_dim)."""
    pair = torch.arange(config.head_dim // 2, dtype=torch.float32)
    frequency = 1.0 / config.rope_theta ** (2 * pair / config.head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency).to(device)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs (2i, 2i + 1) of [.., N, head_dim]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)
