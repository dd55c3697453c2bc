"""Weights from named tensors, or drawn from a seed: both fill the same `HybridWeights`.

Knows nothing of steps, caches or files. Invariant: every tensor has the shape `HybridConfig` says,
and none that was given is left out without a word.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Set
from typing import Any, TypeAlias

import torch
from torch import Tensor

from deepinfer.errors import UserError, nearest_hint
from deepinfer.models.hybrid.draft_plan import DraftPlan
from deepinfer.models.hybrid.drawing import Drawn
from deepinfer.models.hybrid.engram_tables import engram_tables
from deepinfer.models.hybrid.layer_plan import V4, Compressor, HybridConfig, Layer
from deepinfer.models.hybrid.weight_names import DRAFT, canonical
from deepinfer.models.hybrid.weights import (
    AttentionWeights,
    CompressorWeights,
    DSparkWeights,
    EngramWeights,
    HybridWeights,
    IndexerWeights,
    LayerWeights,
    MixWeights,
    MoeWeights,
    MtpWeights,
    caster,
    mapped,
)

# Gives the tensor of a name, which has to have the shape that follows.
Get: TypeAlias = Callable[..., Tensor]


def load_weights(config: HybridConfig, state: Mapping[str, Tensor]) -> HybridWeights:
    """The weights in `state`, in their own dtypes; names as `weight_names.canonical` reads them.

    An Engram's token map is `engram_token_map`. Its multipliers, primes and offsets follow from
    `config`; `engram_multipliers` [L, n], `engram_primes` [L, n-1, heads] and `engram_offsets`
    [L, columns] of the L Engram layers replace them.

    Draft layers of `config` are left out if the file has none of their tensors (transformers drops
    them), and those of the file if `config` has none.

    Raises:
        UserError: `config` is no geometry of this network; names are missing or too many; a shape
            is another than `config` says.
    """
    config.check()
    named = _tables(config) | canonical(state)
    drafts = [name for name in named if DRAFT.search(name)]
    if config.draft is None:
        for name in drafts:
            del named[name]
    config = config.served(config.draft is not None and bool(drafts))
    expected: dict[str, tuple[int, ...]] = {}

    def note(name: str, *shape: int) -> Tensor:
        expected[name] = shape
        return torch.empty(shape, device="meta")

    _build(config, note)
    _refuse_other_names(named.keys(), expected.keys())
    for name, shape in expected.items():
        if tuple(named[name].shape) != shape:
            raise UserError(
                f"{name}: shape {list(named[name].shape)}, but the config says {list(shape)}"
            )
    return _build(config, lambda name, *shape: named[name])


def draw_weights(
    config: HybridConfig,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> HybridWeights:
    """Weights drawn from `config.seed`, the same on every device (see `drawing.Drawn`)."""
    config.check()
    cast = caster(dtype, device)
    tables = _tables(config)
    drawn = Drawn(config)

    def get(name: str, *shape: int) -> Tensor:
        return tables[name] if name in tables else drawn(name, shape)

    return _build(config, get, lambda part: mapped(part, cast))


def num_parameters(config: HybridConfig) -> int:
    """Floating-point values of the network that `config` describes; nothing is made of it."""
    one = torch.empty(1)  # seen as often as a tensor has values
    return _build(config, lambda name, *shape: one.expand(shape)).num_parameters()


def _tables(config: HybridConfig) -> dict[str, Tensor]:
    """What the Engram's rule gives, by name; empty without an Engram."""
    if config.engram is None:
        return {}
    layers = [layer.index for layer in config.layers if layer.engram]
    tables = engram_tables(config.engram, layers)
    return {f"engram_{name}": torch.from_numpy(values) for name, values in tables.items()}


def _refuse_other_names(given: Set[str], expected: Set[str]) -> None:
    missing, surplus = sorted(expected - given), sorted(given - expected)
    parts = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in (("missing", missing), ("not of this network", surplus))
        if names
    ]
    if parts:
        hint = nearest_hint(surplus[0], missing) if missing and surplus else None
        raise UserError(f"tensors: {'; '.join(parts)}", hint=hint)


