"""A hybrid network over its cache: the tokens of one step in, logits out.

    embed -> S streams -> [ Engram, attention, experts ] x layers -> collapse -> norm -> head

A sublayer reads one mixture of the streams and writes to all of them. V4 reads by the mix it has
just computed; V4.1 by that of the sublayer before, the first one reads stream 0 alone.

Knows nothing of requests, streams of a device or sampling. Invariant: a token's logits depend on
its own sequence only, and not on how its tokens were spread over steps, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.config import MAX_DRAFTS
from deepinfer.device.base import Device
from deepinfer.models.hybrid.attention import LayerAttention, Published
from deepinfer.models.hybrid.cache import HybridCache
from deepinfer.models.hybrid.experts import Moe
from deepinfer.models.hybrid.geometry import IDS
from deepinfer.models.hybrid.layer_plan import HybridConfig, Layer
from deepinfer.models.hybrid.layers import (
    ALL,
    EngramLayer,
    HeadMix,
    Linear,
    Mix,
    Record,
    Turn,
    collapse,
    expand,
    frequencies,
    linear_of,
    rope_table,
    wide,
)
from deepinfer.models.hybrid.layout import StepLayout
from deepinfer.models.hybrid.weights import HybridWeights, LayerWeights


@dataclass(slots=True)
class Taps:
    """What draft layers read of a step's forward pass.

    Attributes:
        targets: layers whose inputs are wanted.
        inputs: of each of these [T, D], the mean over the streams it reads.
        streams: [T, S, D], behind the last layer.
    """

    targets: tuple[int, ...]
    inputs: list[Tensor] = field(default_factory=list)
    streams: Tensor | None = None


Recorder = Callable[[int, str, "slice | Tensor", Tensor], None]
"""A `Record` of every layer: the layer's number comes first."""


class HybridNetwork:
    """Forward pass of one step.

    Args:
        weights: on `device`, of the shapes `config` says.
        max_positions: the longest a sequence can be.

    Attributes:
        head: logits [n, V] of the normed [n, D].
        rope: complex [positions, r], of layers that see a window alone; with draft layers for
            positions behind the end too.
        recorder: told what each layer chose; None (tests set it).
    """

    def __init__(
        self,
        config: HybridConfig,
        weights: HybridWeights,
        cache: HybridCache,
        device: Device,
        max_positions: int,
    ) -> None:
        self.recorder: Recorder | None = None
        self._config, self._weights, self._cache = config, weights, cache
        beyond = MAX_DRAFTS + config.draft.block_size if config.draft else 0
        ropes = _rope_tables(config, weights, max_positions + beyond)
        self.rope, self._compressed_rope = ropes
        self._layers = [
            LayerNetwork(config, layer, of_layer, ropes[layer.ratio > 0], cache, device)
            for layer, of_layer in zip(config.layers, weights.layers, strict=True)
        ]
        self._norm = device.rms_norm(weights.norm, config.rms_norm_eps)
        self.head = linear_of(device, weights.head)
        self._head_mix = None
        if weights.hc_head is not None:
            self._head_mix = HeadMix(config, weights.hc_head)

    @torch.inference_mode()
    def forward(
        self, layout: StepLayout, rows: Tensor | None, taps: Taps | None = None
    ) -> Tensor | None:
        """Compute a step: its rows, keys and open groups go into the cache.

        Args:
            layout: of the step, with its tiles.
            rows: int64 [M], tokens whose logits are wanted; None if none are.
            taps: filled in.

        Returns:
            Logits [M, vocab_size]; None without `rows`.
        """
        config = self._config
        streams, pre = spread(F.embedding(layout.token_ids, self._weights.embed), config.hc_mult)
        ids, positions = self._ids(layout), layout.positions
        turns = Turn.of(self.rope, positions), Turn.of(self._compressed_rope, positions)
        published = Published(turns)
        for layer in self._layers:
            streams = layer.enter(streams, ids, self.recorder)
            if taps is not None and layer.number in taps.targets:
                taps.inputs.append(streams.mean(1))
            streams, pre = layer.forward(streams, pre, layout, published, self.recorder)
        if taps is not None:
            taps.streams = streams
        if rows is None:
            return None
        streams, pre = streams.index_select(0, rows), pre.index_select(0, rows)
        if self._head_mix is not None:
            pre = self._head_mix(streams)
        return self.head(self._norm(collapse(streams, pre)))

    def _ids(self, layout: StepLayout) -> Tensor | None:
        """Of each token the own compressed id and those before it, int64 [T, n]."""
        engram, token_map = self._config.engram, self._weights.token_map
        if engram is None or layout.ids is None or layout.kept_ids is None:
            return None
        assert token_map is not None
        own = token_map.index_select(0, layout.token_ids)
        kept, stored = layout.kept_ids, self._cache.region(IDS)
        ids = layout.ids.gather(own[:, None], stored)[:, 0]
        if layout.ids.missing is not None:
            ids = torch.where(layout.ids.missing, token_map[engram.pad_id], ids)
        stored[kept.slots, kept.rows, 0] = kept.of(own)
        return ids.view(len(own), -1)


