"""The end of a network's step: one token for each row of logits.

Knows nothing of what made the logits. Invariant: what is given was computed by this step.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepinfer.device.base import Device
from deepinfer.plan import Int32, WrongRows
from deepinfer.sampling import sample
from deepinfer.step_inputs import Sampled, StepInputs


def sample_step(
    logits: Tensor | None,
    inputs: StepInputs,
    device: Device,
    wrong_rows: Callable[[], WrongRows] | None,
) -> Sampled:
    """Inside submitted work, behind the forward pass: sample.

    Args:
        logits: [M, vocab_size], of the plan's `sample_tokens`; None if nothing samples.
        wrong_rows: of `Sampled`.
    """
    if logits is None:
        return Sampled(wrong_rows=wrong_rows)
    device.part("sampling")
    plan = inputs.plan
    where: Int32 | Tensor = plan.sample_positions
    if inputs.back is not None and plan.temperature.any():
        where = inputs.really(plan.sample_positions, plan.sample_seq, device)
    token_ids, logprobs = sample(logits, plan.temperature, plan.seeds, where, device)
    return Sampled(token_ids, logprobs, wrong_rows)
