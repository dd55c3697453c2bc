"""Records that the engine hands to its caller, once cloned, stay as they are and are its own (I16).

No public report was found of a recycled output record. The nearest are vllm#8335, which reuses its
output objects, and dspy#10345, where a cache hands out its own object.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple

import numpy as np
import pytest

from deepinfer.config import EngineConfig
from deepinfer.device import open_device
from deepinfer.engine import LLMEngine
from deepinfer.errors import StaleRecordError
from deepinfer.models.weights import load_weights
from deepinfer.outputs import StepOutput
from deepinfer.sequence import SamplingParams
from tests.deepinfer.step_plans import TINY

CONFIG = EngineConfig(
    block_size=4, num_blocks=33, max_num_seqs=3, max_num_batched_tokens=32, max_model_len=32
)
DEVICES = ["cpu", "cpu-stepped", pytest.param("cuda", marks=pytest.mark.cuda)]


def run(device: str) -> Iterator[StepOutput]:
    """The steps of six requests on a tiny network: rows, blocks and buffers are used again."""
    weights = load_weights(TINY, open_device("cpu-stepped")) if device != "cuda" else None
    with LLMEngine(TINY, CONFIG, device=device, weights=weights) as engine:
        for index in range(6):
            prompt = np.arange(3 + index)
            engine.add_request(f"r{index}", prompt, SamplingParams(max_tokens=3 + index % 3))
        while (output := engine.step()) is not None:
            yield output


def arrays(output: StepOutput) -> list[np.ndarray]:
    """All that a record has of arrays."""
    found = [output.token_ids]
    for ended in output.finished:
        found += [ended.prompt_token_ids, ended.token_ids, ended.logprobs]
    return found


def contents(output: StepOutput) -> tuple[object, ...]:
    """A record as values that nobody shares."""
    ended = [(end.request_id, end.finish_reason, end.num_preemptions) for end in output.finished]
    values = [array.tolist() for array in arrays(output)]
    ids = list(output.started_ids), list(output.request_ids)
    return ids, ended, values, astuple(output.stats)


@pytest.mark.parametrize("device", DEVICES)
def test_a_kept_record_does_not_change(device):
    """vllm#8335: a record was used again. Right: a clone of step t is the same after every other,
    and a record that was kept without one says so instead of showing another step's tokens."""
    kept, clones, as_they_were = [], [], []
    for output in run(device):
        kept.append(output)
        clones.append(output.clone())
        as_they_were.append(contents(output))
    assert len(kept) > 5
    assert sum(len(output.finished) for output in kept) == 6
    assert list(map(contents, clones)) == as_they_were
    for output in kept[:-1]:
        with pytest.raises(StaleRecordError):
            _ = output.token_ids


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_caller_does_to_a_record_changes_no_other(device):
    """dspy#10345: the caller held the cache's own object. Right: it may write all over it."""
    undisturbed = [contents(output)[:3] for output in run(device)]
    seen = []
    for output in run(device):
        seen.append(contents(output)[:3])
        for array in arrays(output):
            array[:] = 0
        output.started_ids.clear()
        output.request_ids.clear()
        output.finished.clear()
    assert seen == undisturbed
