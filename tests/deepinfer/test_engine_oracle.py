"""The whole engine against transformers' Qwen3: what it emits is what nobody here wrote computes.

Every emitted token's log-probability is compared with a cache-free forward of transformers over the
same tokens, to 1e-4 absolute in float32, on the paths where ownership could go wrong.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.config import EngineConfig
from deepinfer.engine import LLMEngine
from deepinfer.models.hf_config import model_config_from_folder
from deepinfer.outputs import RequestOutput
from deepinfer.sequence import SamplingParams

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-4
SIZE = 4
VOCAB = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Qwen3, saved the Hugging Face way."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 1.5 * weight.shape[1] ** -0.5)
    path = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(path)
    return path, model


def engine_for(folder, **settings):
    config = EngineConfig(
        **{
            "block_size": SIZE,
            "num_blocks": 129,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 16,
            "max_model_len": 256,
            **settings,
        }
    )
    return LLMEngine(model_config_from_folder(folder[0]), config, device="cpu-stepped")


def finish(engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished():
        outputs.update((output.request_id, output) for output in engine.step().finished)
    return outputs


def step_until(engine, request_id: str, num_tokens: int) -> None:
    """Run until the request has emitted that many tokens."""
    emitted = 0
    while emitted < num_tokens:
        emitted += engine.step().request_ids.count(request_id)


@torch.inference_mode()
def worst_difference(folder, output: RequestOutput) -> float:
    """Largest |log-probability - transformers'| over the emitted tokens."""
    history = np.concatenate((output.prompt_token_ids, output.token_ids))
    logits = folder[1](torch.from_numpy(history).long()[None]).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)
    first = len(output.prompt_token_ids)
    expected = [logprobs[first + i - 1, token] for i, token in enumerate(output.token_ids)]
    assert expected, "a comparison of nothing proves nothing"
    return float(np.abs(np.array(expected) - output.logprobs).max())


def prompt_of(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, size)


@pytest.mark.parametrize("tail_copy", ["last", "partial"])
@pytest.mark.parametrize("processed", [3 * SIZE - 1, 3 * SIZE, 3 * SIZE + 1])
def test_forks_that_decode_at_once(folder, processed, tail_copy):
    """Decode path at processed lengths k B - 1, k B, k B + 1, the parent running on beside them."""
    with engine_for(folder, fork_copy=tail_copy) as engine:
        engine.add_request("parent", prompt_of(processed, processed), SamplingParams(20))
        step_until(engine, "parent", 1)
        for child in range(4):
            engine.fork("parent", f"child {child}", SamplingParams(12, 1.0, seed=child))
        outputs = finish(engine)
    assert len(outputs) == 5
    assert max(worst_difference(folder, output) for output in outputs.values()) <= TOLERANCE


@pytest.mark.parametrize("num_own", [1, 2, SIZE, 3 * SIZE + 2])
@pytest.mark.parametrize("processed", [3 * SIZE - 1, 3 * SIZE, 3 * SIZE + 1])
def test_forks_that_read_tokens_of_their_own(folder, processed, num_own):
    """Prompt path at the same processed lengths; the parent's own continuation is not shared."""
    with engine_for(folder) as engine:
        engine.add_request("parent", prompt_of(processed, processed), SamplingParams(8))
        step_until(engine, "parent", 1)
        for child in range(3):
            engine.fork(
                "parent",
                f"child {child}",
                SamplingParams(6),
                own_token_ids=prompt_of(100 + child, num_own),
                num_shared_tokens=processed,
            )
        outputs = finish(engine)
    assert len(outputs) == 4
    assert max(worst_difference(folder, output) for output in outputs.values()) <= TOLERANCE


def test_recompute_after_preemption(folder):
    """Requests that lost their blocks in a pool too small emit what they would have emitted."""
    with engine_for(folder, num_blocks=15, release="deferred") as engine:
        for number in range(4):
            engine.add_request(
                str(number), prompt_of(number, 9 + number), SamplingParams(20, number % 2)
            )
        outputs = finish(engine)
    assert sum(output.num_preemptions for output in outputs.values()) > 0
    assert max(worst_difference(folder, output) for output in outputs.values()) <= TOLERANCE


@pytest.mark.parametrize("budget", [8, 13, 70])
def test_chunked_prompts_beside_decodes(folder, budget):
    """A 70-token prompt in chunks of what the budget leaves, while others decode."""
    with engine_for(folder, max_num_batched_tokens=budget) as engine:
        engine.add_request("decoding", prompt_of(1, 5), SamplingParams(30))
        step_until(engine, "decoding", 1)
        engine.add_request("long", prompt_of(2, 70), SamplingParams(10, 1.0, seed=3))
        outputs = finish(engine)
    assert max(worst_difference(folder, output) for output in outputs.values()) <= TOLERANCE
