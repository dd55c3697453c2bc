"""The dense reference of draft layers: what they guess behind a whole sequence, from the formulas.

Knows nothing of the engine; shares the weights and the layer plan with it. There is no ring and no
state: the model computes all tokens but the newest, and every draft layer sees all that is in its
window. Invariant: what is guessed depends on the sequence alone.

Shapes: N tokens of the sequence, D hidden, S streams, H heads of hd.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bench.dense.arithmetic import linear, unit
from bench.dense.hybrid import HybridDense
from bench.dense.hybrid_attention import DenseAttention, Published
from deepinfer.models.hybrid.layer_plan import HybridConfig, Layer
from deepinfer.models.hybrid.weights import (
    AttentionWeights,
    DSparkWeights,
    HybridWeights,
    MtpWeights,
)


def _ignore(name: str, value: Tensor) -> None:
    """Nobody wants the values between."""


class DenseDrafting:
    """Draft layers behind a dense model.

    Args:
        weights, config: of a model with draft layers.
        dtype: of activations, float32 or float64.
    """

    def __init__(
        self, weights: HybridWeights, config: HybridConfig, *, dtype: torch.dtype = torch.float32
    ) -> None:
        assert config.draft is not None
        assert weights.draft is not None
        self._model = HybridDense(weights, config, dtype=dtype)
        sizes = config.of_draft_layers
        self._layers = HybridDense(weights, sizes, dtype=dtype)
        self._attention = DenseAttention(sizes, dtype)
        self._config, self._plan, self._dtype = config, config.draft, dtype
        self._weights, self._own = weights, weights.draft

    @torch.inference_mode()
    def logits(self, token_ids: Tensor, num_drafts: int) -> Tensor:
        """[k, V] of int64 `token_ids` [N], N >= 2: what each of k <= `num_drafts` drafts, the best
        token of its row, is chosen by. A draft depends on the ones before it."""
        noted: dict[str, Tensor] = {}
        self._model.hidden(token_ids[:-1], noted.__setitem__)
        if isinstance(self._own, MtpWeights):
            streams = noted[f"L{len(self._config.layers) - 1}.streams"]
            return self._one_by_one(self._own, streams, token_ids, num_drafts)
        inputs = [noted[f"L{layer}.input"].mean(1) for layer in self._plan.targets]
        return self._block(self._own, torch.cat(inputs, dim=-1), token_ids)[:num_drafts]

    def propose(self, token_ids: Tensor, num_drafts: int) -> Tensor:
        """The drafts, int64 [k]."""
        return self.logits(token_ids, num_drafts).argmax(-1)

    # ---- MTP ----

    def _one_by_one(
        self, own: MtpWeights, streams: Tensor, token_ids: Tensor, num_drafts: int
    ) -> Tensor:
        """Pairs of `streams` [n, S, D] and the tokens behind them, and guess after guess."""
        layer, weights = self._config.draft_layers[0], own.layers[0]
        following, found = token_ids[1:], []
        for _ in range(num_drafts):
            token = linear(self._norm(self._embedded(following), own.enorm), own.e_proj)
            pairs = token[:, None] + linear(self._norm(streams, own.hnorm), own.h_proj)

            def attend(x: Tensor) -> Tensor:
                return self._attention.attend(layer, weights.attention, x, Published(), _ignore)

            behind, pre = self._layers.layer(weights, attend, pairs, pairs[..., 0], following)
            last = self._layers.collapsed(behind[-1:], pre[-1:], own.hc_head)
            found.append(self._head(last, own.norm))
            streams = torch.cat([streams, behind[-1:]])
            following = torch.cat([following, found[-1].argmax(-1)])
        return torch.cat(found)

    # ---- DSpark ----

    def _block(self, own: DSparkWeights, inputs: Tensor, token_ids: Tensor) -> Tensor:
        """[block, V]; `inputs` [N - 1, n * D] of the target layers."""
        read = self._norm(linear(inputs, own.main_proj), own.main_norm)
        block = torch.full_like(token_ids[:1], self._plan.noise_id).repeat(self._plan.block_size)
        block[0] = token_ids[-1]
        streams, pre = self._layers.spread(block)
        for layer, weights in zip(self._config.draft_layers, own.layers, strict=True):

            def attend(
                x: Tensor, layer: Layer = layer, own: AttentionWeights = weights.attention
            ) -> Tensor:
                return self._attend_to_all(layer, own, x, read)

            streams, pre = self._layers.layer(weights, attend, streams, pre, block)
        logits = self._head(self._layers.collapsed(streams, pre, None), own.norm)
        before = token_ids[-1]
        for row in logits:
            row += linear(own.markov_embed[before].to(self._dtype), own.markov_head)
            before = row.argmax()
        return logits

    def _attend_to_all(
        self, layer: Layer, own: AttentionWeights, x: Tensor, read: Tensor
    ) -> Tensor:
        """[block, D]: each of the block's rows reads the window before the block, and the block."""
        attention, note = self._attention, _ignore
        before = torch.arange(len(read), device=x.device)
        positions = len(read) + torch.arange(len(x), device=x.device)
        window = attention.window_rows(layer, own, read, before, note)
        own_rows = attention.window_rows(layer, own, x, positions, note)
        keys = torch.cat([window[-self._config.sliding_window :], own_rows])
        q, _ = attention.queries(layer, own, x, positions)
        scores = torch.einsum("thd,kd->thk", q, keys) / math.sqrt(self._config.head_dim)
        sink = own.sink.to(self._dtype)[None, :, None].expand(len(x), -1, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        out = torch.einsum("thk,kd->thd", weights, keys)
        return attention.output(layer, own, out, positions)

    # ---- both ----

    def _embedded(self, token_ids: Tensor) -> Tensor:
        return self._weights.embed[token_ids].to(self._dtype)

    def _head(self, x: Tensor, norm: Tensor) -> Tensor:
        return linear(self._norm(x, norm), self._weights.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return unit(x, self._config.rms_norm_eps) * weight.to(x.dtype)
