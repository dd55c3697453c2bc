"""Draft layers over the rings: each step writes their window rows, and they guess what follows.

The seam is narrow, because all that draft layers need of a request lies in its state slot:

    forward   main layers -> logits
              `write`: rows of the draft layers for all of the step's tokens, by position
    sample, verify            how many drafts were right is known
    propose   state slots, newest tokens and their positions -> drafts; nothing is stored

So a rejected draft leaves nothing to undo: the rows at its position are written over by the token
that comes there, as in every other ring, and the guesses' own rows are never kept.

MTP (V4): the row at position p is made of token p and of the streams behind p - 1, of which the
slot keeps the last few. (Other engines count the pair by p - 1. Rotations differ by position only,
so the two are one function.) No pair is at position 0. Guess k attends to the rows before it and to
those of the guesses before it, and hands its streams on.

    pair     (s0 t1) (s1 t2) ... (s5 t6)  (s6 t7) | (s7' d1) (s8' d2)     t7 newest, dk guessed
    position    1       2           6        7    |     8        9        s' of the draft layer

DSpark (V4.1): the row at p is made of what some late layers read at p, the mean over their streams.
The block is the newest token and noise; each of its rows sees the window before the block and all
of the block.

Knows nothing of requests, plans or verification. Invariant: a guess depends on the tokens up to the
newest and on nothing else, up to rounding: not on chunks, rejected drafts or who had the slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.device.base import Device
from deepinfer.models.hybrid.attention import Part
from deepinfer.models.hybrid.cache import HybridCache
from deepinfer.models.hybrid.geometry import STREAMS
from deepinfer.models.hybrid.layer_plan import HybridConfig
from deepinfer.models.hybrid.layers import HeadMix, Linear, collapse, linear_of
from deepinfer.models.hybrid.layout import StepLayout
from deepinfer.models.hybrid.network import HybridNetwork, LayerNetwork, Taps, spread
from deepinfer.models.hybrid.weights import DSparkWeights, HybridWeights, MtpWeights


class Drafting(Protocol):
    """The draft layers of one model.

    Attributes:
        recorder: told the logits [n, V] that each draft is chosen by; None (tests set it).
    """

    recorder: Callable[[Tensor], None] | None

    def taps(self) -> Taps:
        """What they want of a forward pass."""
        ...

    def write(self, layout: StepLayout, taps: Taps) -> None:
        """Store what the step's tokens leave behind for them."""
        ...

    def propose(
        self, slots: Tensor, token_ids: Tensor, positions: Tensor, num_drafts: int
    ) -> Tensor:
        """Guess what follows, greedily.

        Args:
            slots: int64 [n], state slots.
            token_ids: int64 [n], the newest tokens, whose rows are not computed.
            positions: int64 [n], theirs, >= 1.
            num_drafts: most tokens wanted, >= 1.

        Returns:
            int64 [n, k], k <= `num_drafts`.
        """
        ...


def make_drafting(
    config: HybridConfig,
    weights: HybridWeights,
    network: HybridNetwork,
    cache: HybridCache,
    device: Device,
) -> Drafting:
    """The draft layers of `config`, which has some, behind its `network`."""
    sizes, own = config.of_draft_layers, weights.draft
    assert own is not None, "the weights were loaded with their draft layers"
    layers = [
        LayerNetwork(sizes, layer, of_layer, network.rope, cache, device)
        for layer, of_layer in zip(config.draft_layers, own.layers, strict=True)
    ]
    if isinstance(own, MtpWeights):
        return _Mtp(config, weights.embed, own, layers[0], network, cache, device)
    return _DSpark(config, weights.embed, own, layers, network, cache, device)


