"""Attention of one layer: its own window, and compressed rows that it or an earlier layer selected.

In one step and layer: queries and new window rows; the rows whose groups close, and their index
keys (sources); scores and selection (selectors); then each tile's softmax over

    sink | ring rows | the chunk's own rows | selected compressed rows

One latent per row serves as key and value of all heads. It carries its rotation, so the output is
rotated back by the query's position before it is projected, head group by head group.

Knows nothing of streams or experts. Invariant: a source's rows of this step are written before any
tile reads, so that the token that closes a group sees its row; rings that a chunk overwrites are
read before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer.device.base import Device
from deepinfer.models.hybrid.cache import HybridCache
from deepinfer.models.hybrid.formats import quantise
from deepinfer.models.hybrid.geometry import COMPRESSED, INDEX, OPEN, OPEN_INDEX, WINDOW
from deepinfer.models.hybrid.layer_plan import V4, HybridConfig, Layer
from deepinfer.models.hybrid.layers import (
    Pool,
    Record,
    linear_of,
    rms_norm,
    rotate_,
    wide,
)
from deepinfer.models.hybrid.layout import Closing, StepLayout, Tile
from deepinfer.models.hybrid.selection import (
    Selection,
    best_rows,
    candidate_rows,
    hidden_but,
    index_scores,
)
from deepinfer.models.hybrid.weights import AttentionWeights

Part = tuple[Tensor, Tensor]
"""Rows, and which of them are hidden from whom; see `softmax_over`."""
PartsOf = Callable[[Tensor], list[Part]]


@dataclass(slots=True)
class Published:
    """What layers of one step leave to later ones: by selector and tile the selection, by tile the
    candidates of the last publisher, bool [n, q, L]."""

    selections: dict[tuple[int, Tile], Selection] = field(default_factory=dict)
    candidates: dict[Tile, Tensor] = field(default_factory=dict)


class LayerAttention:
    """The attention of one layer over a `HybridCache`.

    `rope` is the complex table of the layer's kind, [max positions, qk_rope_head_dim / 2].
    """

    def __init__(
        self,
        config: HybridConfig,
        layer: Layer,
        weights: AttentionWeights,
        rope: Tensor,
        cache: HybridCache,
        device: Device,
    ) -> None:
        self._config, self._layer, self._cache, self._rope = config, layer, cache, rope
        self._number = layer.index
        self._wq_a, self._wq_b = linear_of(device, weights.wq_a), linear_of(device, weights.wq_b)
        self._wkv, self._wo_b = linear_of(device, weights.wkv), linear_of(device, weights.wo_b)
        self._wo_a = weights.wo_a.view(config.o_groups, config.o_lora_rank, -1).mT
        self._q_norm, self._kv_norm = weights.q_norm, weights.kv_norm
        self._sink = wide(weights.sink)
        self._scale = config.head_dim**-0.5
        self._rows = _Source(config, layer, weights, rope, cache, device)
        self._selector = (
            _Selector(config, layer, weights, cache, device) if layer.is_selector else None
        )

    def __call__(
        self, x: Tensor, layout: StepLayout, published: Published, record: Record | None
    ) -> Tensor:
        """[T, D] of `x` [T, D], the normalised input; the layer's rows are stored."""
        rope = self._rope.index_select(0, layout.positions)
        q, residual = self._queries(x, rope)
        kv = self._latent(x, rope)
        self._rows.write(x, layout)
        if self._selector is not None:
            self._selector.select(x, residual, rope, layout, published, record)
        return self._out(self._attend(q, kv, layout, published), rope)

    def keep(self, x: Tensor, layout: StepLayout) -> None:
        """Store the window rows of `x` [n, D], one of each of `layout.window`, without a query."""
        kept, cache = layout.window, self._cache
        positions = layout.positions.index_select(0, kept.tokens)
        kv = self._latent(x, self._rope.index_select(0, positions))
        cache.write_window(self._number, kept.slots, kept.rows, kv)

    def beside(self, x: Tensor, positions: Tensor, parts_of: PartsOf) -> Tensor:
        """Attention of `x` [T, D] at `positions` over rows that the caller chooses; stores nothing.

        Args:
            parts_of: gives `softmax_over`'s parts; is given the window rows of `x` [T, dim], as
                they would be read back.
        """
        rope = self._rope.index_select(0, positions)
        q, _ = self._queries(x, rope)
        parts = parts_of(self._cache.round_trip(WINDOW, self._latent(x, rope)))
        q = q.view(len(parts[0][0]), -1, *q.shape[1:])
        return self._out(softmax_over(q, parts, self._sink).flatten(0, 1), rope)

    def _queries(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled queries [T, H, dim], and what they are made of [T, q_lora_rank]."""
        config = self._config
        residual = rms_norm(self._wq_a(x), self._q_norm, config.rms_norm_eps)
        q = self._wq_b(residual).view(len(x), -1, config.head_dim)
        if config.family == V4:
            q = rms_norm(q, None, config.rms_norm_eps)
        return rotate_(q, rope[:, None]).mul_(self._scale), residual

    def _latent(self, x: Tensor, rope: Tensor) -> Tensor:
        """Window rows [T, dim], not rounded yet."""
        return rotate_(rms_norm(self._wkv(x), self._kv_norm, self._config.rms_norm_eps), rope)

    def _out(self, out: Tensor, rope: Tensor) -> Tensor:
        """[T, D] of what was read, [T, H, dim]."""
        rotate_(out, rope[:, None].conj())
        grouped = out.view(len(out), self._config.o_groups, -1).transpose(0, 1)
        lora = torch.bmm(grouped, self._wo_a).transpose(0, 1).flatten(1)
        return self._wo_b(lora)

    def _attend(self, q: Tensor, kv: Tensor, layout: StepLayout, published: Published) -> Tensor:
        """[T, H, dim], rotated as the rows are; the window rows `kv` [T, dim] are stored."""
        cache, number, kept = self._cache, self._number, layout.window
        before = {
            tile: cache.read_window(number, tile.slots)
            for tile in layout.tiles
            if tile.ring is not None and tile.ring.before
        }
        cache.write_window(number, kept.slots, kept.rows, kv.index_select(0, kept.tokens))
        own = None
        out = torch.empty_like(q)
        for tile in layout.tiles:
            parts = []
            if tile.ring is not None:
                ring = before.get(tile)
                ring = cache.read_window(number, tile.slots) if ring is None else ring
                parts.append((ring, tile.ring.hidden))
            if tile.own is not None:
                own = cache.round_trip(WINDOW, kv) if own is None else own
                rows = own[tile.own.tokens].view(tile.num_seqs, -1, own.shape[1])
                parts.append((rows, tile.own.hidden))
            parts += self._compressed(tile, published)
            out[tile.tokens] = softmax_over(tile.of(q), parts, self._sink).flatten(0, 1)
        return out

    def _compressed(self, tile: Tile, published: Published) -> list[tuple[Tensor, Tensor]]:
        """The compressed rows a tile reads, and what of them is hidden from whom."""
        layer, rows = self._layer, tile.rows.get(self._layer.ratio)
        if rows is None or layer.source is None:
            return []
        hidden = rows.hidden
        if layer.selector is not None:
            selection = published.selections[layer.selector, tile]
            hidden = selection.hidden
            if selection.places is not None:
                read = self._cache.read_rows(COMPRESSED, layer.source, selection.places)
                return [(read, hidden)]
        read = self._cache.read_blocks(COMPRESSED, layer.source, rows.blocks)
        return [(read[:, : rows.num_rows], hidden)]


def softmax_over(q: Tensor, parts: list[tuple[Tensor, Tensor]], sink: Tensor) -> Tensor:
    """Attention over the union of several sets of rows, with one softmax; rows are their values.

    Args:
        q: [n, q, heads, dim], scaled.
        parts: rows [n, L, dim], or [n * q, L, dim] if each query has its own, and which are hidden,
            bool [n or 1, q, 1, L].
        sink: [heads], one more logit, of a row of zeros.

    Returns:
        [n, q, heads, dim].
    """
    scores = []
    for rows, hidden in parts:
        dots = torch.bmm(q.reshape(len(rows), -1, q.shape[-1]), rows.mT)
        dots = wide(dots).view(*q.shape[:3], -1)
        scores.append(dots.masked_fill_(hidden, -torch.inf))
    scores.append(sink[:, None].expand(*q.shape[:3], 1))
    weights = torch.cat(scores, -1).softmax(-1).to(q.dtype)
    total, begin = torch.zeros_like(q), 0
    for rows, _ in parts:
        end = begin + rows.shape[1]
        part = weights[..., begin:end].reshape(len(rows), -1, rows.shape[1])
        total += torch.bmm(part, rows).view(q.shape)
        begin = end
    return total


class _Source:
    """Makes and stores a layer's compressed rows and index keys, if it is a source."""

    def __init__(
        self,
        config: HybridConfig,
        layer: Layer,
        weights: AttentionWeights,
        rope: Tensor,
        cache: HybridCache,
        device: Device,
    ) -> None:
        self._layer, self._cache, self._rope = layer, cache, rope
        self._eps = config.rms_norm_eps
        self._pool = self._key_pool = self._wk = self._k_norm = None
        if layer.compressor is None:
            return
        assert weights.compressor is not None
        self._pool = Pool(layer.compressor, weights.compressor, self._eps, device)
        if layer.index_keys is not None:
            assert weights.indexer is not None
            self._k_norm = weights.indexer.k_norm
            if weights.indexer.wk is not None:
                self._wk = linear_of(device, weights.indexer.wk)
            if weights.indexer.compressor is not None:
                keys = weights.indexer.compressor
                self._key_pool = Pool(layer.compressor, keys, self._eps, device)

    def write(self, x: Tensor, layout: StepLayout) -> None:
        """Store the rows whose last token is in the step, and what later rows will need."""
        if self._pool is None:
            return
        assert self._layer.compressor is not None
        closing = layout.closings[self._layer.compressor]
        number = self._layer.index
        latent = self._pooled(self._pool, OPEN, x, closing)
        keys = None
        if self._key_pool is not None:
            keys = self._pooled(self._key_pool, OPEN_INDEX, x, closing)
        if latent is None:
            return
        if self._wk is not None:
            keys = rms_norm(self._wk(latent), self._k_norm, self._eps)
        rope = self._rope.index_select(0, closing.positions)
        if keys is not None:
            self._cache.write_rows(INDEX, number, closing.rows, rotate_(keys, rope))
        self._cache.write_rows(COMPRESSED, number, closing.rows, rotate_(latent, rope))

    def _pooled(self, pool: Pool, kind: str, x: Tensor, closing: Closing) -> Tensor | None:
        """The rows [C, dim] that close; None if none does. The step's projections are kept."""
        projected = pool.project(x, closing.phases)
        if closing.members is None:
            return pool.pool(projected, None)
        open_rows = self._cache.region(kind, self._layer.index)
        rows = None
        if len(closing.rows):
            members = closing.members.gather(projected, open_rows)
            rows = pool.pool(members, closing.members.missing)
        kept = closing.kept
        assert kept is not None
        values = projected.index_select(0, kept.tokens)
        open_rows[kept.slots, kept.rows] = values.to(open_rows.dtype)
        return rows


class _Selector:
    """Scores the rows of a layer's source for each query, and selects."""

    def __init__(
        self,
        config: HybridConfig,
        layer: Layer,
        weights: AttentionWeights,
        cache: HybridCache,
        device: Device,
    ) -> None:
        assert weights.indexer is not None
        self._config, self._layer, self._cache = config, layer, cache
        self._wq_b = linear_of(device, weights.indexer.wq_b)
        self._weights = linear_of(device, weights.indexer.weights_proj)
        self._scale = (config.index_n_heads * config.index_head_dim) ** -0.5
        self._quantises = config.qat or config.cache == "packed"

    def select(
        self,
        x: Tensor,
        residual: Tensor,
        rope: Tensor,
        layout: StepLayout,
        published: Published,
        record: Record | None,
    ) -> None:
        """Publish the selection of every tile, and the candidates if the layer is to.

        Args:
            x: [T, D].
            residual: [T, q_lora_rank], what the queries are made of.
            rope: complex [T, r], of the step's positions.
        """
        config, layer = self._config, self._layer
        queries = self._wq_b(residual).view(len(x), -1, config.index_head_dim)
        rotate_(queries, rope[:, None])
        if self._quantises:
            queries = quantise(INDEX, queries)
        weights = wide(self._weights(x)) * self._scale
        for tile in layout.tiles:
            seen = tile.rows.get(layer.ratio)
            if seen is None:
                continue
            assert layer.source is not None
            keys = self._cache.read_blocks(INDEX, layer.source, seen.blocks)[:, : seen.num_rows]
            scores = index_scores(wide(tile.of(queries)), wide(keys), tile.of(weights), seen.hidden)
            if layer.candidates == "publish":
                published.candidates[tile] = candidate_rows(
                    scores, seen.visible, config.candidate_block_size, config.candidate_topk_blocks
                )
            elif layer.candidates == "obey":
                scores = scores.masked_fill(~published.candidates[tile], -torch.inf)
            best = published.selections[layer.index, tile] = self._best(tile, scores)
            if record is not None:
                record("selected", tile.tokens, best.rows.flatten(0, 1))
                if layer.candidates == "publish":
                    record("candidates", tile.tokens, published.candidates[tile].flatten(0, 1))

    def _best(self, tile: Tile, scores: Tensor) -> Selection:
        """The best rows of each query; read one by one where that is less than all rows."""
        seen = tile.rows[self._layer.ratio]
        rows = best_rows(scores, self._config.index_topk)
        if tile.num_queries * rows.shape[-1] >= seen.num_rows:
            return Selection(rows, None, hidden_but(rows, seen.num_rows))
        return Selection(rows, seen.places(rows).flatten(0, 1), (rows < 0)[:, :, None])
