"""The end of a network's step: one token for each row of logits, and what of it goes where.

Knows nothing of what made the logits. Invariant: what is read back was computed by this step.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepinfer.device.base import Device
from deepinfer.last_tokens import LastTokens
from deepinfer.plan import StepPlan, WrongRows
from deepinfer.sampling import sample
from deepinfer.worker import StepReadback


def sample_step(
    logits: Tensor | None,
    plan: StepPlan,
    device: Device,
    last_tokens: LastTokens | None,
    wrong_rows: Callable[[], WrongRows] | None,
) -> StepReadback:
    """Inside submitted work, behind the forward pass: sample, keep, and begin to read back.

    Args:
        logits: [M, vocab_size], of the plan's `sample_tokens`; None if nothing samples.
        last_tokens: which keep what is sampled; None where plans come complete.
        wrong_rows: of `StepReadback`.
    """
    if logits is None:
        return StepReadback(wrong_rows=wrong_rows)
    device.part("sampling")
    token_ids, logprobs = sample(
        logits, plan.temperature, plan.seeds, plan.sample_positions, device
    )
    newest = None if last_tokens is None else last_tokens.keep(plan, token_ids)
    return StepReadback(device.download(token_ids), device.download(logprobs), wrong_rows, newest)
