"""Parts of the network, each against its formula."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.models.hybrid.layer_plan import Compressor, Yarn, v41_config
from deepinfer.models.hybrid.layers import (
    Mix,
    Pool,
    collapse,
    expand,
    frequencies,
    linears_of,
    rope_table,
    rotate_,
)
from deepinfer.models.hybrid.loading import draw_weights
from deepinfer.models.hybrid.weights import CompressorWeights
from tests.hybrid_configs import v41_raw

CONFIG = v41_config(v41_raw([0], sources=[], selectors=[], publisher=None))
WEIGHTS = draw_weights(CONFIG).layers[0]


def test_yarn_slows_the_slow_pairs_only() -> None:
    """The fastest pair keeps its frequency, the slowest is divided by the factor."""
    plain, scaled = frequencies(64, 160000.0, None), frequencies(64, 160000.0, Yarn())
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 16)
    ratio = plain / scaled
    assert (ratio.diff() >= -1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rotation_turns_the_last_pairs(dtype: torch.dtype) -> None:
    """Pair i of the last dims by position * frequency i; the other dims stay; and back again."""
    table = rope_table(frequencies(4, 100.0, None), 9, torch.float32)
    x = torch.randn(2, 10).to(dtype)
    turned = rotate_(x.clone(), table[torch.tensor([0, 7])])
    assert torch.equal(turned[0], x[0])
    assert torch.equal(turned[1, :6], x[1, :6])
    angle = 7 * 100.0**-0.5  # of the second pair
    a, b = x[1, 8].item(), x[1, 9].item()
    assert turned[1, 8].item() == pytest.approx(
        a * math.cos(angle) - b * math.sin(angle), rel=2e-2 if dtype == torch.bfloat16 else 1e-5
    )
    back = rotate_(turned, table[torch.tensor([0, 7])].conj())
    torch.testing.assert_close(back, x, atol=3e-2 if dtype == torch.bfloat16 else 1e-6, rtol=0)


def test_mix_is_nearly_doubly_stochastic(device: SteppedCpuDevice) -> None:
    """After 20 rounds rows and columns of comb sum to 1; it equals the sums written out."""
    streams = torch.randn(5, 4, CONFIG.hidden_size)
    pre, post, comb = Mix(CONFIG, WEIGHTS.attn_mix, device)(streams)
    weights = WEIGHTS.attn_mix
    flat = streams.flatten(1)
    flat = flat / (flat.square().mean(-1, keepdim=True) + 1e-20).sqrt()
    mixed = flat @ weights.fn.T
    expected = (mixed[:, 8:] * weights.scale[2] + weights.base[8:]).view(-1, 4, 4).softmax(-1)
    expected = expected + 1e-6
    expected = expected / (expected.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        expected = expected / (expected.sum(-1, keepdim=True) + 1e-6)
        expected = expected / (expected.sum(-2, keepdim=True) + 1e-6)
    torch.testing.assert_close(comb, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(comb.sum(-2), torch.ones(5, 4), atol=1e-4, rtol=0)
    torch.testing.assert_close(
        pre, torch.sigmoid(mixed[:, :4] * weights.scale[0] + weights.base[:4]) + 1e-6
    )
    y = torch.randn(5, CONFIG.hidden_size)
    new = expand(streams, post, comb, y)
    first = post[:, :1] * y + sum(comb[:, j, :1] * streams[:, j] for j in range(4))
    torch.testing.assert_close(new[:, 0], first)
    torch.testing.assert_close(
        collapse(streams, pre), sum(pre[:, i, None] * streams[:, i] for i in range(4))
    )


def test_products_of_one_input_are_computed_together(device: SteppedCpuDevice) -> None:
    """Each by its name what it is alone, in the weight's own dtype."""
    shapes = {"a": (3, torch.float32), "b": (5, torch.float64), "c": (2, torch.float32)}
    weights = {name: torch.randn(num, 4, dtype=dtype) for name, (num, dtype) in shapes.items()}
    x = torch.randn(6, 4)
    made = linears_of(device, weights)(x)
    assert made.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(made[name], x.to(weight.dtype) @ weight.T)


def test_overlapping_pool_takes_one_series_of_each_group(device: SteppedCpuDevice) -> None:
    """First series of the group before, second of the group itself; missing tokens have no
    weight."""
    plan = Compressor(2, gated=True, overlap=True, position_bias=True)
    dim = 3
    weights = CompressorWeights(
        wkv=torch.randn(2 * dim, 5),
        wgate=torch.randn(2 * dim, 5),
        bias=torch.randn(2, 2 * dim),
        norm=torch.ones(dim),
    )
    pool = Pool(plan, weights, 1e-20, device)
    x, phases = torch.randn(4, 5), torch.tensor([0, 1, 0, 1])
    projected = pool.biased(x @ pool.weight.T, phases)
    series = projected.view(4, pool.num_series, -1)
    members = torch.cat((series[:2, 0], series[2:, 1]))
    for missing in (None, torch.tensor([True, True, False, False])):
        kv, gate = x @ weights.wkv.T, x @ weights.wgate.T + weights.bias[phases]
        kv = torch.cat([kv[:2, :dim], kv[2:, dim:]])
        gate = torch.cat([gate[:2, :dim], gate[2:, dim:]])
        if missing is not None:
            kv, gate = kv[2:], gate[2:]
        row = (kv * gate.softmax(0)).sum(0)
        row = row / row.square().mean().sqrt()
        torch.testing.assert_close(pool.pool(members.clone(), missing)[0], row)
