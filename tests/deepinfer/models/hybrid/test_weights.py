"""Hybrid weights: read under any of the names, refused if not all fit, drawn from a seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.dense.hybrid import HybridDense
from deepinfer.errors import UserError
from deepinfer.models.hybrid.engram_tables import engram_tables
from deepinfer.models.hybrid.layer_plan import Engram, HybridConfig, v4_config, v41_config
from deepinfer.models.hybrid.loading import draw_weights, load_weights
from deepinfer.models.hybrid.weight_names import canonical
from tests.golden_models import FOLDER, load_golden
from tests.hybrid_configs import v4_raw, v41_raw

V41 = v41_config(
    v41_raw([0, 2, 1, 1], sources=[1, 2], selectors=[1, 2, 3], publisher=2, engram=[1, 2])
)
V4 = v4_config(v4_raw(ratios=(4, 16), window=8))


def golden_state(name: str) -> dict[str, Tensor]:
    """The tensors of a golden file under the names it gives them."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return {
            key.removeprefix("w."): torch.from_numpy(file[key])
            for key in file.files
            if key.startswith(("w.", "engram_"))
        }


def test_both_families_fill_one_tree() -> None:
    """A layer has what its plan says, the rest is None."""
    v41, v4 = load_golden("v41_b").weights, load_golden("v4_a").weights
    assert [layer.attention.compressor is not None for layer in v41.layers] == [
        layer in (1, 4) for layer in range(8)
    ]
    assert [layer.attention.indexer is not None for layer in v41.layers] == [
        layer in (1, 4, 6, 7) for layer in range(8)
    ]
    source, reindex = v41.layers[4].attention.indexer, v41.layers[6].attention.indexer
    assert source is not None
    assert source.wk is not None
    assert reindex is not None
    assert reindex.wk is None
    assert [layer.engram is not None for layer in v41.layers] == [
        layer in (1, 4) for layer in range(8)
    ]
    assert v41.hc_head is None
    assert v4.hc_head is not None
    assert v4.token_map is None
    assert [layer.moe.tid2eid is not None for layer in v4.layers] == [True] * 3 + [False] * 3
    csa = v4.layers[2].attention.indexer
    assert csa is not None
    assert csa.compressor is not None
    assert v4.layers[3].attention.indexer is None


def test_fused_experts_have_their_gate_rows_first() -> None:
    """transformers' `gate_up_proj` becomes `w1` and `w3`."""
    fused = golden_state("v4_a")["layers.0.mlp.experts.gate_up_proj"]
    moe = load_golden("v4_a").weights.layers[0].moe
    assert torch.equal(torch.cat([moe.w1, moe.w3], dim=1), fused)


def test_experts_may_have_a_name_each() -> None:
    """`ffn.experts.E.w1.weight`, in any order, is stacked; draft layers are not ours."""
    state = golden_state("v41_b")
    apart: dict[str, Tensor] = {"mtp.0.norm.weight": torch.ones(1)}
    for name, tensor in reversed(state.items()):
        if ".ffn.experts." in name:
            prefix, _, suffix = name.partition(".experts.")
            apart |= {f"{prefix}.experts.{e}.{suffix}": tensor[e] for e in reversed(range(7))}
        else:
            apart[name] = tensor
    config = load_golden("v41_b").config
    ours, stacked = load_weights(config, apart), load_weights(config, state)
    for name in ("w1", "w2", "w3"):
        assert torch.equal(getattr(ours.layers[3].moe, name), getattr(stacked.layers[3].moe, name))


def test_a_gap_between_experts_is_named() -> None:
    """Expert 0 and 2 without 1 are an error, not a shorter stack."""
    state = {f"layers.0.ffn.experts.{e}.w1": torch.zeros(2, 2) for e in (0, 2)}
    with pytest.raises(UserError, match=r"layers\.0\.ffn\.experts\.w1: expert 1 of 3 is missing"):
        canonical(state)


def test_two_tensors_for_one_name_are_refused() -> None:
    """`embed` and `model.embed_tokens` are the same matrix."""
    with pytest.raises(UserError, match="a second tensor for embed"):
        canonical({"embed.weight": torch.zeros(1), "model.embed_tokens.weight": torch.zeros(1)})


def test_missing_and_surplus_names_are_one_error() -> None:
    """Both are listed, and the missing name that is near a surplus one."""
    state = golden_state("v41_a")
    state["layers.2.attn.wq_c.weight"] = state.pop("layers.2.attn.wq_b.weight")
    with pytest.raises(UserError) as caught:
        load_weights(load_golden("v41_a").config, state)
    assert str(caught.value) == (
        "tensors: 1 missing (layers.2.attn.wq_b); 1 not of this network (layers.2.attn.wq_c)"
    )
    assert "layers.2.attn.wq_b" in (caught.value.hint or "")


