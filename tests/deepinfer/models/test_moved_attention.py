"""Attention of a plan that lies further back than it says: as of one that says where it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer.cache_engine import KVCache
from deepinfer.carry import as_it_runs
from deepinfer.config import MAX_DRAFTS
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.models.attention import PagedAttention
from deepinfer.models.qwen3 import Qwen3
from deepinfer.models.weights import load_weights
from deepinfer.plan import LookAhead, StepPlan
from deepinfer.step_inputs import StepInputs
from tests.deepinfer.step_plans import TINY, Run, step_plan

SHARED, LONGEST = 9, 48  # tokens: of the prefix that all sequences have, and of any


class Paged:
    """A network over a cache that already holds every prefix; groups of any size are one."""

    def __init__(self, block_size: int, histories: list[list[int]]) -> None:
        self.device, self.block_size = SteppedCpuDevice(), block_size
        self.cache = KVCache(TINY, 260, block_size, self.device.torch_device)
        self.attention = PagedAttention(TINY, self.cache, self.device, 128, min_shared_rows=1)
        weights = load_weights(TINY, self.device)
        self.model = Qwen3(TINY, weights, self.attention, self.device)
        fresh = iter(range(1, 260))
        shared = [next(fresh) for _ in range(SHARED // block_size)]
        own = -(-LONGEST // block_size) - len(shared)
        self.tables = [[*shared, *(next(fresh) for _ in range(own))] for _ in histories]
        for history, table in zip(histories, self.tables, strict=True):
            plan = step_plan([Run(history, table, 0, len(history), sampled=False)], block_size)
            self.logits(StepInputs(plan, torch.from_numpy(plan.token_ids)))

    def logits(self, inputs: StepInputs) -> torch.Tensor | None:
        """Of all tokens."""
        prepared = self.attention.prepare(inputs)
        return self.model.forward(inputs.token_ids, prepared, torch.arange(inputs.plan.num_tokens))


def looking_ahead(plan: StepPlan, num_unsure: list[int]) -> StepPlan:
    """A plan that may lie so many positions further back."""
    zeros = np.zeros(plan.num_seqs, np.int32)
    unsure = np.array(num_unsure, np.int32)
    is_open = np.ones(plan.num_seqs, bool)
    return replace(
        plan, ahead=LookAhead(zeros, is_open, zeros, zeros, unsure, zeros, (), MAX_DRAFTS)
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_logits_and_rows_are_those_of_the_plan_as_it_runs(block_size: int, seed: int) -> None:
    """Decodes of 1 to 6 tokens, each some positions back, a chunk, and shared blocks."""
    rng = np.random.default_rng(seed)
    lengths = [int(rng.integers(SHARED + 1, 26)) for _ in range(5)]
    prefix = rng.integers(0, 200, SHARED).tolist()
    histories = [[*prefix, *rng.integers(0, 200, n - SHARED).tolist()] for n in lengths]
    counts = [int(rng.integers(1, 7)) for _ in range(4)] + [9]
    # Each begins behind what is computed if it is moved, at most as far back as is unsure.
    unsure = [int(rng.integers(0, 7)) for _ in range(4)] + [0]
    back = [int(rng.integers(0, n + 1)) for n in unsure]
    new = [rng.integers(0, 200, n).tolist() for n in counts]
    moved, planned = Paged(block_size, histories), Paged(block_size, histories)
    runs = [
        Run([*history, *[0] * b, *tokens], table, length + b, count)
        for history, table, length, b, tokens, count in zip(
            histories, planned.tables, lengths, back, new, counts, strict=True
        )
    ]
    plan = looking_ahead(step_plan(runs, block_size), unsure)
    token_ids = np.concatenate(new).astype(np.int32)
    inputs = StepInputs(plan, torch.from_numpy(token_ids), torch.tensor(back))
    exact = as_it_runs(plan, token_ids, np.array(back), block_size)
    assert exact.context_lens.tolist() == [n + q for n, q in zip(lengths, counts, strict=True)]
    expected = moved.logits(StepInputs(exact, torch.from_numpy(token_ids)))
    found = planned.logits(inputs)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    for layer in range(TINY.num_hidden_layers):
        for rows in ("keys", "values"):
            ours, theirs = (getattr(paged.cache, rows)(layer) for paged in (planned, moved))
            torch.testing.assert_close(ours[1:], theirs[1:], atol=2e-5, rtol=0)


def test_only_blocks_that_are_surely_complete_are_shared() -> None:
    """Two decodes with equal tables of three blocks: of the third, rows may still be written."""
    history = list(range(12))
    paged = Paged(4, [history, history])
    paged.tables[1][:3] = paged.tables[0][:3]
    runs = [Run([*history, 0, 0, 0, 7], table, 15, 1) for table in paged.tables]
    tokens = torch.tensor([7, 7], dtype=torch.int32)
    for unsure, rows in ((0, 12), (4, 8)):
        plan = looking_ahead(step_plan(runs, 4), [unsure, unsure])
        prepared = paged.attention.prepare(StepInputs(plan, tokens, torch.tensor([0, 0])))
        assert [group.prefix.length for group in prepared.shared] == [rows]
