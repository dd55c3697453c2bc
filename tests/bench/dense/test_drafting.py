"""The dense reference of draft layers: what its guesses depend on, and how."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.dense.drafting import DenseDrafting
from deepinfer.models.hybrid.layer_plan import v4_config, v41_config
from deepinfer.models.hybrid.loading import draw_weights
from deepinfer.models.hybrid.weights import DSparkWeights, HybridWeights, MtpWeights
from tests.hybrid_configs import dspark, v4_raw, v41_raw

NOISE = 60
MODELS = {
    "mtp": v4_config({**v4_raw(ratios=(4, 16), window=8), "num_nextn_predict_layers": 1}),
    "dspark": v41_config(
        {
            **v41_raw([0, 2, 1], sources=[1, 2], selectors=[1, 2], publisher=None),
            **dspark([1, 2]),
        }
    ),
}
IDS = torch.randint(NOISE, (20,), generator=torch.Generator().manual_seed(3))


def logits(name: str, weights: HybridWeights | None = None, num_drafts: int = 5) -> torch.Tensor:
    """[num_drafts, V] behind `IDS`, of drawn weights or others."""
    config = MODELS[name]
    weights = weights or draw_weights(config)
    return DenseDrafting(weights, config, dtype=torch.float64).logits(IDS, num_drafts)


@pytest.mark.parametrize("name", MODELS)
def test_fewer_drafts_are_the_first_of_more(name: str) -> None:
    """A guess depends on those before it."""
    assert torch.allclose(logits(name, num_drafts=2), logits(name)[:2], atol=1e-9)
    assert len(logits(name, num_drafts=9)) == (5 if name == "dspark" else 9)


def test_all_of_a_block_sees_all_of_it() -> None:
    """The first guess depends on the noise behind it; a guess of MTP on nothing behind it."""
    for name in MODELS:
        weights = draw_weights(MODELS[name])
        embed = weights.embed.clone()
        embed[NOISE] += 1
        changed = logits(name, replace(weights, embed=embed))[0] - logits(name)[0]
        assert (changed.abs().max() > 1e-3) == (name == "dspark")


def test_a_block_is_corrected_by_the_token_before() -> None:
    """Logits are those without the table of pairs, and what it says of the token before."""
    weights = draw_weights(MODELS["dspark"])
    own = weights.draft
    assert isinstance(own, DSparkWeights)
    without = replace(own, markov_head=torch.zeros_like(own.markov_head))
    plain = logits("dspark", replace(weights, draft=without))
    corrected = logits("dspark")
    before = torch.cat([IDS[-1:], corrected.argmax(-1)[:-1]])
    pairs = own.markov_embed[before].double() @ own.markov_head.double().T
    assert torch.allclose(corrected, plain + pairs, atol=1e-9)
    assert pairs.abs().max() > 0.5


def test_the_mtp_layer_sees_its_window_and_no_more() -> None:
    """With the streams taken away (`h_proj` zero) a guess is a function of the last 8 tokens."""
    config, weights = MODELS["mtp"], draw_weights(MODELS["mtp"])
    own = weights.draft
    assert isinstance(own, MtpWeights)
    deaf = replace(weights, draft=replace(own, h_proj=torch.zeros_like(own.h_proj)))
    dense = DenseDrafting(deaf, config, dtype=torch.float64)

    def guess(changed: int) -> torch.Tensor:
        token_ids = IDS.clone()
        token_ids[changed] = (token_ids[changed] + 1) % NOISE
        return dense.logits(token_ids, 1)

    nearest, within, outside = guess(19), guess(12), guess(11)
    unchanged = dense.logits(IDS, 1)
    assert (outside - unchanged).abs().max() < 1e-9
    assert (within - unchanged).abs().max() > 1e-3
    assert (nearest - unchanged).abs().max() > 1e-3