def test_a_wrong_shape_is_named() -> None:
    """A tensor of another shape than the config's is an error that says both."""
    model = load_golden("v41_a")
    with pytest.raises(UserError, match=r"embed: shape \[97, 28\], but the config says \[98, 28\]"):
        load_weights(replace(model.config, vocab_size=98), golden_state("v41_a"))


def test_engram_tables_follow_the_rule() -> None:
    """The golden multipliers, primes and offsets, and the rows of the released tables."""
    with np.load(FOLDER / "v41_b.npz") as file:
        plan = load_golden("v41_b").config.engram
        assert plan is not None
        for name, table in engram_tables(plan, [1, 4]).items():
            np.testing.assert_array_equal(table, file[f"engram_{name}"])
    released = Engram(4, 8, 256, 2, (384006168, 384016682), 16_000_000, 99_092)
    assert engram_tables(released, [1, 14])["primes"].shape == (2, 3, 8)
    with pytest.raises(UserError, match=r"tables of \[384006168, 384016682\] rows"):
        engram_tables(replace(released, num_embeddings=(1, 2)), [1, 14])


def test_tables_in_the_file_replace_the_rule() -> None:
    """What a file holds is used, even where the rule would give something else."""
    state = golden_state("v41_b")
    state["engram_multipliers"] = state["engram_multipliers"] + 2
    engram = load_weights(load_golden("v41_b").config, state).layers[4].engram
    assert engram is not None
    assert torch.equal(engram.multipliers, state["engram_multipliers"][1])


@pytest.mark.parametrize("config", [V41, V4], ids=["v41", "v4"])
def test_a_cast_keeps_ids_and_what_needs_float32(config: HybridConfig) -> None:
    """In bfloat16 mixes, sinks and biases stay float32 and ids int64; float64 widens all floats."""
    weights = draw_weights(config)
    half, wide = weights.to(torch.bfloat16), weights.to(torch.float64)
    layer = half.layers[0]
    assert half.embed.dtype == layer.attention.wq_a.dtype == torch.bfloat16
    assert layer.attn_mix.fn.dtype == layer.attention.sink.dtype == torch.float32
    assert wide.layers[0].attn_mix.fn.dtype == wide.embed.dtype == torch.float64
    assert torch.equal(wide.layers[1].moe.w2.float(), weights.layers[1].moe.w2)
    if config.engram is not None:
        assert half.token_map is not None
        assert half.token_map.dtype == torch.int64
    else:
        table = half.layers[0].moe.tid2eid
        assert table is not None
        assert table.dtype == torch.int64


@pytest.mark.parametrize("config", [V41, V4], ids=["v41", "v4"])
def test_a_seed_decides_the_weights(config: HybridConfig) -> None:
    """Equal seeds draw equal weights, other seeds others, a cast while drawing changes no value."""
    first, again = draw_weights(config), draw_weights(config, torch.float64)
    other = draw_weights(replace(config, seed=1))
    assert torch.equal(first.layers[1].moe.w1, again.layers[1].moe.w1.float())
    assert not torch.equal(first.layers[1].moe.w1, other.layers[1].moe.w1)
    assert first.num_parameters() == again.num_parameters() > 10_000


def test_drawn_experts_of_a_token_differ() -> None:
    """A hash table sends no token to one expert twice, and not all tokens to the same."""
    table = draw_weights(V4).layers[0].moe.tid2eid
    assert table is not None
    assert (table.sort(1).values.diff(dim=1) > 0).all()
    assert len(table.unique(dim=0)) > 10


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_outputs_are_diverse(family: str) -> None:
    """Of 40 tokens generated after each of 4 random prompts, no token is more than a tenth."""
    config = {"v41": V41, "v4": V4}[family]
    config = replace(config, vocab_size=256, hidden_size=64, n_routed_experts=8)
    dense = HybridDense(draw_weights(config), config)
    generator, outputs = torch.Generator().manual_seed(5), list[int]()
    for _ in range(4):
        tokens = torch.randint(256, (20,), generator=generator).tolist()
        for _ in range(40):
            tokens.append(int(dense.logits(torch.tensor(tokens))[-1].argmax()))
        outputs += tokens[20:]
    assert max(Counter(outputs).values()) <= len(outputs) / 10
