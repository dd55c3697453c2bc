"""The dense reference of the hybrid networks: one whole sequence at once, from the formulas.

Every layer sees all T tokens, all G = T // ratio compressed rows, and masks of what each query may
read. There is no ring, no open group, no block and no step; selection, quantisers and rotation are
written here once more, so that a mistake of the engine is not repeated.

    streams [T, S, D] ──> Engram ──> collapse ─> attention ─> expand ──> collapse ─> MoE ─> expand
                                        ^ mixes: of this sublayer (V4), of the one before (V4.1)

Knows nothing of the engine; shares the weights and the layer plan with it. Invariant: the logits of
a prefix are the first logits of the whole, up to rounding.

Shapes: T tokens, D hidden, S streams, H heads of hd, G rows of a source, nh index heads of ih, k
experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.dense.arithmetic import Note, best_of, linear, unit
from bench.dense.hybrid_attention import DenseAttention, Published
from deepinfer.models.hybrid.layer_plan import HybridConfig, Layer
from deepinfer.models.hybrid.weights import (
    EngramWeights,
    HybridWeights,
    LayerWeights,
    MixWeights,
    MoeWeights,
)


def _ignore(name: str, value: Tensor) -> None:
    """Where nobody wants the values between."""


@dataclass(frozen=True, slots=True)
class _Mix:
    """How a sublayer reads and writes the streams: `pre`, `post` [T, S], `across` [T, S, S]."""

    pre: Tensor
    post: Tensor
    across: Tensor


class HybridDense:
    """Logits of a hybrid network for one sequence.

    Rows are quantised when they are made if the config says `qat` or stores them packed.

    Args:
        dtype: of activations, float32 or float64; weights are cast where they are used.
        engram: False leaves the n-gram embeddings out.
    """

    def __init__(
        self,
        weights: HybridWeights,
        config: HybridConfig,
        *,
        dtype: torch.dtype = torch.float32,
        engram: bool = True,
    ) -> None:
        self._weights = weights
        self._config = config
        self._dtype = dtype
        self._attention = DenseAttention(config, dtype)
        self._engram = engram

    def logits(self, token_ids: Tensor, note: Note = _ignore) -> Tensor:
        """[T, V] of int64 `token_ids` [T]."""
        return self.head(self.hidden(token_ids, note))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._weights.embed.device

    def states(self, token_ids: Tensor) -> Tensor:
        """[B, T, D] of int64 `token_ids` [B, T], one sequence after the other."""
        return torch.stack([self.hidden(sequence) for sequence in token_ids])

    def head(self, hidden: Tensor) -> Tensor:
        """[.., V] of states `hidden` returned."""
        weights = self._weights
        return linear(self._norm(hidden, weights.norm), weights.head)

    @torch.inference_mode()
    def hidden(self, token_ids: Tensor, note: Note = _ignore) -> Tensor:
        """[T, D]: the streams collapsed, before the last norm."""
        config, weights = self._config, self._weights
        streams, pre = self.spread(token_ids)
        published = Published()
        for layer, own in zip(config.layers, weights.layers, strict=True):
            part = _prefixed(note, layer.index)
            if own.engram is not None and self._engram:
                streams = streams + self._engrams(own.engram, token_ids, streams, part)
            part("input", streams)

            def attend(x: Tensor, layer: Layer = layer, note: Note = part) -> Tensor:
                own = weights.layers[layer.index].attention
                return self._attention.attend(layer, own, x, published, note)

            streams, pre = self.layer(own, attend, streams, pre, token_ids, part)
            part("streams", streams)
            if config.single_pass:
                part("pre_next", pre)
        hidden = self.collapsed(streams, pre, weights.hc_head)
        note("final_collapsed", hidden)
        return hidden

    def layer(
        self,
        own: LayerWeights,
        attend: Callable[[Tensor], Tensor],
        streams: Tensor,
        pre: Tensor,
        token_ids: Tensor,
        note: Note = _ignore,
    ) -> tuple[Tensor, Tensor]:
        """The streams [T, S, D] behind a layer that has `attend` for its attention, and its mix."""
        single_pass = self._config.single_pass
        mix = self._mix(own.attn_mix, streams)
        x = _collapse(streams, pre if single_pass else mix.pre)
        y = attend(self._norm(x, own.attn_norm))
        note("attn_out", y)
        streams, pre = _expand(streams, y, mix), mix.pre
        mix = self._mix(own.ffn_mix, streams)
        x = _collapse(streams, pre if single_pass else mix.pre)
        y = self._moe(own.moe, self._norm(x, own.ffn_norm), token_ids, note)
        return _expand(streams, y, mix), mix.pre

    def collapsed(self, streams: Tensor, pre: Tensor, own: MixWeights | None) -> Tensor:
        """[T, D] of the streams behind a last layer: by V4's mix `own`, else by the last one."""
        if own is not None:
            mixed = self._mix_logits(own, streams)
            mixed = mixed * own.scale.to(self._dtype) + own.base.to(self._dtype)
            pre = torch.sigmoid(mixed) + self._config.hc_eps
        return _collapse(streams, pre)

    # ---- hyper-connections ----

    def spread(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Every stream an embedding [T, S, D], and the mix that reads the first one."""
        x = self._weights.embed[token_ids].to(self._dtype)
        streams = x[:, None].repeat(1, self._config.hc_mult, 1)
        pre = torch.zeros_like(streams[..., 0])
        pre[:, 0] = 1
        return streams, pre

    def _mix_logits(self, own: MixWeights, streams: Tensor) -> Tensor:
        flat = streams.flatten(1)
        return linear(unit(flat, self._config.rms_norm_eps), own.fn)

    def _mix(self, own: MixWeights, streams: Tensor) -> _Mix:
        """The three mixes a sublayer's weights make of the streams before it."""
        num, eps = self._config.hc_mult, self._config.hc_eps
        scale, base = own.scale.to(self._dtype), own.base.to(self._dtype)
        mixed = self._mix_logits(own, streams)
        pre, post, across = (
            mixed[:, part] * scale[i] + base[part]
            for i, part in enumerate((slice(num), slice(num, 2 * num), slice(2 * num, None)))
        )
        across = across.reshape(-1, num, num).softmax(-1) + eps
        across = across / (across.sum(-2, keepdim=True) + eps)
        for _ in range(self._config.hc_sinkhorn_iters - 1):
            across = across / (across.sum(-1, keepdim=True) + eps)
            across = across / (across.sum(-2, keepdim=True) + eps)
        return _Mix(torch.sigmoid(pre) + eps, 2 * torch.sigmoid(post), across)

    # ---- experts ----

    def _moe(self, own: MoeWeights, x: Tensor, token_ids: Tensor, note: Note) -> Tensor:
        """[T, D]: the chosen experts' weighted sum, and the shared expert."""
        config = self._config
        scores = F.softplus(linear(x, own.router)).sqrt()
        if own.tid2eid is not None:
            experts = own.tid2eid[token_ids]
        else:
            assert own.bias is not None
            best = best_of(scores + own.bias.to(self._dtype), config.num_experts_per_tok)
            experts = best.nonzero()[:, 1].reshape(len(x), -1)
        experts = experts.sort(-1).values
        weight = scores.gather(1, experts)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
        note("experts", experts)
        note("expert_weights", weight)
        y = self._expert(x, own.shared_w1, own.shared_w3, own.shared_w2)
        for expert in range(config.n_routed_experts):
            token, place = (experts == expert).nonzero(as_tuple=True)
            if len(token):
                part = self._expert(x[token], own.w1[expert], own.w3[expert], own.w2[expert])
                y.index_add_(0, token, part * weight[token, place, None])
        return y

    def _expert(self, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
        limit = self._config.swiglu_limit
        gate = F.silu(linear(x, w1).clamp(max=limit))
        return linear(gate * linear(x, w3).clamp(-limit, limit), w2)

    # ---- n-gram embeddings ----

    def _engrams(
        self, own: EngramWeights, token_ids: Tensor, streams: Tensor, note: Note
    ) -> Tensor:
        """[T, S, D]: what the layer's n-gram embeddings add to the streams."""
        config, plan = self._config, self._config.engram
        assert plan is not None
        assert self._weights.token_map is not None
        ids = self._weights.token_map[token_ids]
        pad = self._weights.token_map[plan.pad_id]
        hashed, hashes = torch.zeros_like(ids), []
        for back in range(plan.max_ngram_size):
            earlier = torch.cat([pad.expand(back), ids])[: len(ids)]
            hashed = hashed ^ (earlier * own.multipliers[back])
            if back:
                columns = slice((back - 1) * plan.num_heads, back * plan.num_heads)
                hashes.append(hashed[:, None] % own.primes[columns] + own.offsets[columns])
        rows = torch.cat(hashes, dim=1)
        note("engram_hash", rows)
        looked_up = own.embed[rows].to(self._dtype).flatten(1)
        both = linear(looked_up, own.wkv).reshape(len(ids), config.hc_mult + 1, -1)
        key, value = both[:, :-1], both[:, -1:]
        eps = config.rms_norm_eps
        product = unit(streams, eps) * own.q_weight.to(self._dtype)
        product = product * (unit(key, eps) * own.k_weight.to(self._dtype))
        raw = product.sum(-1, keepdim=True) * config.hidden_size**-0.5
        gate = torch.sigmoid(raw.sign() * raw.abs().clamp(min=1e-6).sqrt())
        note("engram_gate", gate[..., 0])
        added: Tensor = gate * value
        return added

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return unit(x, self._config.rms_norm_eps) * weight.to(x.dtype)


def _prefixed(note: Note, layer: int) -> Note:
    return lambda name, value: note(f"L{layer}.{name}", value)


def _collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return (pre[..., None] * streams).sum(1)


def _expand(streams: Tensor, y: Tensor, mix: _Mix) -> Tensor:
    """new_k = post_k * y + sum_j across[j, k] * stream_j."""
    mixed = torch.einsum("tjk,tjd->tkd", mix.across, streams)
    return mix.post[..., None] * y[:, None] + mixed
