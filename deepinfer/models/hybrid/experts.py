"""Mixture of experts: k routed experts of each token, and the shared one.

The sum over a token's experts is computed in one of two ways:

    grouped   tokens sorted by expert, two grouped products
    all       every expert of every token in two products; an expert not chosen has gain 0

Few tokens that use most of the experts have all these weights read whichever way it is, and then
two large products are faster than many small ones.

Knows nothing of steps or requests. Invariant: both ways give a token the same, up to rounding, and
nothing of any other token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.device.base import Device
from deepinfer.models.hybrid.layer_plan import HybridConfig
from deepinfer.models.hybrid.layers import ALL, Record, linear_of, linears_of, wide
from deepinfer.models.hybrid.selection import top_indices
from deepinfer.models.hybrid.weights import MoeWeights

FEW_TOKENS = 32
"""Up to here a product takes as long as reading its weight, so that more rows cost little."""

CHOICES_PER_EXPERT = 2
"""With two choices per expert, all experts but 1 in e^2 are used."""


class Moe:
    """The experts of one layer."""

    def __init__(self, config: HybridConfig, weights: MoeWeights, device: Device) -> None:
        self._bias, self._tid2eid = weights.bias, weights.tid2eid
        self._num_routed, self._num_chosen = len(weights.router), config.num_experts_per_tok
        self._scaling, self._limit = config.routed_scaling_factor, config.swiglu_limit
        # The shared expert is one more, which every token has with weight 1.
        gates = [*weights.w1, weights.shared_w1]
        ups, downs = [*weights.w3, weights.shared_w3], [*weights.w2, weights.shared_w2]
        pairs = zip(gates, ups, strict=True)
        gate_up = torch.cat([torch.cat(pair) for pair in pairs])
        self._gate_up = device.grouped_linear(gate_up.view(len(gates), -1, gate_up.shape[1]))
        self._down = device.grouped_linear(torch.stack(downs))
        self._router = linear_of(device, weights.router)
        self._all_from = -(-CHOICES_PER_EXPERT * self._num_routed // self._num_chosen)
        if self._all_from <= FEW_TOKENS:
            self._of_input = linears_of(device, {"router": weights.router, "gate_up": gate_up})
            self._all_down = linear_of(device, torch.cat(downs, 1))
            self._shared_gain = wide(weights.router.new_zeros(len(downs)))
            self._shared_gain[-1] = 1

    def __call__(self, x: Tensor, token_ids: Tensor, record: Record | None) -> Tensor:
        """[T, D] of `x` [T, D]; `token_ids` int64 [T] choose the experts where a table does."""
        uses_all = self._all_from <= len(x) <= FEW_TOKENS
        made = self._of_input(x) if uses_all else {"router": self._router(x)}
        experts, weights = self._route(made["router"], token_ids)
        if record is not None:
            record("experts", ALL, experts)
            record("expert_weights", ALL, weights)
        if uses_all:
            return self._of_all(made["gate_up"], experts, weights)
        return self._grouped(x, experts, weights)

    def _of_all(self, gate_up: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        num_tokens, num_experts = len(gate_up), self._num_routed + 1
        gains = self._shared_gain.expand(num_tokens, -1).scatter_add(1, experts, weights)
        gate_up = gate_up.view(num_tokens, num_experts, -1)
        return self._all_down(self._activated(gate_up, gains[..., None]).flatten(1))

    def _grouped(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.new_zeros(self._num_routed + 1)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        counts[-1:].fill_(len(x))  # of the shared expert
        ends = counts.cumsum(0)
        tokens = torch.cat((order // experts.shape[1], torch.arange(len(x), device=x.device)))
        gains = torch.cat((weights.flatten()[order], weights.new_ones(len(x))))
        gate_up = self._gate_up(x.index_select(0, tokens), ends)
        out = self._down(self._activated(gate_up, gains[:, None]).to(x.dtype), ends)
        total = torch.zeros_like(wide(x)).index_add_(0, tokens, wide(out))
        return total.to(x.dtype)

    def _activated(self, gate_up: Tensor, gains: Tensor) -> Tensor:
        """gains * silu(gate) * up, both cut off (in place): [..., I] of [..., 2I], in at least
        float32."""
        gate, up = gate_up.chunk(2, dim=-1)
        gate.clamp_(max=self._limit)
        up.clamp_(-self._limit, self._limit)
        return F.silu(wide(gate)).mul_(up).mul_(gains)

    def _route(self, affinities: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Experts int64 [T, k], and their weights [T, k], of the router's products [T, E]."""
        scores = F.softplus(wide(affinities)).sqrt()
        if self._tid2eid is not None:
            experts = self._tid2eid.index_select(0, token_ids)
        else:
            assert self._bias is not None
            experts = top_indices(scores + self._bias, self._num_chosen)
        chosen = scores.gather(1, experts)
        return experts, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * self._scaling
