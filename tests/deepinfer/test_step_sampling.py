"""The end of a network's step, on logits written by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.plan import WrongRows
from deepinfer.step_inputs import StepInputs
from deepinfer.step_sampling import sample_step
from tests.deepinfer.step_plans import Run, step_plan


def inputs_of(
    temperature: float = 0.0, back: list[int] | None = None, ahead: int = 0
) -> StepInputs:
    """A prompt of two tokens and one of one, `ahead` positions further than they are."""
    tables = range(1, 3), range(3, 5)
    runs = [
        Run([1] * (ahead + count), table, ahead, count, temperature=temperature, seed=5 + count)
        for count, table in zip((2, 1), tables, strict=True)
    ]
    moved = None if back is None else torch.tensor(back)
    plan = step_plan(runs, 4)
    return StepInputs(plan, torch.from_numpy(plan.token_ids), moved)


def test_the_best_token_of_each_row_is_sampled():
    """Greedy: the highest of each row, with its log-probability."""
    logits = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 1.0]])
    sampled = sample_step(logits, inputs_of(), SteppedCpuDevice(), None)
    assert sampled.token_ids is not None
    assert sampled.token_ids.tolist() == [1, 2]
    expected = logits.log_softmax(1)[[0, 1], [1, 2]]
    torch.testing.assert_close(sampled.logprobs, expected)


@pytest.mark.parametrize("back", [[3, 3], [3, 0]])
def test_noise_is_that_of_the_position_where_a_token_really_is(back):
    """Drawn as if the plan had been made for there."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 4000)).astype(np.float32))
    device = SteppedCpuDevice()
    here, there = (
        sample_step(logits, inputs, device, None).token_ids
        for inputs in (inputs_of(1.0), inputs_of(1.0, back, ahead=3))
    )
    assert here is not None
    assert there is not None
    assert (here == there).tolist() == [moved == 3 for moved in back]


def test_a_step_that_samples_nothing_still_says_what_rows_were_wrong():
    """No token, and what the rows say."""
    none = np.empty(0, np.int32)
    wrong = WrongRows(0, none, none, np.empty(0, np.int64))
    sampled = sample_step(None, inputs_of(), SteppedCpuDevice(), lambda: wrong)
    assert sampled.token_ids is sampled.logprobs is None
    assert sampled.wrong_rows is not None
    assert sampled.wrong_rows() is wrong
