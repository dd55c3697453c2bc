"""The dense reference, and the verdict on what an engine emitted.

The reference computes a whole sequence at once (`bench.dense`): no paging, no sharing, no chunks.
It shares the weights and torch's kernels with the engine, and none of its attention, cache or
batching code.

Each emitted token is judged at its own position, given the tokens the engine really had before it,
so one wrong token is one wrong token. With temperature, the token's score includes the same noise
the engine drew (`deepinfer.sampling.gumbel_noise`).

A hybrid network chooses rows and experts. Where two scores are equal but for rounding, either
choice is right, and the answers differ by more than rounding. So what the reference of such a
network does not confirm is computed again from embeddings moved by a few units in the last place;
the engine may then be anywhere between the references.

Knows nothing of how the engine came to its tokens. Invariant: a verdict is a function of tokens,
sampling, log-probabilities and tolerances; the memo changes its price, never its value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.dense.hybrid import HybridDense
from bench.dense.qwen3 import Qwen3Dense
from deepinfer.config import ModelConfig
from deepinfer.models.hybrid.layer_plan import HybridConfig
from deepinfer.models.hybrid.weights import HybridWeights
from deepinfer.models.weights import Qwen3Weights
from deepinfer.sampling import gumbel_noise

NUM_NEARBY = 6  # references from moved embeddings
NEARBY_ULPS = 4  # how far: their logits move twice as far as sums in another order move them
MAX_BATCH_TOKENS = 4096
"""Tokens of a reference batch; bounds its memory at a few KiB of activations each."""

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Tolerances:
    """How far arithmetic in another order may move a number.

    Attributes:
        score: a token whose score (logit / temperature + noise) is this close to the best is a near
            tie, not wrong.
        logprob: largest difference of log-probabilities, in nats.
    """

    score: float
    logprob: float


@dataclass(frozen=True, slots=True)
class Emission:
    """What an engine emitted for one request.

    Attributes:
        token_ids: prompt, then output; for a forked child its whole history.
        num_prompt: tokens before the first of its own outputs, >= 1.
        temperature: 0 = greedy.
        seed: of its noise.
        logprobs: one per output, as the engine reported them.
    """

    token_ids: Sequence[int]
    num_prompt: int
    temperature: float
    seed: int
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class RequestVerdict:
    """The judgement of one request.

    Attributes:
        wrong_positions: positions in `token_ids` whose token the reference would not have emitted.
        near_ties: tokens that are not the best but within the score tolerance of it.
        max_logprob_diff: largest distance of a log-probability from the reference's, or from the
            nearest of several; 0 without outputs.
        wrong: any wrong position, or a log-probability further off than its tolerance.
    """

    wrong_positions: tuple[int, ...]
    near_ties: int
    max_logprob_diff: float
    wrong: bool


@dataclass(frozen=True, slots=True)
class _Judged:
    """What the reference says of the emitted tokens, each float32 [num_outputs].

    `gaps` is the best score minus the emitted token's; the emitted tokens' log-probabilities are
    from `low` to `high`.
    """

    gaps: Float32
    low: Float32
    high: Float32

    def spanning(self, other: _Judged) -> _Judged:
        """Both, and what lies between."""
        return _Judged(
            np.minimum(self.gaps, other.gaps),
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
        )


_Key = tuple[bytes, int, float, int]


class Dense(Protocol):
    """A network as the reference needs it."""

    @property
    def device(self) -> torch.device:
        """Where its weights are."""

    def states(self, token_ids: Tensor) -> Tensor:
        """States [B, N, hidden_size] before the final norm, of int64 `token_ids` [B, N]."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [.., vocab_size] of such states."""


