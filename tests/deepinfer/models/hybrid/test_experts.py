"""Experts: the formula, whichever way the sum is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.models.hybrid.experts import FEW_TOKENS, Moe
from deepinfer.models.hybrid.layer_plan import v41_config
from deepinfer.models.hybrid.loading import draw_weights
from deepinfer.models.hybrid.weights import MoeWeights
from tests.hybrid_configs import v41_raw

CONFIG = v41_config(v41_raw([0], sources=[], selectors=[], publisher=None))
WEIGHTS = draw_weights(CONFIG).layers[0].moe


def one_expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    limit = CONFIG.swiglu_limit
    inner = F.silu((gate @ x).clamp(max=limit)) * (up @ x).clamp(-limit, limit)
    return down @ inner


def by_hand(weights: MoeWeights, x: Tensor, token_id: int) -> Tensor:
    """Of one token, [D]: its experts one after the other."""
    scores = F.softplus(weights.router @ x).sqrt()
    if weights.tid2eid is not None:
        chosen = weights.tid2eid[token_id]
    else:
        assert weights.bias is not None
        chosen = (scores + weights.bias).topk(CONFIG.num_experts_per_tok).indices
    gains = scores[chosen] / scores[chosen].sum() * CONFIG.routed_scaling_factor
    total = one_expert(x, weights.shared_w1, weights.shared_w3, weights.shared_w2)
    for expert, gain in zip(chosen.tolist(), gains, strict=True):
        parts = weights.w1[expert], weights.w3[expert], weights.w2[expert]
        total = total + gain * one_expert(x, *parts)
    return total


def hashed() -> MoeWeights:
    """Chosen by token id: of the first one the same expert twice."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(len(WEIGHTS.router), (50, 2), generator=generator)
    table[0] = 3
    return replace(WEIGHTS, bias=None, tid2eid=table)


@pytest.mark.parametrize("num_tokens", [1, 5, 6, 9, FEW_TOKENS, FEW_TOKENS + 1])
@pytest.mark.parametrize("weights", [WEIGHTS, hashed()], ids=["bias", "hash"])
def test_few_and_many_tokens_get_the_formula(
    weights: MoeWeights, num_tokens: int, device: SteppedCpuDevice
) -> None:
    """From six tokens on, two choices for each of six experts, all experts are computed at once;
    above `FEW_TOKENS` only those chosen."""
    x, ids = torch.randn(num_tokens, CONFIG.hidden_size), torch.arange(num_tokens)
    ours = Moe(CONFIG, weights, device)(x, ids, None)
    expected = torch.stack([by_hand(weights, x[i], i) for i in range(num_tokens)])
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


def test_experts_of_a_token_do_not_depend_on_its_batch(device: SteppedCpuDevice) -> None:
    """Each token alone gets what it gets among others."""
    moe = Moe(CONFIG, WEIGHTS, device)
    x, ids = torch.randn(9, CONFIG.hidden_size), torch.arange(9)
    together = moe(x, ids, None)
    for i in range(9):
        torch.testing.assert_close(moe(x[i : i + 1], ids[i : i + 1], None)[0], together[i])
