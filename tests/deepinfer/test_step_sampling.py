"""The end of a network's step, on logits written by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.step_sampling import sample_step
from tests.deepinfer.step_plans import Run, step_plan

PLAN = replace(step_plan([Run([1, 2], range(1, 3), 0, 2), Run([3], range(3, 5), 0, 1)], 4), step=7)


class Kept:
    """What is kept, and says that nothing was put in."""

    def keep(self, plan, sampled):
        self.plan, self.sampled = plan, sampled.tolist()


def test_what_is_sampled_is_read_back_and_kept():
    """Greedy: the highest of each row, with its log-probability."""
    logits, kept = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 1.0]]), Kept()
    result = sample_step(logits, PLAN, SteppedCpuDevice(), kept, None).result(7)
    assert result.token_ids.tolist() == [1, 2] == kept.sampled
    assert kept.plan is PLAN
    expected = logits.log_softmax(1)[[0, 1], [1, 2]]
    torch.testing.assert_close(torch.from_numpy(result.logprobs), expected)


def test_a_step_that_samples_nothing_still_says_what_rows_were_wrong():
    """No token, nothing kept."""
    kept, wrong = Kept(), object()
    readback = sample_step(None, PLAN, SteppedCpuDevice(), kept, lambda: wrong)
    result = readback.result(7)
    assert (len(result.token_ids), len(result.logprobs), result.tags) == (0, 0, wrong)
    assert not hasattr(kept, "sampled")
