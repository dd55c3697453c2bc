"""The parts of a hybrid network that work token by token, and the pooling of compressed rows.

Rotary embedding, hyper-connections, Engram, compressor. Arithmetic is in
float32 where the model says so, and in float64 throughout if the weights are float64 (`wide`).

Knows nothing of blocks, rings or steps' layouts. Invariant: what a token gets depends on its own
row, or on the rows it is given, alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.device.base import Device
from deepinfer.models.hybrid.layer_plan import Compressor, HybridConfig, Yarn
from deepinfer.models.hybrid.weights import (
    CompressorWeights,
    EngramWeights,
    MixWeights,
)

Linear = Callable[[Tensor], Tensor]
Linears = Callable[[Tensor], dict[str, Tensor]]
Record = Callable[[str, "slice | Tensor", Tensor], None]
"""Takes a name, which of the step's tokens, and a value of each of these; for tests."""

ALL = slice(None)


def wide(x: Tensor) -> Tensor:
    """`x` in at least float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def linear_of(device: Device, weight: Tensor) -> Linear:
    """`x -> x @ weight.T` for x [rows, in], in the weight's dtype; contiguous."""
    multiply, dtype = device.linear(weight), weight.dtype

    def linear(x: Tensor) -> Tensor:
        result: Tensor = multiply(x if x.dtype == dtype else x.to(dtype)).contiguous()
        return result

    return linear


def linears_of(device: Device, weights: Mapping[str, Tensor]) -> Linears:
    """`linear_of` of each weight, by name, for one input: those of a dtype are one product.

    The results are parts of its rows, contiguous in their last dimension alone.
    """
    products = []
    for dtype in dict.fromkeys(weight.dtype for weight in weights.values()):
        some = {name: weight for name, weight in weights.items() if weight.dtype == dtype}
        sizes = [len(weight) for weight in some.values()]
        products.append((list(some), sizes, linear_of(device, torch.cat(list(some.values())))))

    def linears(x: Tensor) -> dict[str, Tensor]:
        results: dict[str, Tensor] = {}
        for names, sizes, product in products:
            results |= zip(names, product(x).split_with_sizes(sizes, 1), strict=True)
        return results

    return linears


class StreamsLinear:
    """A product with all streams of a token as one vector, normed by its root mean square.

    The norm is one number per token, so it divides the few results.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        # A product this narrow is not worth a packed weight: calling for one takes longer.
        self._weight, self._size = weight, weight.shape[1]
        self._eps = weight.new_tensor(eps)

    def __call__(self, streams: Tensor) -> Tensor:
        """[T, n] of `streams` [T, S, D]; at least float32."""
        flat = wide(streams.flatten(1))
        length = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
        inverse = torch.addcmul(self._eps, length, length, value=1 / self._size).rsqrt_()
        return F.linear(flat, self._weight).mul_(inverse)


# -- rotary embedding ----------------------------------------------------------------------------


def frequencies(dim: int, base: float, yarn: Yarn | None) -> Tensor:
    """float32 [dim / 2]: base^(-2i / dim), and with `yarn` the slow ones divided by its factor.

    The ramp lies between the pairs that turn `beta_fast` and `beta_slow` times within the original
    context (YaRN, arXiv:2309.00071, section 3.2).
    """
    plain = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn is None:
        return plain

    def pair_that_turns(times: float) -> float:
        turns = yarn.original_max_position_embeddings / (2 * math.pi * times)
        return dim * math.log(turns) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    ramp.clamp_(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def rope_table(freqs: Tensor, num_positions: int, dtype: torch.dtype) -> Tensor:
    """exp(i * position * frequency), complex [num_positions, dim / 2], of `dtype` parts."""
    angles = torch.arange(num_positions, dtype=dtype)[:, None] * freqs.to(dtype)
    return torch.polar(torch.ones_like(angles), angles)


@dataclass(frozen=True, slots=True)
class Turn:
    """Rotations by the positions of T tokens, complex [T, r]: there, and back again."""

    there: Tensor
    back: Tensor

    @classmethod
    def of(cls, rope: Tensor, positions: Tensor) -> Turn:
        """By `positions` int64 [T] of a table `rope` [max positions, r]."""
        there = rope.index_select(0, positions)
        return cls(there, there.conj_physical())


def rotate_(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the last dims of `x`, in place: pairs (0, 1), (2, 3), ... of the last 2 * r.

    Args:
        x: [..., dim], contiguous in its last dimension.
        rope: complex [..., r], broadcast against `x`.
    """
    tail = x[..., -2 * rope.shape[-1] :]
    if x.dtype in (torch.float32, torch.float64):
        torch.view_as_complex(_pairs(tail)).mul_(rope)
    else:  # 16-bit floats have no complex form
        rotated = torch.view_as_complex(_pairs(tail.float())) * rope
        tail.copy_(torch.view_as_real(rotated).flatten(-2))
    return x


