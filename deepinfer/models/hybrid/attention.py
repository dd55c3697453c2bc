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
    Turn,
    linear_of,
    linears_of,
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

FEW_QUERIES = 6
"""Up to here the CPU is faster at rows times queries than the other way round."""


@dataclass(slots=True)
class Published:
    """What layers of one step share, or leave to later ones.

    Attributes:
        turns: rotations by the step's positions, of layers without a ratio and of those with one.
        selections: by selector and tile.
        candidates: by tile those of the last publisher, bool [n, q, L].
    """

    turns: tuple[Turn, Turn]
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
        self._wo_a = weights.wo_a.view(config.o_groups, config.o_lora_rank, -1).mT
        self._wo_b = linear_of(device, weights.wo_b)
        eps = config.rms_norm_eps
        self._residual_norm = device.rms_norm(weights.q_norm, eps)
        self._kv_norm = device.rms_norm(weights.kv_norm, eps)
        self._head_norm = device.rms_norm(None, eps) if config.family == V4 else None
        self._sink = wide(weights.sink)
        self._scale = config.head_dim**-0.5
        self._rows = _Source(config, layer, weights, rope, cache, device)
        self._selector = _Selector(config, layer, cache) if layer.is_selector else None
        of_input = {"wq_a": weights.wq_a, "wkv": weights.wkv}
        of_residual = {"wq_b": weights.wq_b}
        of_input |= {kind: pool.weight for kind, pool in self._rows.pools.items()}
        if self._selector is not None:
            assert weights.indexer is not None
            of_input["index_weights"] = weights.indexer.weights_proj
            of_residual["index_wq_b"] = weights.indexer.wq_b
        self._of_input = linears_of(device, of_input)
        self._of_residual = linears_of(device, of_residual)

    def __call__(
        self, x: Tensor, layout: StepLayout, published: Published, record: Record | None
    ) -> Tensor:
        """[T, D] of `x` [T, D], the normalised input; the layer's rows are stored."""
        turn = published.turns[self._layer.ratio > 0]
        rope, made = turn.there, self._project(x)
        q, kv = self._queries(made, rope), self._latent(made, rope)
        self._rows.write(made, layout)
        if self._selector is not None:
            self._selector.select(made, rope, layout, published, record)
        return self._out(self._attend(q, kv, layout, published), turn)

    def keep(self, x: Tensor, layout: StepLayout) -> None:
        """Store the window rows of `x` [n, D], one of each of `layout.window`, without a query."""
        kept, cache = layout.window, self._cache
        rope = self._rope.index_select(0, kept.of(layout.positions))
        kv = self._latent(self._of_input(x), rope)
        cache.write_window(self._number, kept.slots, kept.rows, kv)

    def beside(self, x: Tensor, positions: Tensor, parts_of: PartsOf) -> Tensor:
        """Attention of `x` [T, D] at `positions` over rows that the caller chooses; stores nothing.

        Args:
            parts_of: gives `softmax_over`'s parts; is given the window rows of `x` [T, dim], as
                they would be read back.
        """
        turn = Turn.of(self._rope, positions)
        rope, made = turn.there, self._project(x)
        parts = parts_of(self._cache.round_trip(WINDOW, self._latent(made, rope)))
        q = self._queries(made, rope)
        q = q.view(len(parts[0][0]), -1, *q.shape[1:])
        return self._out(softmax_over(q, parts, self._sink).flatten(0, 1), turn)

    def _project(self, x: Tensor) -> dict[str, Tensor]:
        """By name what is made of `x` [T, D] alone, and of its normed `wq_a` [T, q_lora_rank]."""
        made = self._of_input(x)
        return made | self._of_residual(self._residual_norm(made["wq_a"]))

    def _queries(self, made: dict[str, Tensor], rope: Tensor) -> Tensor:
        """Scaled queries [T, H, dim]."""
        q = made["wq_b"].view(len(rope), -1, self._config.head_dim)
        if self._head_norm is not None:
            q = self._head_norm(q)
        return rotate_(q, rope[:, None]).mul_(self._scale)

    def _latent(self, made: dict[str, Tensor], rope: Tensor) -> Tensor:
        """Window rows [T, dim], not rounded yet."""
        return rotate_(self._kv_norm(made["wkv"]), rope)

    def _out(self, out: Tensor, turn: Turn) -> Tensor:
        """[T, D] of what was read, [T, H, dim]."""
        rotate_(out, turn.back[:, None])
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
        cache.write_window(number, kept.slots, kept.rows, kept.of(kv))
        has_own = any(tile.own is not None for tile in layout.tiles)
        own = cache.round_trip(WINDOW, kv) if has_own else kv

        def read(tile: Tile) -> Tensor:
            parts = []
            if tile.ring is not None:
                ring = before.get(tile)
                ring = cache.read_window(number, tile.slots) if ring is None else ring
                parts.append((ring, tile.ring.hidden))
            if tile.own is not None:
                rows = own[tile.own.tokens].view(tile.num_seqs, -1, own.shape[1])
                parts.append((rows, tile.own.hidden))
            parts += self._compressed(tile, published)
            return softmax_over(tile.of(q), parts, self._sink).flatten(0, 1)

        if len(layout.tiles) == 1:  # it has all tokens, in their order
            return read(layout.tiles[0])
        out = torch.empty_like(q)
        for tile in layout.tiles:
            out[tile.tokens] = read(tile)
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
        dots = wide(_dots(q.reshape(len(rows), -1, q.shape[-1]), rows))
        scores.append(dots.view(*q.shape[:3], -1).masked_fill_(hidden, -torch.inf))
    scores.append(sink[:, None].expand(*q.shape[:3], 1))
    weights = torch.cat(scores, -1).softmax(-1).to(q.dtype)
    total, begin = None, 0
    for rows, _ in parts:
        end = begin + rows.shape[1]
        part = weights[..., begin:end].reshape(len(rows), -1, rows.shape[1])
        if total is None:
            total = torch.bmm(part, rows)
        else:
            total = total.view(len(rows), -1, q.shape[-1]).baddbmm_(part, rows)
        begin = end
    assert total is not None
    return total.view(q.shape)


