"""Step plans written by hand, for tests of what runs below the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from deepinfer.cache_engine import KVCache
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.device.base import Device
from deepinfer.model_runner import ModelRunner
from deepinfer.models.weights import Qwen3Weights
from deepinfer.plan import StepPlan
from deepinfer.step_inputs import StepInputs
from deepinfer.worker import Worker

TINY = ModelConfig(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=256,
)


@dataclass(frozen=True)
class Run:
    """A sequence as a step sees it: positions [computed, computed + scheduled) are computed."""

    tokens: Sequence[int]
    table: Sequence[int]
    computed: int
    scheduled: int = 1
    sampled: bool = True
    temperature: float = 0.0
    seed: int = 0
    state: int = 0  # its state slot; 0: the model has none

    def then(self, token: int) -> Run:
        """The sequence one step later, with the token it got."""
        computed = self.computed + self.scheduled
        return replace(self, tokens=[*self.tokens, token], computed=computed, scheduled=1)


def step_plan(
    runs: Sequence[Run],
    block_size: int,
    *,
    step: int = 1,
    padding: int = 0,
    copies: Sequence[tuple[int, int]] = (),
    state_copies: Sequence[tuple[int, int]] = (),
) -> StepPlan:
    """The plan of one step; `padding` more columns than the longest table needs."""
    width = max(len(run.table) for run in runs) + padding
    tables = np.zeros((len(runs), width), np.int32)
    slots = []
    for row, run in zip(tables, runs, strict=True):
        row[: len(run.table)] = run.table
        positions = np.arange(run.computed, run.computed + run.scheduled)
        slots.append(row[positions // block_size].astype(np.int64) * block_size)
        slots[-1] += positions % block_size
    scheduled = np.array([run.scheduled for run in runs], np.int32)
    computed = np.array([run.computed for run in runs], np.int32)
    ranges = [slice(run.computed, run.computed + run.scheduled) for run in runs]
    sampled = [i for i, run in enumerate(runs) if run.sampled]
    return StepPlan(
        step=step,
        rows=np.arange(len(runs), dtype=np.int32),
        epochs=np.zeros(len(runs), np.int32),
        num_scheduled=scheduled,
        query_start=np.concatenate([[0], scheduled.cumsum()]).astype(np.int32),
        context_lens=computed + scheduled,
        token_ids=np.concatenate(
            [np.array(run.tokens[part], np.int32) for run, part in zip(runs, ranges, strict=True)]
        ),
        positions=np.concatenate([np.arange(r.start, r.stop, dtype=np.int32) for r in ranges]),
        slot_mapping=np.concatenate(slots),
        block_tables=tables,
        sample_tokens=(scheduled.cumsum() - 1)[sampled].astype(np.int32),
        sample_seq=np.array(sampled, np.int32),
        temperature=np.array([runs[i].temperature for i in sampled], np.float32),
        seeds=np.array([runs[i].seed for i in sampled], np.int64),
        sample_positions=(computed + scheduled)[sampled].astype(np.int32),
        block_copies=np.array(copies, np.int32).reshape(-1, 2),
        copy_sources=tuple(np.array([source], np.int32) for source, _ in copies),
        source_owners=("",) * len(copies),
        state_ids=np.array([run.state for run in runs if run.state], np.int32),
        state_copies=np.array(state_copies, np.int32).reshape(-1, 2),
    )


def as_planned(plan: StepPlan) -> StepInputs:
    """What runs where nothing is left open."""
    return StepInputs(plan, torch.from_numpy(plan.token_ids))


def model_worker(
    model: ModelConfig, config: EngineConfig, weights: Qwen3Weights, device: Device
) -> Worker:
    """A worker that runs the network."""
    return Worker(ModelRunner(model, config, weights, device), device, config.block_size)


def cache_of(worker: Worker) -> KVCache:
    """The KV pool behind a worker that runs the network."""
    assert isinstance(worker.runner, ModelRunner)
    return worker.runner.cache