def _pairs(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], -1, 2)


# -- hyper-connections ---------------------------------------------------------------------------


class Mix:
    """The weights by which a sublayer reads and writes the S residual streams (mHC)."""

    def __init__(self, config: HybridConfig, weights: MixWeights, device: Device) -> None:
        num, dtype = config.hc_mult, weights.fn.dtype
        self._num = num
        self._fn = StreamsLinear(weights.fn, config.rms_norm_eps)
        sizes = [num, num, num * num]
        scales = [scale.expand(size) for scale, size in zip(weights.scale, sizes, strict=True)]
        self._scale, self._base = torch.cat(scales), weights.base
        # pre is a sigmoid + eps, post twice a sigmoid: one product and sum for both.
        self._factors = weights.base.new_tensor([1.0] * num + [2.0] * num)
        self._terms = weights.base.new_tensor([config.hc_eps] * num + [0.0] * num)
        self._balance = device.sinkhorn(num, config.hc_sinkhorn_iters, config.hc_eps, dtype)

    def __call__(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of `streams` [T, S, D]: pre [T, S], post [T, S], comb [T, S, S]; at least float32."""
        num = self._num
        mixed = torch.addcmul(self._base, self._fn(streams), self._scale)
        gates = torch.addcmul(self._terms, torch.sigmoid(mixed[:, : 2 * num]), self._factors)
        comb = mixed[:, 2 * num :].view(-1, num, num).softmax(-1)
        return gates[:, :num], gates[:, num:], self._balance(comb)


class HeadMix:
    """V4's collapse of the streams before the head."""

    def __init__(self, config: HybridConfig, weights: MixWeights) -> None:
        self._weights = weights
        self._fn = StreamsLinear(weights.fn, config.rms_norm_eps)
        self._eps = config.hc_eps

    def __call__(self, streams: Tensor) -> Tensor:
        """pre [T, S] of `streams` [T, S, D]."""
        mixed = torch.addcmul(self._weights.base, self._fn(streams), self._weights.scale)
        return torch.sigmoid(mixed).add_(self._eps)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """sum_i pre_i * stream_i: [T, D] of `streams` [T, S, D] and `pre` [T, S]."""
    return torch.bmm(pre[:, None], wide(streams))[:, 0].to(streams.dtype)


def expand(streams: Tensor, post: Tensor, comb: Tensor, y: Tensor) -> Tensor:
    """New streams: post_k * y + sum_j comb[j, k] * stream_j."""
    mixed = torch.bmm(comb.mT, wide(streams))
    return torch.addcmul(mixed, post[..., None], wide(y)[:, None]).to(streams.dtype)


# -- Engram --------------------------------------------------------------------------------------


class EngramLayer:
    """What the n-grams that end in a token add to its streams (V4.1)."""

    def __init__(self, config: HybridConfig, weights: EngramWeights, device: Device) -> None:
        assert config.engram is not None
        self._weights = weights
        self._wkv = linear_of(device, weights.wkv)
        self._qk_weight = wide(weights.q_weight) * wide(weights.k_weight)
        self._eps = config.rms_norm_eps
        self._heads = config.engram.num_heads

    def __call__(self, streams: Tensor, ids: Tensor, record: Record | None) -> Tensor:
        """New streams of `streams` [T, S, D]; `ids` int64 [T, n]: the own one and those before."""
        rows = self._hashes(ids)
        embedded = F.embedding(rows, self._weights.embed).flatten(1)
        key_value = wide(self._wkv(embedded)).view(len(ids), -1, streams.shape[-1])
        keys, value = key_value[:, :-1], key_value[:, -1:]
        wide_streams = wide(streams)
        dots = (wide_streams * self._qk_weight * keys).sum(-1)
        for x in (wide_streams, keys):
            dots = dots * torch.rsqrt(x.square().mean(-1) + self._eps)
        dots = dots * streams.shape[-1] ** -0.5
        gate = torch.sigmoid(dots.sign() * dots.abs().clamp(min=1e-6).sqrt())
        if record is not None:
            record("engram_hash", ALL, rows)
            record("engram_gate", ALL, gate)
        return (wide_streams + gate[..., None] * value).to(streams.dtype)

    def _hashes(self, ids: Tensor) -> Tensor:
        """Rows of the table, int64 [T, columns]: n-gram size outer, head inner."""
        products = ids * self._weights.multipliers
        mixed, hashes = products[:, 0], []
        for back in range(1, ids.shape[1]):
            mixed = mixed ^ products[:, back]
            hashes.append(mixed)
        columns = torch.stack(hashes, 1).repeat_interleave(self._heads, dim=1)
        return columns % self._weights.primes + self._weights.offsets


# -- compressor ----------------------------------------------------------------------------------


class Pool:
    """How the projections of a group's tokens become one normalised row of `dim` elements.

    With overlap a token has two series of kv and gate: the first counts in the group behind its
    own, the second in its own. Each group of a row takes one of them, so they lie side by side:

        token    [ kv | gate ][ kv | gate ]

    Attributes:
        num_series: 1, or 2 with overlap.
        weight: [num_series * (kv | gate), D], of the projection; without a gate [kv, D].
    """

    def __init__(
        self, plan: Compressor, weights: CompressorWeights, eps: float, device: Device
    ) -> None:
        self._plan = plan
        self._norm = device.rms_norm(weights.norm, eps)
        self._dtype = weights.wkv.dtype
        self._bias = None
        self.num_series = 1 + plan.overlap
        if weights.wgate is None:
            self.weight = weights.wkv
            return
        # Gated pools are projected, kept and summed in at least float32.
        self.weight = wide(self._side_by_side(weights.wkv, weights.wgate, 0))
        if weights.bias is not None:
            bias = wide(weights.bias)
            self._bias = self._side_by_side(torch.zeros_like(bias), bias, 1)

    def _side_by_side(self, kv: Tensor, gate: Tensor, dim: int) -> Tensor:
        pairs = zip(kv.chunk(self.num_series, dim), gate.chunk(self.num_series, dim), strict=True)
        return torch.cat([part for pair in pairs for part in pair], dim)

    def biased(self, projected: Tensor, phases: Tensor) -> Tensor:
        """Of each token what its groups pool, [T, num_series * (kv | gate)], of its projection.

        `phases` int64 [T]: place of the token in its group, of the gate's bias.
        """
        if self._bias is not None:
            projected = projected + self._bias.index_select(0, phases)
        return projected

    def pool(self, members: Tensor, missing: Tensor | None) -> Tensor:
        """Rows [C, dim] of `members` [C * span, kv | gate], a series of each; `missing`, bool
        [C * span]: which of these count for nothing."""
        if self._plan.gated:
            members = self._weighted(members, missing)
        row: Tensor = self._norm(members.to(self._dtype))
        return row

    def _weighted(self, members: Tensor, missing: Tensor | None) -> Tensor:
        """Per channel, the mean of kv weighted by softmax(gate) over a group: [C, dim]."""
        if missing is not None:
            kv, gate = members.chunk(2, dim=-1)
            gate.masked_fill_(missing[:, None], -torch.inf)
            kv.masked_fill_(missing[:, None], 0)
        groups = members.view(-1, self._plan.ratio * self.num_series, members.shape[1])
        kv, gate = groups.chunk(2, dim=-1)
        row: Tensor = (kv * gate.softmax(1)).sum(1)
        return row