def _build(
    config: HybridConfig, get: Get, place: Callable[[Any], Any] = lambda part: part
) -> HybridWeights:
    """Ask `get` for every tensor by name and shape; `place` each layer as soon as it is there."""
    hidden, vocab = config.hidden_size, config.vocab_size
    engram_layers = [layer.index for layer in config.layers if layer.engram]

    def of_layer(layer: Layer) -> LayerWeights:
        own = _layer(config, layer, _prefixed(get, f"layers.{layer.index}."))
        if not layer.engram:
            return own
        number = engram_layers.index(layer.index)
        part = _prefixed(get, f"layers.{layer.index}.")
        return dataclasses.replace(own, engram=_engram(config, number, get, part))

    hc_head = _head_mix(config, get) if config.family == V4 else None
    weights = HybridWeights(
        embed=get("embed", vocab, hidden),
        layers=(),
        norm=get("norm", hidden),
        head=get("head", vocab, hidden),
        hc_head=hc_head,
        token_map=get("engram_token_map", vocab).long() if config.engram else None,
    )
    layers = tuple(place(of_layer(layer)) for layer in config.layers)
    placed: HybridWeights = place(weights)
    draft = place(_draft(config, config.draft, get)) if config.draft is not None else None
    return dataclasses.replace(placed, layers=layers, draft=draft)


def _prefixed(get: Get, prefix: str) -> Get:
    return lambda name, *shape: get(prefix + name, *shape)


def _layer(config: HybridConfig, layer: Layer, get: Get) -> LayerWeights:
    """All of a layer but its n-gram embeddings."""
    hidden = config.hidden_size
    return LayerWeights(
        attn_norm=get("attn_norm", hidden),
        ffn_norm=get("ffn_norm", hidden),
        attn_mix=_mix(config, get, "hc_attn"),
        ffn_mix=_mix(config, get, "hc_ffn"),
        attention=_attention(config, layer, get),
        moe=_moe(config, layer, get),
        engram=None,
    )


def _draft(config: HybridConfig, plan: DraftPlan, get: Get) -> MtpWeights | DSparkWeights:
    """The draft layers: `mtp.0` and so on, of which the first reads and the last has a head."""
    hidden, vocab, rank = config.hidden_size, config.vocab_size, plan.markov_rank
    parts = [_prefixed(get, f"mtp.{number}.") for number in range(plan.num_layers)]
    layers = [
        _layer(config.of_draft_layers, layer, part)
        for layer, part in zip(config.draft_layers, parts, strict=True)
    ]
    first, last = parts[0], parts[-1]
    if not plan.block_size:
        return MtpWeights(
            layers=(layers[0],),
            enorm=first("enorm", hidden),
            hnorm=first("hnorm", hidden),
            e_proj=first("e_proj", hidden, hidden),
            h_proj=first("h_proj", hidden, hidden),
            hc_head=_head_mix(config, last),
            norm=last("norm", hidden),
        )
    return DSparkWeights(
        layers=tuple(layers),
        main_proj=first("main_proj", hidden, len(plan.targets) * hidden),
        main_norm=first("main_norm", hidden),
        norm=last("norm", hidden),
        markov_embed=last("markov_head.embed", vocab, rank),
        markov_head=last("markov_head.head", vocab, rank),
    )


def _head_mix(config: HybridConfig, get: Get) -> MixWeights:
    streams = config.hc_mult
    return MixWeights(
        get("hc_head_fn", streams, streams * config.hidden_size),
        get("hc_head_base", streams),
        get("hc_head_scale", 1),
    )


def _mix(config: HybridConfig, get: Get, name: str) -> MixWeights:
    streams = config.hc_mult
    rows = (2 + streams) * streams
    return MixWeights(
        get(f"{name}_fn", rows, streams * config.hidden_size),
        get(f"{name}_base", rows),
        get(f"{name}_scale", 3),
    )