class DenseReference:
    """Judges emissions by a dense forward with the engine's weights, on the weights' device."""

    def __init__(
        self,
        weights: Qwen3Weights | HybridWeights,
        config: ModelConfig | HybridConfig,
        *,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
    ) -> None:
        self._dense = _dense_of(weights, config)
        self._weights, self._config = weights, config
        self._max_batch_tokens = max_batch_tokens
        self._memo: dict[_Key, _Judged] = {}
        self._spanned: set[_Key] = set()  # judged by the nearby references too

    def check(self, emission: Emission, tolerances: Tolerances) -> RequestVerdict:
        """The verdict on one request."""
        return self.check_all([emission], tolerances)[0]

    def check_all(
        self, emissions: Sequence[Emission], tolerances: Tolerances
    ) -> list[RequestVerdict]:
        """The verdict on each request; equal lengths share a forward, equal emissions one row."""
        by_length: dict[int, dict[_Key, Emission]] = {}
        for emission in emissions:
            if _key(emission) not in self._memo and len(emission.logprobs):
                by_length.setdefault(len(emission.token_ids), {})[_key(emission)] = emission
        for length, pending in by_length.items():
            keys = list(pending)
            size = max(self._max_batch_tokens // length, 1)
            for begin in range(0, len(keys), size):
                batch = keys[begin : begin + size]
                judged = self._judge(self._dense, [pending[key] for key in batch])
                self._memo.update(zip(batch, judged, strict=True))
        return [self._verdict(emission, tolerances) for emission in emissions]

    def _verdict(self, emission: Emission, tolerances: Tolerances) -> RequestVerdict:
        key = _key(emission)
        verdict = _verdict(emission, self._memo.get(key), tolerances)
        if not verdict.wrong or key in self._spanned:
            return verdict
        self._spanned.add(key)
        for dense in _nearby(self._weights, self._config):
            self._memo[key] = self._memo[key].spanning(*self._judge(dense, [emission]))
        return _verdict(emission, self._memo[key], tolerances)

    @torch.inference_mode()
    def logits(self, token_ids: Tensor) -> Tensor:
        """float32 logits [B, N, vocab_size] of int64 `token_ids` [B, N]."""
        return self._dense.head(self._dense.states(token_ids)).float()

    @torch.inference_mode()
    def _judge(self, dense: Dense, emissions: list[Emission]) -> list[_Judged]:
        """Judge requests of equal length in one forward."""
        device = dense.device
        token_ids = torch.tensor(
            np.array([emission.token_ids for emission in emissions], np.int64), device=device
        )
        hidden = dense.states(token_ids[:, :-1])
        judged = []
        for emission, states, tokens in zip(emissions, hidden, token_ids, strict=True):
            first = emission.num_prompt
            logits = dense.head(states[first - 1 :]).float()
            chosen = tokens[first:, None]
            logprobs = logits.log_softmax(-1).gather(1, chosen)[:, 0].cpu().numpy()
            scores = logits
            if emission.temperature > 0:
                positions = torch.arange(first, len(tokens), device=device)
                noise = gumbel_noise(
                    torch.full_like(positions, emission.seed), positions, logits.shape[1]
                )
                scores = logits / emission.temperature + noise
            gaps = scores.amax(-1) - scores.gather(1, chosen)[:, 0]
            judged.append(_Judged(gaps.cpu().numpy(), logprobs, logprobs))
        return judged


def _dense_of(weights: Qwen3Weights | HybridWeights, config: ModelConfig | HybridConfig) -> Dense:
    """The dense forward of this kind of network."""
    if isinstance(config, HybridConfig):
        assert isinstance(weights, HybridWeights)
        return HybridDense(weights, config)
    assert isinstance(weights, Qwen3Weights)
    return Qwen3Dense(weights, config)


def _nearby(
    weights: Qwen3Weights | HybridWeights, config: ModelConfig | HybridConfig
) -> Iterator[Dense]:
    """The same network with its embeddings moved; none if it has no choices to make."""
    if not isinstance(weights, HybridWeights):
        return
    embed, generator = weights.embed.float(), torch.Generator().manual_seed(0)
    step = NEARBY_ULPS * torch.finfo(weights.embed.dtype).eps
    for _ in range(NUM_NEARBY):
        factor = 1 + step * torch.randn(embed.shape, generator=generator).to(embed)
        yield _dense_of(dataclasses.replace(weights, embed=embed * factor), config)


def _key(emission: Emission) -> _Key:
    tokens = np.asarray(emission.token_ids, np.int64).tobytes()
    return tokens, emission.num_prompt, emission.temperature, emission.seed


def _verdict(emission: Emission, judged: _Judged | None, tolerances: Tolerances) -> RequestVerdict:
    if judged is None:
        return RequestVerdict((), 0, 0.0, False)
    wrong = np.flatnonzero(~(judged.gaps <= tolerances.score))  # NaN is wrong
    near = int(((judged.gaps > 0) & (judged.gaps <= tolerances.score)).sum())
    logprobs = np.asarray(emission.logprobs, np.float32)
    diffs = np.maximum(judged.low - logprobs, logprobs - judged.high).clip(0)
    largest = float(diffs.max())
    return RequestVerdict(
        wrong_positions=tuple((wrong + emission.num_prompt).tolist()),
        near_ties=near,
        max_logprob_diff=largest,
        wrong=bool(len(wrong)) or not largest <= tolerances.logprob,
    )
