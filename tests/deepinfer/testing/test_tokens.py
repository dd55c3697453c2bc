"""The model of a network: what rows hold and what follows from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from deepinfer.step_inputs import StepInputs
from deepinfer.testing.tokens import EMPTY, TokenRunner, next_token, prefixes
from tests.deepinfer.step_plans import Run, step_plan


def test_a_row_depends_on_all_tokens_before_it():
    """The same token after another prefix is another row; the same prefix is the same row."""
    assert prefixes([1, 2, 3])[2] != prefixes([2, 2, 3])[2]
    assert prefixes([1, 2, 3])[:2] == prefixes([1, 2])
    assert EMPTY not in prefixes(range(50))


def test_a_wrong_row_changes_the_answer_most_of_the_time():
    """One wrong row out of twenty gives another token in almost all cases of a large vocabulary."""
    rows = prefixes(range(20))
    right = next_token(rows, 1000)
    others = [next_token([*rows[:at], 7, *rows[at + 1 :]], 1000) for at in range(20)]
    assert sum(token != right for token in others) >= 18


def test_sources_are_read_before_destinations_are_written():
    """A swap of two blocks swaps them."""
    runner = TokenRunner(3, 2, 9)
    runner.rows = [0, 0, 1, 2, 3, 4]
    runner.copy_blocks(np.array([[1, 2], [2, 1]], np.int32))
    assert runner.rows == [0, 0, 3, 4, 1, 2]


def test_wrong_rows_are_counted_one_by_one():
    """Rows of a table are compared in table order, whatever the block ids are."""
    runner = TokenRunner(3, 2, 9)
    runner.rows = [0, 0, 1, 2, 3, 4]
    assert runner.count_wrong([2, 1], [3, 4, 1]) == 0
    assert runner.count_wrong([2, 1], [3, 5, 2]) == 2


def test_drafts_are_computed_as_they_are():
    """Rows behind the known tokens follow from the drafts; each token sampled sees those before."""
    runner, right = TokenRunner(4, 2, 1000), prefixes([5, 6, 7])
    runner.rows[2:4] = right[:2]
    runner.expect(3, {0: prefixes([5, 6, 7, 8, 9])})
    plan = step_plan([Run([5, 6, 7, 1], [1, 3], computed=2, scheduled=2)], 2)
    plan = replace(
        plan,
        step=3,
        sample_tokens=np.array([0, 1], np.int32),
        sample_seq=np.array([0, 0], np.int32),
    )
    found = runner.forward(StepInputs(plan, torch.from_numpy(plan.token_ids))).token_ids
    with_draft = prefixes([5, 6, 7, 1])
    assert runner.rows[6:8] == with_draft[2:]
    assert found is not None
    assert found.tolist() == [next_token(right, 1000), next_token(with_draft, 1000)]
    assert runner.wrong_rows == 0
