"""Attention of the dense hybrid reference: window, compressed rows, and which of them are read.

Knows nothing of the rest of a layer. Invariant: query p reads window rows max(0, p - window + 1)..p
and compressed rows whose last token is p or before it, no others.

Shapes: T tokens, D hidden, H heads of hd, G = T // ratio rows of a source, nh index heads of ih.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.dense.arithmetic import Note, best_of, linear, unit
from bench.dense.quantisers import quantised
from deepinfer.models.hybrid.layer_plan import HybridConfig, Layer
from deepinfer.models.hybrid.weights import AttentionWeights, CompressorWeights, IndexerWeights

QUERIES = 512
"""Queries that attend at once; bounds the memory of their scores."""


@dataclass(slots=True)
class Published:
    """What sources and selectors leave for the layers behind them, by layer.

    `rows` [G, hd] and `index_keys` [G, ih] of a source, `selected` bool [T, G] of a selector,
    `candidates` bool [T, G] of the layer that publishes them.
    """

    rows: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)
    selected: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DenseAttention:
    """The attention of each layer; `dtype` of activations."""

    config: HybridConfig
    dtype: torch.dtype

    @property
    def quantise(self) -> bool:
        """Whether rows, and the queries of index keys, go through the quantisers."""
        return self.config.qat or self.config.cache == "packed"

    def attend(
        self, layer: Layer, own: AttentionWeights, x: Tensor, published: Published, note: Note
    ) -> Tensor:
        """[T, D] of the normed input [T, D]."""
        num, positions = len(x), torch.arange(len(x), device=x.device)
        q, latent_q = self.queries(layer, own, x, positions)
        window = self.window_rows(layer, own, x, positions, note)
        rows = window[:0]
        readable = torch.zeros(num, 0, dtype=torch.bool, device=x.device)
        if layer.source is not None:
            if own.compressor is not None:
                self._make_rows(layer, own, x, published, note)
            if own.indexer is not None:
                keys = published.index_keys[layer.source]
                scores = self._scores(layer, own.indexer, x, latent_q, keys, note)
                self._select(layer, scores, published, note)
            rows = published.rows[layer.source]
            readable = (
                _visible(num, len(rows), layer.ratio, x.device)
                if layer.selector is None
                else published.selected[layer.selector]
            )
        out = self._read(q, window, rows, readable, own.sink.to(self.dtype))
        return self.output(layer, own, out, positions)

    def queries(
        self, layer: Layer, own: AttentionWeights, x: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotated queries [T, H, hd] of the normed input [T, D], and what they are made of."""
        latent_q = self._norm(linear(x, own.wq_a), own.q_norm)
        q = linear(latent_q, own.wq_b).reshape(len(x), -1, self.config.head_dim)
        if not self.config.single_pass:  # V4 norms each head
            q = unit(q, self.config.rms_norm_eps)
        return self._rotation(layer)(q, positions), latent_q

    def window_rows(
        self, layer: Layer, own: AttentionWeights, x: Tensor, positions: Tensor, note: Note
    ) -> Tensor:
        """Rows [T, hd] of the layer's window, as a cache gives them back."""
        kv = self._norm(linear(x, own.wkv), own.kv_norm)
        note("kv_prerope", kv)
        window = self._stored("window", self._rotation(layer)(kv, positions))
        note("window_kv", window)
        return window

    def output(self, layer: Layer, own: AttentionWeights, out: Tensor, positions: Tensor) -> Tensor:
        """[T, D] of what the heads have read, [T, H, hd]."""
        config, num = self.config, len(out)
        out = self._rotation(layer)(out, -positions).flatten(1)
        groups, rank = config.o_groups, config.o_lora_rank
        blocks = own.wo_a.to(self.dtype).reshape(groups, rank, -1)
        grouped = torch.einsum("tgi,goi->tgo", out.reshape(num, groups, -1), blocks)
        return linear(grouped.flatten(1), own.wo_b)

    def _read(
        self, q: Tensor, window: Tensor, rows: Tensor, readable: Tensor, sink: Tensor
    ) -> Tensor:
        """Softmax attention [T, H, hd] over the window and the rows that are `readable` [T, G]."""
        num, size = len(q), self.config.sliding_window
        out = []
        for begin in range(0, num, QUERIES):
            end, low = min(begin + QUERIES, num), max(0, begin - size + 1)
            at = torch.arange(begin, end, device=q.device)[:, None]
            key_at = torch.arange(low, end, device=q.device)
            near = (key_at <= at) & (key_at > at - size)
            keys = torch.cat([window[low:end], rows])
            scores = torch.einsum("thd,kd->htk", q[begin:end], keys) * self.config.head_dim**-0.5
            mask = torch.cat([near, readable[begin:end]], dim=1)
            scores = scores.masked_fill(~mask, -math.inf)
            sinks = sink[:, None, None].expand(-1, end - begin, 1)
            probabilities = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
            out.append(torch.einsum("htk,kd->thd", probabilities, keys))
        return torch.cat(out)

    def _make_rows(
        self, layer: Layer, own: AttentionWeights, x: Tensor, published: Published, note: Note
    ) -> None:
        """Publish a source's compressed rows and, if it has an index, their keys."""
        assert own.compressor is not None
        turn = self._rotation(layer)
        latent = self._pooled(layer, own.compressor, x)
        note("latent", latent)
        starts = torch.arange(len(latent), device=x.device) * layer.ratio
        rows = published.rows[layer.index] = self._stored("compressed", turn(latent, starts))
        note("compressed_rows", rows)
        if own.indexer is None:
            return
        if own.indexer.compressor is not None:
            keys = self._pooled(layer, own.indexer.compressor, x)
        else:
            assert own.indexer.wk is not None
            assert own.indexer.k_norm is not None
            keys = self._norm(linear(latent, own.indexer.wk), own.indexer.k_norm)
        keys = published.index_keys[layer.index] = self._stored("index", turn(keys, starts))
        note("index_k", keys)

    def _scores(
        self,
        layer: Layer,
        own: IndexerWeights,
        x: Tensor,
        latent_q: Tensor,
        keys: Tensor,
        note: Note,
    ) -> Tensor:
        """[T, G]: what a selector makes of the `keys` [G, ih] of its source."""
        num, size = len(x), self.config.index_head_dim
        q = linear(latent_q, own.wq_b).reshape(num, -1, size)
        q = self._rotation(layer)(q, torch.arange(num, device=x.device))
        q = quantised("index", q) if self.quantise else q
        note("index_q", q)
        weight = linear(x, own.weights_proj) * self.config.index_n_heads**-0.5
        dots = torch.einsum("thd,gd->thg", q, keys).relu() * size**-0.5
        return torch.einsum("th,thg->tg", weight, dots)

    def _pooled(self, layer: Layer, own: CompressorWeights, x: Tensor) -> Tensor:
        """[G, dim]: one normed, unrotated row per complete group of `x` [T, D]."""
        ratio = layer.ratio
        groups = x[: len(x) // ratio * ratio]
        kv = linear(groups, own.wkv)
        if own.wgate is None:
            return self._norm(kv, own.norm)
        shape = (len(groups) // ratio, ratio, kv.shape[1])
        kv, gate = kv.reshape(shape), linear(groups, own.wgate).reshape(shape)
        if own.bias is not None:
            gate = gate + own.bias.to(self.dtype)
        size = len(own.norm)
        if kv.shape[-1] == 2 * size:  # the group before has the first half, this one the second
            before = [_shifted(y[..., :size], fill) for y, fill in ((kv, 0.0), (gate, -math.inf))]
            kv = torch.cat([before[0], kv[..., size:]], dim=1)
            gate = torch.cat([before[1], gate[..., size:]], dim=1)
        return self._norm((kv * gate.softmax(1)).sum(1), own.norm)

    def _select(self, layer: Layer, scores: Tensor, published: Published, note: Note) -> None:
        """Publish the best visible rows of each query, by `scores` [T, G]."""
        config, (num, num_rows) = self.config, scores.shape
        visible = _visible(num, num_rows, layer.ratio, scores.device)
        scores = scores.masked_fill(~visible, -math.inf)
        note("index_scores", scores)
        if layer.candidates == "publish":
            published.candidates = self._candidates(scores, visible)
            note("candidates", published.candidates)
        if layer.candidates == "obey" and published.candidates is not None:
            scores = scores.masked_fill(~published.candidates, -math.inf)
        selected = best_of(scores, config.index_topk)
        published.selected[layer.index] = selected
        note("selected", selected)

    def _candidates(self, scores: Tensor, visible: Tensor) -> Tensor:
        """bool [T, G]: rows of the best blocks of rows; the newest visible row's block is in."""
        config, (num, num_rows) = self.config, scores.shape
        size = config.candidate_block_size
        num_blocks = -(-num_rows // size)
        padded = F.pad(scores, (0, num_blocks * size - num_rows), value=-math.inf)
        blocks = padded.reshape(num, num_blocks, size).amax(-1)
        newest = (visible.sum(1) - 1) // size  # -1 before the first row
        number = torch.arange(num_blocks, device=scores.device)
        blocks = blocks.masked_fill(number == newest[:, None], math.inf)
        kept = best_of(blocks, config.candidate_topk_blocks)
        return kept.repeat_interleave(size, dim=1)[:, :num_rows]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return unit(x, self.config.rms_norm_eps) * weight.to(x.dtype)

    def _stored(self, kind: str, x: Tensor) -> Tensor:
        """`x` as a cache row of `kind` gives it back."""
        if self.quantise:
            return quantised(kind, x)
        return x.bfloat16().to(x.dtype) if self.config.cache == "bf16" else x

    def _rotation(self, layer: Layer) -> Callable[[Tensor, Tensor], Tensor]:
        """Turns the last dims of [N, .., dim] by [N] positions, at this layer's frequencies."""
        config = self.config
        frequencies = _frequencies(config, compressed=layer.ratio > 0).to(self.dtype)

        def turn(x: Tensor, positions: Tensor) -> Tensor:
            size = config.qk_rope_head_dim
            angle = positions.to(x.dtype)[:, None] * frequencies.to(x.device)
            angle = angle.reshape(len(x), *(1,) * (x.ndim - 2), size // 2)
            cos, sin = angle.cos(), angle.sin()
            fixed, even, odd = x[..., :-size], x[..., -size::2], x[..., -size + 1 :: 2]
            turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
            return torch.cat([fixed, turned.flatten(-2)], dim=-1)

        return turn


def _frequencies(config: HybridConfig, *, compressed: bool) -> Tensor:
    """float32 [qk_rope_head_dim / 2]; YaRN for layers that read compressed rows."""
    size = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    powers = base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if not compressed:
        return 1.0 / powers
    yarn = config.yarn

    def dim_of(turns: float) -> float:
        length = yarn.original_max_position_embeddings
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dim_of(yarn.beta_fast)), 0), math.ceil(dim_of(yarn.beta_slow))
    spread = max(min(high, size - 1) - low, 0.001)
    kept = 1 - ((torch.arange(size // 2, dtype=torch.float32) - low) / spread).clamp(0, 1)
    return 1.0 / (yarn.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _shifted(x: Tensor, fill: float) -> Tensor:
    """[G, ..]: at each group the values of the one before, `fill` at the first."""
    return torch.cat([torch.full_like(x[:1], fill), x[:-1]])


def _visible(num: int, num_rows: int, ratio: int, device: torch.device) -> Tensor:
    """bool [T, G]: row j is complete when query p is there, j < (p + 1) // ratio."""
    complete = (torch.arange(num, device=device) + 1) // ratio
    return torch.arange(num_rows, device=device) < complete[:, None]
