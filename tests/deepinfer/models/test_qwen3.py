"""The paged network against transformers' Qwen3: every way a step can be cut up and laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.cache_engine import KVCache
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.models.attention import PagedAttention
from deepinfer.models.hf_config import model_config_from_folder
from deepinfer.models.qwen3 import Qwen3
from deepinfer.models.weights import load_weights
from deepinfer.plan import StepPlan
from deepinfer.step_inputs import StepInputs
from tests.deepinfer.step_plans import Run, step_plan

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-4
NUM_BLOCKS = 128


class Paged:
    """The network under test with a cache of its own; groups of any size are computed as one."""

    def __init__(self, folder: Path, block_size: int) -> None:
        config = model_config_from_folder(folder)
        self.device = SteppedCpuDevice()
        self.block_size = block_size
        self.cache = KVCache(config, NUM_BLOCKS, block_size, self.device.torch_device)
        self.attention = PagedAttention(config, self.cache, self.device, 512, min_shared_rows=1)
        self.model = Qwen3(config, load_weights(config, self.device), self.attention, self.device)
        self.scattered = iter(np.random.default_rng(0).permutation(np.arange(1, NUM_BLOCKS)))
        self.groups: list[int] = []

    def table(self, num_tokens: int) -> list[int]:
        """Fresh blocks for so many tokens, in no order."""
        return [int(next(self.scattered)) for _ in range(-(-num_tokens // self.block_size))]

    def logits(self, plan: StepPlan, back: list[int] | None = None) -> torch.Tensor | None:
        """The plan's logits; remembers the sizes of its shared groups."""
        inputs = inputs_of(plan, back)
        rows = torch.tensor(plan.sample_tokens, dtype=torch.int64)
        prepared = self.attention.prepare(inputs)
        self.groups = sorted(len(group.tokens) for group in prepared.shared)
        return self.model.forward(
            torch.tensor(plan.token_ids), prepared, rows if len(rows) else None
        )

    def step(self, *runs: Run, padding: int = 0) -> torch.Tensor | None:
        return self.logits(step_plan(runs, self.block_size, padding=padding))


def inputs_of(plan: StepPlan, back: list[int] | None = None) -> StepInputs:
    moved = None if back is None else torch.tensor(back)
    return StepInputs(plan, torch.tensor(plan.token_ids), moved)


def tokens(num: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 199, num).tolist()


def dense(model: Any, token_ids: list[int]) -> torch.Tensor:
    """transformers' logits of the last position."""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0, -1]


def close(actual: torch.Tensor | None, expected: list[torch.Tensor]) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, torch.stack(expected), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("block_size", [4, 16])
def test_prefill_then_decode(saved_qwen3: tuple[Path, Any], block_size: int) -> None:
    """A 70-token prompt in one step, then single tokens across block boundaries."""
    folder, model = saved_qwen3
    paged, history = Paged(folder, block_size), tokens(90)
    run = Run(history, paged.table(90), 0, 70)
    for length in range(70, 90):
        close(paged.step(run, padding=length % 3), [dense(model, history[:length])])
        run = Run(history, run.table, length, 1)


@pytest.mark.parametrize("block_size", [4, 16])
def test_every_chunk_split(saved_qwen3: tuple[Path, Any], block_size: int) -> None:
    """A 70-token prompt split in two anywhere gives the logits of the whole."""
    folder, model = saved_qwen3
    paged, prompt = Paged(folder, block_size), tokens(70)
    table, expected = paged.table(70), dense(model, prompt)
    for split in range(1, 70):
        paged.cache.keys(0).zero_()
        paged.cache.keys(1).zero_()
        assert paged.step(Run(prompt, table, 0, split, sampled=False)) is None
        close(paged.step(Run(prompt, table, split, 70 - split)), [expected])


def test_many_small_chunks_beside_decodes(saved_qwen3: tuple[Path, Any]) -> None:
    """Chunks of 7 share their steps with two decodes of other lengths; all are right."""
    folder, model = saved_qwen3
    paged, prompt = Paged(folder, 4), tokens(70)
    others = [tokens(40, 1), tokens(90, 2)]
    starts = [9, 60]
    tables = [paged.table(len(other)) for other in others]
    for other, table, start in zip(others, tables, starts, strict=True):
        paged.step(Run(other, table, 0, start, sampled=False))
    table = paged.table(70)
    for i in range(10):
        runs = [
            Run(others[0], tables[0], starts[0] + i),
            Run(prompt, table, 7 * i, 7, sampled=i == 9),
            Run(others[1], tables[1], starts[1] + i),
        ]
        expected = [dense(model, others[0][: 10 + i]), dense(model, others[1][: 61 + i])]
        if i == 9:
            expected.insert(1, dense(model, prompt))
        close(paged.step(*runs), expected)


