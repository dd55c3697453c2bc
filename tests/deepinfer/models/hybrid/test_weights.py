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
from deepinfer.models.hybrid.draft_plan import DraftPlan
from deepinfer.models.hybrid.engram_tables import engram_tables
from deepinfer.models.hybrid.layer_plan import Engram, HybridConfig, v4_config, v41_config
from deepinfer.models.hybrid.loading import draw_weights, load_weights
from deepinfer.models.hybrid.weight_names import canonical
from deepinfer.models.hybrid.weights import mapped
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


DRAFTS = {"v41_a": DraftPlan(2, 3, 1, 5, 0, (1, 4), 4), "v4_a": DraftPlan(1, 8, 2)}


def drafted(name: str) -> HybridConfig:
    """A golden model's config with draft layers, which the golden files have not."""
    config = load_golden(name).config
    plan = DRAFTS[name]
    if not plan.block_size:
        plan = replace(plan, n_routed_experts=config.n_routed_experts)
    return replace(config, draft=plan)


def draft_state(config: HybridConfig) -> dict[str, Tensor]:
    """The tensors of its draft layers under the names of the released checkpoints."""
    assert config.draft is not None
    num, hidden, size, rank = (
        config.draft.num_layers,
        config.hidden_size,
        config.head_dim,
        config.q_lora_rank,
    )
    heads, inner, streams = config.num_attention_heads, config.moe_intermediate_size, config.hc_mult
    outer = config.o_groups * config.o_lora_rank
    shapes: dict[str, tuple[int, ...]] = {}
    for stage in range(num):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "ffn_norm.weight": (hidden,),
            "attn.wq_a.weight": (rank, hidden),
            "attn.q_norm.weight": (rank,),
            "attn.wq_b.weight": (heads * size, rank),
            "attn.wkv.weight": (size, hidden),
            "attn.kv_norm.weight": (size,),
            "attn.wo_a.weight": (outer, heads * size // config.o_groups),
            "attn.wo_b.weight": (hidden, outer),
            "attn.attn_sink": (heads,),
            "ffn.gate.weight": (config.draft.n_routed_experts, hidden),
            "ffn.gate.bias": (config.draft.n_routed_experts,),
        }
        for expert in (*range(config.draft.n_routed_experts), None):
            prefix = "ffn.shared_experts" if expert is None else f"ffn.experts.{expert}"
            layer |= {f"{prefix}.{name}.weight": (inner, hidden) for name in ("w1", "w3")}
            layer[f"{prefix}.w2.weight"] = (hidden, inner)
        for which in ("attn", "ffn"):
            rows = streams * (2 + streams)
            layer[f"hc_{which}_fn"] = (rows, streams * hidden)
            layer |= {f"hc_{which}_base": (rows,), f"hc_{which}_scale": (3,)}
        shapes |= {f"mtp.{stage}.{name}": shape for name, shape in layer.items()}
    last = f"mtp.{num - 1}."
    shapes[f"{last}norm.weight"] = (hidden,)
    if config.draft.block_size:
        table = (config.vocab_size, config.draft.markov_rank)
        shapes |= {
            "mtp.0.main_proj.weight": (hidden, 2 * hidden),
            "mtp.0.main_norm.weight": (hidden,),
            f"{last}markov_head.embed.weight": table,
            f"{last}markov_head.head.weight": table,
            f"{last}confidence_head.proj.weight": (1, hidden + config.draft.markov_rank),
        }
    else:
        shapes |= {f"mtp.0.{name}.weight": (hidden,) for name in ("enorm", "hnorm")}
        shapes |= {f"mtp.0.{name}.weight": (hidden, hidden) for name in ("e_proj", "h_proj")}
        shapes[f"{last}hc_head_fn"] = (streams, streams * hidden)
        shapes |= {f"{last}hc_head_base": (streams,), f"{last}hc_head_scale": (1,)}
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", DRAFTS)
def test_draft_layers_are_read_where_the_model_has_some(name: str) -> None:
    """`mtp.S.*` of a checkpoint; one without them gives a model without, one in part is refused."""
    config = drafted(name)
    model, draft = golden_state(name), draft_state(config)
    loaded = load_weights(config, model | draft).draft
    assert loaded is not None
    assert config.draft is not None
    assert len(loaded.layers) == config.draft.num_layers
    last = f"mtp.{config.draft.num_layers - 1}"
    assert torch.equal(loaded.norm, draft[f"{last}.norm.weight"])
    assert torch.equal(loaded.layers[-1].moe.w2[2], draft[f"{last}.ffn.experts.2.w2.weight"])
    assert load_weights(config, model).draft is None
    assert load_weights(config.served(False), model | draft).draft is None
    del draft["mtp.0.attn.wkv.weight"]
    with pytest.raises(UserError, match=r"1 missing \(mtp\.0\.attn\.wkv\)"):
        load_weights(config, model | draft)


@pytest.mark.parametrize("name", DRAFTS)
def test_draft_layers_change_no_weight_of_the_model(name: str) -> None:
    """They are drawn last."""
    config = drafted(name)
    whole, model = draw_weights(config), draw_weights(config.served(False))
    assert model.draft is None
    assert whole.num_parameters() > model.num_parameters()
    kept: list[Tensor] = []

    def keep(field: str, tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    mapped(replace(whole, draft=None), keep)
    num = len(kept)
    mapped(model, keep)
    assert len(kept) == 2 * num
    assert all(torch.equal(*pair) for pair in zip(kept[:num], kept[num:], strict=True))


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