def _dots(q: Tensor, rows: Tensor) -> Tensor:
    """[n, m, L] of `q` [n, m, dim] and `rows` [n, L, dim]."""
    if q.shape[1] <= FEW_QUERIES:
        return torch.bmm(rows, q.mT).mT
    return torch.bmm(q, rows.mT)


class _Source:
    """Makes and stores a layer's compressed rows and index keys, if it is a source.

    Attributes:
        pools: by the kind of region that keeps their open groups; none if it is no source.
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
        self._layer, self._cache, self._rope = layer, cache, rope
        eps = config.rms_norm_eps
        self._wk = self._k_norm = None
        self.pools: dict[str, Pool] = {}
        if layer.compressor is None:
            return
        assert weights.compressor is not None
        self.pools[OPEN] = Pool(layer.compressor, weights.compressor, eps, device)
        if layer.index_keys is not None:
            assert weights.indexer is not None
            if weights.indexer.wk is not None:
                self._k_norm = device.rms_norm(weights.indexer.k_norm, eps)
                self._wk = linear_of(device, weights.indexer.wk)
            if weights.indexer.compressor is not None:
                keys = weights.indexer.compressor
                self.pools[OPEN_INDEX] = Pool(layer.compressor, keys, eps, device)

    def write(self, made: dict[str, Tensor], layout: StepLayout) -> None:
        """Store the rows whose last token is in the step, and what later rows will need.

        Args:
            made: the tokens' projections, each pool's by its kind.
        """
        if self._layer.compressor is None:
            return
        closing = layout.closings[self._layer.compressor]
        pooled = {
            kind: self._pooled(pool, kind, made[kind], closing) for kind, pool in self.pools.items()
        }
        latent, keys = pooled[OPEN], pooled.get(OPEN_INDEX)
        if latent is None:
            return
        number = self._layer.index
        if self._wk is not None and self._k_norm is not None:
            keys = self._k_norm(self._wk(latent))
        rope = self._rope.index_select(0, closing.positions)
        if keys is not None:
            self._cache.write_rows(INDEX, number, closing.rows, rotate_(keys, rope))
        self._cache.write_rows(COMPRESSED, number, closing.rows, rotate_(latent, rope))

    def _pooled(self, pool: Pool, kind: str, projected: Tensor, closing: Closing) -> Tensor | None:
        """The rows [C, dim] that close; None if none does. The step's projections are kept."""
        projected = pool.biased(projected, closing.phases)
        kept, members, rows = closing.kept, closing.members, None
        if kept is None:
            return pool.pool(projected, None)
        open_rows = self._cache.region(kind, self._layer.index)
        if members is not None:
            rows = pool.pool(members.gather(projected, open_rows), members.missing)
        open_rows[kept.slots, kept.rows] = kept.of(projected).to(open_rows.dtype)
        return rows


class _Selector:
    """Scores the rows of a layer's source for each query, and selects."""

    def __init__(self, config: HybridConfig, layer: Layer, cache: HybridCache) -> None:
        self._config, self._layer, self._cache = config, layer, cache
        self._scale = (config.index_n_heads * config.index_head_dim) ** -0.5
        self._quantises = config.qat or config.cache == "packed"

    def select(
        self,
        made: dict[str, Tensor],
        rope: Tensor,
        layout: StepLayout,
        published: Published,
        record: Record | None,
    ) -> None:
        """Publish the selection of every tile, and the candidates if the layer is to.

        Args:
            made: the tokens' projections, of which it is given `index_wq_b` and `index_weights`.
            rope: complex [T, r], of the step's positions.
        """
        config, layer = self._config, self._layer
        queries = made["index_wq_b"].view(len(rope), -1, config.index_head_dim)
        rotate_(queries, rope[:, None])
        if self._quantises:
            queries = quantise(INDEX, queries)
        weights = wide(made["index_weights"]) * self._scale
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
        return Selection(rows, seen.places_of(rows).flatten(0, 1), (rows < 0)[:, :, None])
