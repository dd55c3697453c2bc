"""The Qwen3 network over a paged cache: tokens of one step in, logits out.

RMSNorm before attention and MLP, RMSNorm on each q and k head, rotary embedding, grouped-query
attention, SwiGLU (Qwen3 technical report, arXiv:2505.09388).

Knows nothing of blocks or batching: `PagedAttention` reads and writes the cache. Invariant: a
token's row depends only on its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.device.base import Device
from deepinfer.models.attention import AttentionPlan, PagedAttention
from deepinfer.models.weights import LayerWeights, Qwen3Weights

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's weights, and its four products as the device does them."""

    weights: LayerWeights
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, weights: LayerWeights, device: Device) -> _Layer:
        products = (weights.qkv, weights.out, weights.gate_up, weights.down)
        return cls(weights, *map(device.linear, products))


class Qwen3:
    """Forward pass of one step."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Qwen3Weights,
        attention: PagedAttention,
        device: Device,
    ) -> None:
        self._weights = weights
        self._layers = [_Layer.of(layer, device) for layer in weights.layers]
        self._head = device.linear(weights.head)
        self._attention = attention
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._head_dim = config.head_dim
        self._eps = config.rms_norm_eps

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, plan: AttentionPlan, rows: Tensor | None) -> Tensor | None:
        """Compute a step: its K and V go into the cache.

        Args:
            token_ids: int32 or int64 [T].
            rows: int64 [M], tokens whose logits are wanted; None if none are.

        Returns:
            Logits [M, vocab_size] in the weights' dtype; None without `rows`.
        """
        x = F.embedding(token_ids, self._weights.embedding)
        for number, layer in enumerate(self._layers):
            x += self._attend(number, layer, plan, self._norm(x, layer.weights.input_norm))
            x += self._mlp(layer, self._norm(x, layer.weights.post_norm))
        if rows is None:
            return None
        last = self._norm(x.index_select(0, rows), self._weights.norm)
        logits: Tensor = self._head(last)
        return logits

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def _attend(self, number: int, layer: _Layer, plan: AttentionPlan, x: Tensor) -> Tensor:
        heads = layer.qkv(x).view(len(x), -1, self._head_dim)
        q, k, v = torch.split(heads, [self._heads, self._kv_heads, self._kv_heads], dim=1)
        q, k = self._norm(q, layer.weights.q_norm), self._norm(k, layer.weights.k_norm)
        return layer.out(self._attention.forward(number, plan, q, k, v))

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(x).chunk(2, dim=-1)
        return layer.down(F.silu(gate).mul_(up))