def test_decodes_of_any_lengths_share_a_step(saved_qwen3: tuple[Path, Any]) -> None:
    """Padded batches: lengths from 1 to 80 in one step, none influenced by another."""
    folder, model = saved_qwen3
    paged = Paged(folder, 4)
    lengths = [1, 2, 80, 3, 17, 16, 41, 40, 4, 5]
    histories = [tokens(n, seed) for seed, n in enumerate(lengths)]
    runs = []
    for history in histories:
        table = paged.table(len(history))
        if len(history) > 1:
            paged.step(Run(history, table, 0, len(history) - 1, sampled=False))
        runs.append(Run(history, table, len(history) - 1))
    close(paged.step(*runs), [dense(model, history) for history in histories])


@pytest.mark.parametrize("processed", [31, 32, 33])
def test_forks_are_one_query_block(saved_qwen3: tuple[Path, Any], processed: int) -> None:
    """Children of one prompt at k * B - 1, k * B and k * B + 1 tokens, tails of unequal length."""
    folder, model = saved_qwen3
    paged, prompt, size = Paged(folder, 16), tokens(processed), 16
    parent = paged.table(processed)
    paged.step(Run(prompt, parent, 0, processed, sampled=False))
    full = processed // size
    runs, histories = [], []
    for child, extra in enumerate([1, 2, 20, 1]):
        table = parent[:full] + paged.table(processed + extra - full * size)
        history = prompt + tokens(extra, 10 + child)
        if processed % size:
            pair = torch.tensor([[parent[full], table[full]]], dtype=torch.int32)
            paged.cache.copy_blocks(pair)
        if extra > 1:
            paged.step(Run(history, table, processed, extra - 1, sampled=False))
        runs.append(Run(history, table, len(history) - 1))
        histories.append(history)
    close(paged.step(*runs), [dense(model, history) for history in histories])
    assert paged.groups == [4]


def test_forks_of_forks_and_strangers(saved_qwen3: tuple[Path, Any]) -> None:
    """Two families behind one system prompt, and a stranger: two groups, and one alone."""
    folder, model = saved_qwen3
    paged, system = Paged(folder, 4), tokens(4)
    root = paged.table(4)
    paged.step(Run(system, root, 0, 4, sampled=False))
    runs, histories = [], []
    for family in (1, 2):
        prompt = system + tokens(40, family)
        stem = root + paged.table(40)
        paged.step(Run(prompt, stem, 4, 40, sampled=False))
        for child in range(3):
            histories.append([*prompt, family * 10 + child])
            runs.append(Run(histories[-1], stem + paged.table(1), 44))
    histories.append(tokens(9, 5))
    table = paged.table(9)
    paged.step(Run(histories[-1], table, 0, 8, sampled=False))
    runs.append(Run(histories[-1], table, 8))
    order = [3, 0, 6, 1, 4, 2, 5]
    close(paged.step(*(runs[i] for i in order)), [dense(model, histories[i]) for i in order])
    assert paged.groups == [3, 3]


@pytest.mark.parametrize("length", [46, 47, 48, 49])
def test_only_blocks_before_the_newest_row_are_shared(
    saved_qwen3: tuple[Path, Any], length: int
) -> None:
    """Equal tables, as of twins not yet parted: the block being written stays each one's own."""
    folder, model = saved_qwen3
    paged, history = Paged(folder, 16), tokens(length)
    table = paged.table(length)
    paged.step(Run(history, table, 0, length - 1, sampled=False))
    twin = Run(history, table, length - 1)
    plan = step_plan([twin, twin], 16)
    close(paged.logits(plan), [dense(model, history)] * 2)
    [group] = paged.attention.prepare(inputs_of(plan)).shared
    assert group.prefix.length == (length - 1) // 16 * 16


def test_rows_of_others_never_matter(saved_qwen3: tuple[Path, Any]) -> None:
    """NaN in every row outside the contexts, and rubbish in block 0, change nothing."""
    folder, model = saved_qwen3
    paged = Paged(folder, 16)
    prompt = tokens(32)
    stem = paged.table(32)
    for layer in range(2):
        for pool in (paged.cache.keys(layer), paged.cache.values(layer)):
            pool.fill_(torch.nan)
            pool[0] = 1e3
    paged.step(Run(prompt, stem, 0, 32, sampled=False))
    histories = [[*prompt, 1], [*prompt, 2], tokens(37, 3), tokens(20, 4), tokens(5, 5)]
    runs = [Run(h, stem + paged.table(1), 32) for h in histories[:2]]
    for history in histories[2:]:
        table = paged.table(len(history))
        paged.step(Run(history, table, 0, len(history) - 1, sampled=False))
        runs.append(Run(history, table, len(history) - 1))
    close(paged.step(*runs, padding=2), [dense(model, history) for history in histories])
    assert paged.groups == [2]


def test_swapped_blocks_are_visible(saved_qwen3: tuple[Path, Any]) -> None:
    """Keys are rotated at the position of their table column, so order in the table counts."""
    folder, _ = saved_qwen3
    paged, history = Paged(folder, 4), tokens(33)
    table = paged.table(33)
    paged.step(Run(history, table, 0, 32, sampled=False))
    right = paged.step(Run(history, table, 32))
    swapped = [table[3], *table[1:3], table[0], *table[4:]]
    wrong = paged.step(Run(history, swapped, 32))
    assert right is not None
    assert wrong is not None
    assert (right - wrong).abs().max() > 100 * TOLERANCE