class LayerNetwork:
    """One layer; `number` counts from 0, draft layers behind the model's own."""

    def __init__(
        self,
        config: HybridConfig,
        layer: Layer,
        weights: LayerWeights,
        rope: Tensor,
        cache: HybridCache,
        device: Device,
    ) -> None:
        self.number = layer.index
        self._single_pass = config.single_pass
        norms = weights.attn_norm, weights.ffn_norm
        self._norms = [device.rms_norm(norm, config.rms_norm_eps) for norm in norms]
        self._mixes = Mix(config, weights.attn_mix, device), Mix(config, weights.ffn_mix, device)
        self.attention = LayerAttention(config, layer, weights.attention, rope, cache, device)
        self._moe = Moe(config, weights.moe, device)
        self._engram = (
            EngramLayer(config, weights.engram, device) if weights.engram is not None else None
        )

    def enter(self, streams: Tensor, ids: Tensor | None, recorder: Recorder | None) -> Tensor:
        """The streams the layer reads: with its n-gram embeddings, if it has any."""
        if self._engram is None or ids is None:
            return streams
        return self._engram(streams, ids, self._record(recorder))

    def forward(
        self,
        streams: Tensor,
        pre: Tensor,
        layout: StepLayout,
        published: Published,
        recorder: Recorder | None,
    ) -> tuple[Tensor, Tensor]:
        """The streams behind the layer [T, S, D], and the mix its successor reads by [T, S]."""
        record = self._record(recorder)

        def attend(x: Tensor) -> Tensor:
            return self.attention(x, layout, published, record)

        streams, pre = self.around(attend, streams, pre, layout.token_ids, record)
        if record is not None:
            record("streams", ALL, streams)
        return streams, pre

    def around(
        self,
        attend: Linear,
        streams: Tensor,
        pre: Tensor | None,
        token_ids: Tensor,
        record: Record | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, with `attend`, [T, D] of the normed [T, D], for its attention.

        Without single passes (V4) `pre` is not looked at.
        """

        def choose(x: Tensor) -> Tensor:
            return self._moe(x, token_ids, record)

        for which, sublayer in enumerate((attend, choose)):
            own_pre, post, comb = self._mixes[which](streams)
            reads_by = pre if self._single_pass else own_pre
            assert reads_by is not None
            x = collapse(streams, reads_by)
            y = sublayer(self._norms[which](x))
            streams, pre = expand(streams, post, comb, y), own_pre
        assert pre is not None
        return streams, pre

    def attention_input(self, streams: Tensor) -> Tensor:
        """What attention is given where a sublayer reads by its own mix (V4): [T, D]."""
        own_pre, _, _ = self._mixes[0](streams)
        x: Tensor = self._norms[0](collapse(streams, own_pre))
        return x

    def _record(self, recorder: Recorder | None) -> Record | None:
        if recorder is None:
            return None

        def record(name: str, tokens: slice | Tensor, value: Tensor) -> None:
            recorder(self.number, name, tokens, value)

        return record


def spread(x: Tensor, num_streams: int) -> tuple[Tensor, Tensor]:
    """`x` [T, D] in every stream [T, S, D], and the mix that reads the first one alone [T, S]."""
    streams = x[:, None].expand(-1, num_streams, -1).contiguous()
    pre = wide(streams.new_zeros(len(streams), num_streams))
    pre[:, 0] = 1
    return streams, pre


def _rope_tables(config: HybridConfig, weights: HybridWeights, num: int) -> tuple[Tensor, Tensor]:
    """Of layers without a ratio, and with one."""
    dim = config.qk_rope_head_dim
    plain = frequencies(dim, config.rope_theta, None)
    scaled = frequencies(dim, config.compress_rope_theta, config.yarn)
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    device = weights.embed.device
    return rope_table(plain, num, dtype).to(device), rope_table(scaled, num, dtype).to(device)
