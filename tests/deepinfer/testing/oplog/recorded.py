"""A recorded run of the real engine: forks, preemptions, and an abort with a step in flight."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.device import open_device
from deepinfer.engine import LLMEngine
from deepinfer.models.weights import Qwen3Weights, load_weights
from deepinfer.outputs import StepOutput
from deepinfer.release import ReleaseCounters
from deepinfer.runners import Model, Weights, load_model
from deepinfer.sequence import SamplingParams
from deepinfer.testing.faults import FAULTS, run_trial
from deepinfer.testing.faults.ahead import LOOKS_AHEAD
from deepinfer.testing.faults.scenario import CONFIG as EVENTFUL
from deepinfer.testing.faults.scenario import MODEL_WITH_STATE
from deepinfer.testing.oplog.log import OperationLog
from deepinfer.testing.oplog.recorder import OperationRecorder
from tests.deepinfer.step_plans import TINY

CONFIG = EngineConfig(
    block_size=4, num_blocks=15, max_num_seqs=6, max_num_batched_tokens=32, max_model_len=64
)


@dataclass
class Recording:
    """What a run left behind besides its log; `slot_counters` if its requests have state."""

    log: OperationLog
    counters: ReleaseCounters
    slot_counters: ReleaseCounters | None
    withheld_block_steps: int
    tokens: dict[str, list[int]]
    num_preemptions: int


def tiny_weights() -> Qwen3Weights:
    """The weights all engines of a test file share."""
    return load_weights(TINY, open_device("cpu-stepped"))


def state_weights() -> Weights:
    """Those of a network whose requests have state."""
    return load_model(MODEL_WITH_STATE, open_device("cpu-stepped"))


def record(
    path: Path,
    weights: Weights,
    *,
    device: str = "cpu-stepped",
    model: Model = TINY,
    **changes: Any,
) -> Recording:
    """Run the scenario with these settings and record it."""
    config = replace(CONFIG, **changes)
    with (
        OperationRecorder(path, config) as recorder,
        LLMEngine(model, config, device=device, weights=weights, observers=[recorder]) as engine,
    ):
        outputs = list(_play(engine))
        preemptions = engine.scheduler.counters.num_preemptions
        counters = engine.release.counters
        slot_counters = engine.states.release.counters if engine.states else None
    return Recording(
        OperationLog(path),
        counters,
        slot_counters,
        sum(output.stats.blocks_withheld for output in outputs),
        {end.request_id: end.token_ids.tolist() for output in outputs for end in output.finished},
        preemptions,
    )


def record_eventful(
    path: Path,
    seed: int,
    *,
    release: str = "deferred",
    with_state: bool = False,
    ahead: bool = True,
    fault: str | None = None,
) -> OperationLog:
    """Record the scenario of the planted faults: forks, aborts and preemptions, beside them a
    client that loads and saves on a stream of its own, and with `ahead` drafts and overlap.

    Args:
        fault: planted, with settings of its own instead of those above.
    """
    planted = FAULTS[fault] if fault is not None else None
    settings = (LOOKS_AHEAD if ahead else {}) | {"release": release}
    if planted is not None:
        settings = planted.settings
    with OperationRecorder(path, replace(EVENTFUL, **settings)) as recorder:
        outcome = run_trial(
            planted,
            seed,
            release=None if planted else release,
            ahead=ahead and not planted,
            with_state=with_state,
            max_steps=50,
            observers=(recorder,),
        )
    assert planted is not None or not outcome.first, outcome.messages
    return OperationLog(path)


def _play(engine: LLMEngine) -> Any:
    def finish() -> list[StepOutput]:
        outputs = []
        while engine.has_unfinished():
            outputs.append(engine.step())
        return outputs

    engine.add_request("parent", np.arange(10), SamplingParams(max_tokens=12))
    yield engine.step()
    for index in range(3):
        engine.fork("parent", f"child-{index}", SamplingParams(max_tokens=8, seed=index))
    yield engine.step()
    engine.submit()
    engine.abort("child-0")
    yield engine.collect()
    for index in range(3):
        engine.add_request(f"chat-{index}", np.arange(5 + 3 * index), SamplingParams(max_tokens=9))
    yield from finish()
    engine.add_request("late", np.arange(9), SamplingParams(max_tokens=5))
    engine.submit()
    engine.abort("late")
    yield engine.collect()
    engine.add_request("last", np.arange(17), SamplingParams(max_tokens=3))
    yield from finish()
