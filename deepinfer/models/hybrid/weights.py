"""Weights of a hybrid network: a tree of tensors that mirrors the layer plan, for both families.

Layouts are those of the V4.1 checkpoints: every matrix is [out, in], the experts of a layer are
stacked. `deepinfer.models.hybrid.loading` fills the tree.

Knows no names in files, no steps and no caches. Invariant: what a layer does not have is None.

Shapes below: D hidden, V vocabulary, H heads, hd head_dim, ql q_lora_rank, g groups of ol, nh index
heads of ih, E experts of inner size I, k experts per token, S streams, r ratio, c series of a pool
(2 if it overlaps, else 1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

# Fields that the checkpoints hold in float32 even where the rest is 16 bit.
_AT_LEAST_FLOAT32 = {"fn", "base", "scale", "sink", "bias"}
_Tree = TypeVar("_Tree")


@dataclass(frozen=True, slots=True)
class MixWeights:
    """Of a hyper-connection. `fn` [n, S*D], `base` [n], `scale` [3]; n = 2S + S*S: pre, post, comb.

    Of V4's collapse before the head n = S, and `scale` is [1].
    """

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """`wkv`, `wgate` [c*dim, D]; `bias` [r, c*dim], of the gate by position in its group; `norm`.

    With c = 2 the first half is the series that the next group pools. Ratio 1 has no `wgate`.
    """

    wkv: Tensor
    wgate: Tensor | None
    bias: Tensor | None
    norm: Tensor


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """`wq_b` [nh*ih, ql], `weights_proj` [nh, D] of a selector; how a source makes its keys:

    `wk` [ih, hd] and `k_norm` [ih] from the row (V4.1), or `compressor` of its own (V4); else None.
    """

    wq_b: Tensor
    weights_proj: Tensor
    wk: Tensor | None
    k_norm: Tensor | None
    compressor: CompressorWeights | None


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """`wq_a` [ql, D], `q_norm` [ql], `wq_b` [H*hd, ql], `wkv` [hd, D], `kv_norm` [hd],
    `wo_a` [g*ol, H*hd/g], `wo_b` [D, g*ol], `sink` [H].
    """

    wq_a: Tensor
    q_norm: Tensor
    wq_b: Tensor
    wkv: Tensor
    kv_norm: Tensor
    wo_a: Tensor
    wo_b: Tensor
    sink: Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """`router` [E, D] with `bias` [E] or `tid2eid` int64 [V, k]; `w1` gate, `w3` up [E, I, D],
    `w2` down [E, D, I]; the same of the shared expert without E.
    """

    router: Tensor
    bias: Tensor | None
    tid2eid: Tensor | None
    w1: Tensor
    w3: Tensor
    w2: Tensor
    shared_w1: Tensor
    shared_w3: Tensor
    shared_w2: Tensor


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """`embed` [rows, eh], `wkv` [(S+1)*D, columns*eh]: S keys, then the value; `q_weight`,
    `k_weight` [S, D].

    int64: `multipliers` [n] of the own id and the ones before it, `primes` and `offsets` [columns],
    n-gram size outer, head inner.
    """

    embed: Tensor
    wkv: Tensor
    q_weight: Tensor
    k_weight: Tensor
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; `attn_norm`, `ffn_norm` [D]."""

    attn_norm: Tensor
    ffn_norm: Tensor
    attn_mix: MixWeights
    ffn_mix: MixWeights
    attention: AttentionWeights
    moe: MoeWeights
    engram: EngramWeights | None


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """V4's draft layer: `enorm`, `hnorm` [D] and `e_proj`, `h_proj` [D, D] of the token and of each
    stream it reads; `hc_head` and `norm` [D] before the model's head.
    """

    layers: tuple[LayerWeights]
    enorm: Tensor
    hnorm: Tensor
    e_proj: Tensor
    h_proj: Tensor
    hc_head: MixWeights
    norm: Tensor


@dataclass(frozen=True, slots=True)
class DSparkWeights:
    """V4.1's draft layers: `main_proj` [D, n*D] and `main_norm` [D] of the n layers they read;
    `norm` [D] before the model's head; `markov_embed`, `markov_head` [V, rank], what the token
    before adds to a token's logit.
    """

    layers: tuple[LayerWeights, ...]
    main_proj: Tensor
    main_norm: Tensor
    norm: Tensor
    markov_embed: Tensor
    markov_head: Tensor


@dataclass(frozen=True, slots=True)
class HybridWeights:
    """`embed`, `head` [V, D], `norm` [D], the layers, V4's `hc_head`; `token_map` int64 [V] with an
    Engram: the ids its hashes are made of; draft layers, if the model has some and they were given.
    """

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    hc_head: MixWeights | None
    token_map: Tensor | None
    draft: MtpWeights | DSparkWeights | None = None

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> HybridWeights:
        """The same on `device`, floats as `dtype`.

        Mixes, sinks and biases are float32 even if `dtype` has 16 bits, as in the checkpoints.
        """
        return mapped(self, caster(dtype, device))

    def num_parameters(self) -> int:
        """Floating-point values in all tensors."""
        counts: list[int] = []

        def count(field: str, tensor: Tensor) -> Tensor:
            counts.append(tensor.numel() if tensor.is_floating_point() else 0)
            return tensor

        mapped(self, count)
        return sum(counts)


def caster(dtype: torch.dtype, device: torch.device | str) -> Callable[[str, Tensor], Tensor]:
    """Casts a field's tensor as `HybridWeights.to` says."""
    wide = torch.promote_types(dtype, torch.float32)

    def cast_field(field: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.to(device)
        return tensor.to(device, wide if field in _AT_LEAST_FLOAT32 else dtype).contiguous()

    return cast_field


def mapped(tree: _Tree, f: Callable[[str, Tensor], Tensor], field: str = "") -> _Tree:
    """`tree` with `f(name of the field, tensor)` in place of each tensor."""
    result: Any = tree
    if isinstance(tree, Tensor):
        result = f(field, tree)
    elif isinstance(tree, tuple):
        result = tuple(mapped(part, f, field) for part in tree)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed = {
            part.name: mapped(getattr(tree, part.name), f, part.name)
            for part in dataclasses.fields(tree)
        }
        result = dataclasses.replace(tree, **changed)
    return cast(_Tree, result)
