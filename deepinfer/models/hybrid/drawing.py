"""Random weights of a hybrid network whose outputs depend on what they read.

Knows names and shapes only. Invariant: a config's seed decides every value, on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.models.hybrid.layer_plan import HybridConfig

# Standard deviation of logits: spread enough to tell answers apart, while float32 rounding moves a
# log-probability by less than 1e-4.
_LOGIT_STD = 3.5


class Drawn:
    """Tensors drawn from `config.seed`, by name and shape.

    A check of answers sees a wrong row only if the answer depends on it. Embedding and layers add
    to the streams in like measure, so both the last token and the rows read decide the next one.
    Nothing is left at a value that hides it: norms are not 1, sinks, biases and mixes not 0, and
    the experts of a table differ from token to token.
    """

    def __init__(self, config: HybridConfig) -> None:
        self._config = config
        self._generator = torch.Generator().manual_seed(config.seed)

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`: float32; int64 if it holds ids."""
        last = name.rpartition(".")[2]
        if last == "tid2eid":
            return self._distinct_experts(*shape)
        if name == "engram_token_map":
            assert self._config.engram is not None
            num = self._config.engram.compressed_vocab_size
            return torch.randint(num, shape, generator=self._generator)
        drawn = torch.randn(shape, generator=self._generator)
        if last.endswith(("norm", "_scale")) or last in ("q_weight", "k_weight"):
            return drawn.mul_(0.2).add_(1)
        if last in ("attn_sink", "ape", "bias") or last.endswith("_base"):
            return drawn.mul_(0.5)
        if last == "embed":
            return drawn
        gain = _LOGIT_STD if name == "head" else 1.0
        return drawn.mul_(gain * shape[-1] ** -0.5)

    def _distinct_experts(self, vocab: int, num: int) -> Tensor:
        """int64 [V, k]: k different experts per token."""
        order = torch.rand(vocab, self._config.n_routed_experts, generator=self._generator)
        return order.argsort(1)[:, :num].contiguous()