def _attention(config: HybridConfig, layer: Layer, get: Get) -> AttentionWeights:
    hidden, size, rank = config.hidden_size, config.head_dim, config.q_lora_rank
    heads, groups = config.num_attention_heads, config.o_groups
    compressor = None
    if layer.compressor is not None:
        compressor = _compressor(layer.compressor, "attn.compressor", size, hidden, get)
    return AttentionWeights(
        wq_a=get("attn.wq_a", rank, hidden),
        q_norm=get("attn.q_norm", rank),
        wq_b=get("attn.wq_b", heads * size, rank),
        wkv=get("attn.wkv", size, hidden),
        kv_norm=get("attn.kv_norm", size),
        wo_a=get("attn.wo_a", groups * config.o_lora_rank, heads * size // groups),
        wo_b=get("attn.wo_b", hidden, groups * config.o_lora_rank),
        sink=get("attn.attn_sink", heads),
        compressor=compressor,
        indexer=_indexer(config, layer, get) if layer.is_selector else None,
    )


def _indexer(config: HybridConfig, layer: Layer, get: Get) -> IndexerWeights:
    size, hidden, name = config.index_head_dim, config.hidden_size, "attn.indexer"
    wk = k_norm = compressor = None
    if layer.index_keys == "latent":
        wk, k_norm = get(f"{name}.wk", size, config.head_dim), get(f"{name}.k_norm", size)
    elif layer.compressor is not None and layer.index_keys == "pooled":
        compressor = _compressor(layer.compressor, f"{name}.compressor", size, hidden, get)
    return IndexerWeights(
        wq_b=get(f"{name}.wq_b", config.index_n_heads * size, config.q_lora_rank),
        weights_proj=get(f"{name}.weights_proj", config.index_n_heads, hidden),
        wk=wk,
        k_norm=k_norm,
        compressor=compressor,
    )


def _compressor(plan: Compressor, name: str, size: int, hidden: int, get: Get) -> CompressorWeights:
    width = size * (2 if plan.overlap else 1)
    return CompressorWeights(
        wkv=get(f"{name}.wkv", width, hidden),
        wgate=get(f"{name}.wgate", width, hidden) if plan.gated else None,
        bias=get(f"{name}.ape", plan.ratio, width) if plan.position_bias else None,
        norm=get(f"{name}.norm", size),
    )


def _moe(config: HybridConfig, layer: Layer, get: Get) -> MoeWeights:
    hidden, inner, num = (
        config.hidden_size,
        config.moe_intermediate_size,
        config.n_routed_experts,
    )
    bias = tid2eid = None
    if layer.router == "hash":
        tid2eid = get("ffn.gate.tid2eid", config.vocab_size, config.num_experts_per_tok).long()
    else:
        bias = get("ffn.gate.bias", num)
    return MoeWeights(
        router=get("ffn.gate", num, hidden),
        bias=bias,
        tid2eid=tid2eid,
        w1=get("ffn.experts.w1", num, inner, hidden),
        w3=get("ffn.experts.w3", num, inner, hidden),
        w2=get("ffn.experts.w2", num, hidden, inner),
        shared_w1=get("ffn.shared_experts.w1", inner, hidden),
        shared_w3=get("ffn.shared_experts.w3", inner, hidden),
        shared_w2=get("ffn.shared_experts.w2", hidden, inner),
    )


def _engram(config: HybridConfig, number: int, get: Get, part: Get) -> EngramWeights:
    """Of the Engram layer that is `number` among the Engram layers."""
    plan = config.engram
    assert plan is not None
    num, streams, hidden = len(plan.num_embeddings), config.hc_mult, config.hidden_size
    ngrams, heads = plan.max_ngram_size, plan.num_heads
    return EngramWeights(
        embed=part("engram.embed", plan.num_embeddings[number], plan.head_dim),
        wkv=part("engram.wkv", (streams + 1) * hidden, plan.columns * plan.head_dim),
        q_weight=part("engram.q_weight", streams, hidden),
        k_weight=part("engram.k_weight", streams, hidden),
        multipliers=get("engram_multipliers", num, ngrams)[number].long(),
        primes=get("engram_primes", num, ngrams - 1, heads)[number].flatten().long(),
        offsets=get("engram_offsets", num, plan.columns)[number].long(),
    )