class _Mtp:
    """One layer, a token at a time."""

    def __init__(
        self,
        config: HybridConfig,
        embed: Tensor,
        weights: MtpWeights,
        layer: LayerNetwork,
        network: HybridNetwork,
        cache: HybridCache,
        device: Device,
    ) -> None:
        self.recorder: Callable[[Tensor], None] | None = None
        self._weights, self._embed, self._layer = weights, embed, layer
        self._head, self._cache = network.head, cache
        self._window = config.sliding_window
        eps = config.rms_norm_eps
        self._enorm = device.rms_norm(weights.enorm, eps)
        self._hnorm = device.rms_norm(weights.hnorm, eps)
        self._norm = device.rms_norm(weights.norm, eps)
        self._e_proj = linear_of(device, weights.e_proj)
        self._h_proj = linear_of(device, weights.h_proj)
        self._head_mix = HeadMix(config, weights.hc_head)

    def taps(self) -> Taps:
        """The streams behind the last layer alone."""
        return Taps(())

    def write(self, layout: StepLayout, taps: Taps) -> None:
        """See `Drafting`."""
        kept, before = layout.kept_streams, layout.streams
        assert kept is not None
        assert before is not None
        assert taps.streams is not None
        streams, stored = taps.streams.flatten(1), self._cache.region(STREAMS)
        behind = before.gather(streams, stored)
        token_ids = layout.window.of(layout.token_ids)
        x = self._layer.attention_input(self._pair(token_ids, behind))
        self._layer.attention.keep(x, layout)
        stored[kept.slots, kept.rows] = kept.of(streams)

    def propose(
        self, slots: Tensor, token_ids: Tensor, positions: Tensor, num_drafts: int
    ) -> Tensor:
        """See `Drafting`."""
        stored, ring = self._cache.region(STREAMS), _Rings(self._cache, slots, positions - 1)
        behind = stored[slots, (positions - 1) % stored.shape[1]]
        drafts, own = list[Tensor](), list[Tensor]()
        for ahead in range(num_drafts):
            token_ids, behind = self._guess(token_ids, behind, positions + ahead, ring, own)
            drafts.append(token_ids)
        return torch.stack(drafts, 1)

    def _guess(
        self, token_ids: Tensor, behind: Tensor, at: Tensor, rings: _Rings, own: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The tokens behind positions `at`, and their streams [n, S * D]; `own` gets their rows."""
        first = (at - self._window + 1).clamp(min=1)  # no pair is at position 0

        def parts_of(rows: Tensor) -> list[Part]:
            own.append(rows)
            newest = torch.stack(own[-self._window :], 1)
            return [rings.part(self._layer.number, first), _seen(newest)]

        def attend(x: Tensor) -> Tensor:
            return self._layer.attention.beside(x, at, parts_of)

        streams = self._pair(token_ids, behind)
        streams, _ = self._layer.around(attend, streams, None, token_ids)
        logits = self._head(self._norm(collapse(streams, self._head_mix(streams))))
        if self.recorder is not None:
            self.recorder(logits)
        return logits.argmax(-1), streams.flatten(1)

    def _pair(self, token_ids: Tensor, behind: Tensor) -> Tensor:
        """What the layer reads, [n, S, D], of tokens and the streams before them [n, S * D]."""
        token = self._e_proj(self._enorm(F.embedding(token_ids, self._embed)))
        streams = self._h_proj(self._hnorm(behind.view(-1, token.shape[-1])))
        return token[:, None] + streams.view(len(token), -1, token.shape[-1])


class _DSpark:
    """Several layers, a block at a time."""

    def __init__(
        self,
        config: HybridConfig,
        embed: Tensor,
        weights: DSparkWeights,
        layers: list[LayerNetwork],
        network: HybridNetwork,
        cache: HybridCache,
        device: Device,
    ) -> None:
        assert config.draft is not None
        self.recorder: Callable[[Tensor], None] | None = None
        self._plan, self._weights, self._embed, self._layers = config.draft, weights, embed, layers
        self._head, self._cache = network.head, cache
        self._window, self._streams = config.sliding_window, config.hc_mult
        self._main_norm = device.rms_norm(weights.main_norm, config.rms_norm_eps)
        self._norm = device.rms_norm(weights.norm, config.rms_norm_eps)
        self._main_proj = linear_of(device, weights.main_proj)
        self._markov_head = linear_of(device, weights.markov_head)

    def taps(self) -> Taps:
        """What the target layers read."""
        return Taps(self._plan.targets)

    def write(self, layout: StepLayout, taps: Taps) -> None:
        """See `Drafting`."""
        inputs = torch.cat([layout.window.of(x) for x in taps.inputs], 1)
        x = self._main_norm(self._main_proj(inputs))
        for layer in self._layers:
            layer.attention.keep(x, layout)

    def propose(
        self, slots: Tensor, token_ids: Tensor, positions: Tensor, num_drafts: int
    ) -> Tensor:
        """See `Drafting`; no more than a block."""
        size = self._plan.block_size
        block = token_ids.new_full((len(token_ids), size), self._plan.noise_id)
        block[:, 0] = token_ids
        places = (positions[:, None] + torch.arange(size, device=positions.device)).flatten()
        rings = _Rings(self._cache, slots, positions - 1)
        first = (positions - self._window).clamp(min=0)
        streams, pre = spread(F.embedding(block.flatten(), self._embed), self._streams)
        for layer in self._layers:
            ring = rings.part(layer.number, first)
            attend = _block_attention(layer, places, ring, size)
            streams, pre = layer.around(attend, streams, pre, block.flatten())
        last = self._norm(collapse(streams, pre))
        logits = self._head(last).view(*block.shape, -1)
        return self._from_left_to_right(logits[:, :num_drafts], token_ids)

    def _from_left_to_right(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """The best tokens [n, k] by `logits` [n, k, V] and the token before each."""
        drafts = []
        for number in range(logits.shape[1]):
            pairs = self._markov_head(F.embedding(token_ids, self._weights.markov_embed))
            best = logits[:, number] + pairs
            if self.recorder is not None:
                self.recorder(best)
            token_ids = best.argmax(-1)
            drafts.append(token_ids)
        return torch.stack(drafts, 1)


def _block_attention(layer: LayerNetwork, places: Tensor, ring: Part, size: int) -> Linear:
    """Attention of blocks of `size`: the ring and the whole block, what follows included."""

    def parts_of(rows: Tensor) -> list[Part]:
        return [ring, _seen(rows.view(-1, size, rows.shape[-1]))]

    return lambda x: layer.attention.beside(x, places, parts_of)


class _Rings:
    """The rings of n sequences whose newest committed rows are those of positions `last`."""

    def __init__(self, cache: HybridCache, slots: Tensor, last: Tensor) -> None:
        self._cache, self._slots = cache, slots
        held = cache.read_tags(slots) - 1
        # Behind `last` lie rows of rejected drafts.
        self._held = held.masked_fill(held > last[:, None], -1)

    def part(self, layer: int, first: Tensor) -> Part:
        """Rows [n, ring_len, dim] of a layer, those before positions `first`, int64 [n], hidden."""
        hidden = self._held < first[:, None]
        return self._cache.read_window(layer, self._slots), hidden[:, None, None]


def _seen(rows: Tensor) -> Part:
    """Rows [n, L, dim] that every query sees."""
    return rows, torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=rows.device)
