"""The dense reference and its verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.catalog import find_profile
from bench.model_schema import HybridSettings
from bench.spec import load_profile
from bench.verify import DenseReference, Emission, Tolerances
from deepinfer.config import EngineConfig
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.models.hf_config import model_config_from_folder
from deepinfer.models.hybrid.loading import draw_weights
from deepinfer.models.hybrid.weights import HybridWeights
from deepinfer.models.weights import Qwen3Weights, load_weights
from deepinfer.sampling import gumbel_noise
from deepinfer.worker import Worker
from tests.deepinfer.step_plans import TINY, Run, cache_of, model_worker, step_plan

TOLERANCES = Tolerances(score=1e-3, logprob=2e-4)
SIZE = 16


@pytest.fixture
def device() -> Iterator[SteppedCpuDevice]:
    device = SteppedCpuDevice()
    yield device
    device.close()


@pytest.fixture
def weights(device: SteppedCpuDevice) -> Qwen3Weights:
    return load_weights(TINY, device)


@pytest.fixture
def reference(weights: Qwen3Weights) -> DenseReference:
    return DenseReference(weights, TINY)


def generated(
    device: SteppedCpuDevice, weights: Qwen3Weights, temperature: float, num: int = 20
) -> list[Emission]:
    """What the engine's worker emits after three prompts of 50, 33 and 50 tokens."""
    worker = model_worker(TINY, EngineConfig(SIZE, 32, max_model_len=256), weights, device)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, n).tolist() for n in (50, 33, 50)]
    runs = [
        Run(p, range(1 + 5 * i, 6 + 5 * i), 0, len(p), temperature=temperature, seed=i)
        for i, p in enumerate(prompts)
    ]
    logprobs = []
    for _ in range(num):
        result = worker.submit_forward(step_plan(runs, SIZE)).collect()
        logprobs.append(result.logprobs)
        runs = [run.then(int(t)) for run, t in zip(runs, result.token_ids, strict=True)]
    return [
        Emission(run.tokens, len(p), temperature, run.seed, list(column))
        for run, p, column in zip(runs, prompts, np.array(logprobs).T, strict=True)
    ]


@pytest.mark.oracle
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_transformers(tied: bool, tmp_path: Path, device: SteppedCpuDevice) -> None:
    """The reference itself agrees with transformers at every position."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            num_hidden_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=96,
            vocab_size=199,
            initializer_range=0.15,
            tie_word_embeddings=tied,
        )
    ).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(tmp_path)
    config = model_config_from_folder(tmp_path)
    token_ids = torch.randint(199, (2, 70))
    ours = DenseReference(load_weights(config, device), config).logits(token_ids)
    with torch.no_grad():
        torch.testing.assert_close(ours, model(token_ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_clean_run_is_right(
    temperature: float, device: SteppedCpuDevice, weights: Qwen3Weights, reference: DenseReference
) -> None:
    """What the paged engine emits is right, its log-probabilities within 1e-4."""
    for verdict in reference.check_all(generated(device, weights, temperature), TOLERANCES):
        assert not verdict.wrong
        assert verdict.wrong_positions == ()
        assert verdict.max_logprob_diff < 1e-4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_wrong_token_is_found_where_it_stands(
    temperature: float, device: SteppedCpuDevice, weights: Qwen3Weights, reference: DenseReference
) -> None:
    """The last token replaced by another is that position's error and no other's."""
    emission = generated(device, weights, temperature)[0]
    token_ids = [*emission.token_ids[:-1], (emission.token_ids[-1] + 1) % 256]
    verdict = reference.check(replace(emission, token_ids=token_ids), TOLERANCES)
    assert verdict.wrong
    assert verdict.wrong_positions == (len(token_ids) - 1,)


def test_another_seed_is_wrong(
    device: SteppedCpuDevice, weights: Qwen3Weights, reference: DenseReference
) -> None:
    """Tokens drawn with one seed are not those of another: the noise is part of the check."""
    emission = generated(device, weights, 1.0)[0]
    assert reference.check(replace(emission, seed=99), TOLERANCES).wrong


@pytest.mark.parametrize("broken", [0.01, float("nan")])
def test_a_logprob_alone_makes_it_wrong(
    broken: float, device: SteppedCpuDevice, weights: Qwen3Weights, reference: DenseReference
) -> None:
    """Right tokens with a log-probability too far off, or NaN, are wrong."""
    emission = generated(device, weights, 0.0)[1]
    logprobs = [*emission.logprobs[:-1], emission.logprobs[-1] + broken]
    verdict = reference.check(replace(emission, logprobs=logprobs), TOLERANCES)
    assert verdict.wrong
    assert verdict.wrong_positions == ()


def test_a_near_tie_is_counted_apart(reference: DenseReference) -> None:
    """The second best token is a near tie within the score tolerance, wrong outside it."""
    prompt = list(range(40))
    logits = reference.logits(torch.tensor([prompt]))[0, -1]
    best, second = logits.topk(2).indices.tolist()
    gap = float(logits[best] - logits[second])
    logprob = float(logits.log_softmax(0)[second])
    emission = Emission([*prompt, second], 40, 0.0, 0, [logprob])
    wide = reference.check(emission, Tolerances(score=gap * 1.01, logprob=1e-3))
    assert (wide.wrong, wide.near_ties) == (False, 1)
    tight = reference.check(emission, Tolerances(score=gap * 0.99, logprob=1e-3))
    assert (tight.wrong, tight.near_ties, tight.wrong_positions) == (True, 0, (40,))


def test_scores_are_logits_over_temperature_plus_noise(reference: DenseReference) -> None:
    """The token with the best noisy score is right, and has no tie."""
    prompt = list(range(40))
    logits = reference.logits(torch.tensor([prompt]))[0, -1]
    noise = gumbel_noise(torch.tensor([8]), torch.tensor([40]), 256)[0]
    token = int((logits / 2.5 + noise).argmax())
    assert token != int(logits.argmax())
    logprob = float(logits.log_softmax(0)[token])
    verdict = reference.check(Emission([*prompt, token], 40, 2.5, 8, [logprob]), TOLERANCES)
    assert (verdict.wrong, verdict.near_ties) == (False, 0)


def test_equal_emissions_cost_one_forward(
    device: SteppedCpuDevice, weights: Qwen3Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds that emitted the same tokens are judged once; other log-probabilities still count."""
    emissions = generated(device, weights, 1.0)
    reference, rows = DenseReference(weights, TINY), []
    dense, states = reference._dense, reference._dense.states
    monkeypatch.setattr(dense, "states", lambda ids: rows.append(len(ids)) or states(ids))
    first = reference.check_all(emissions * 2, TOLERANCES)
    assert rows == [2, 1]
    changed = replace(emissions[0], logprobs=[0.0] * 20)
    assert reference.check_all(emissions, TOLERANCES) == first[:3]
    assert reference.check(changed, TOLERANCES).wrong
    assert rows == [2, 1]


def test_batches_respect_the_token_budget(device: SteppedCpuDevice, weights: Qwen3Weights) -> None:
    """A small budget splits the batch and changes no verdict beyond rounding."""
    emissions = generated(device, weights, 1.0)
    small = DenseReference(weights, TINY, max_batch_tokens=1).check_all(emissions, TOLERANCES)
    large = DenseReference(weights, TINY).check_all(emissions, TOLERANCES)
    assert [v.wrong for v in small] == [v.wrong for v in large] == [False] * 3


def test_no_output_is_not_wrong(reference: DenseReference) -> None:
    """A request that ended before its first token has nothing to be wrong about."""
    verdict = reference.check(Emission([1, 2, 3], 3, 0.0, 0, []), TOLERANCES)
    assert (verdict.wrong, verdict.max_logprob_diff) == (False, 0.0)


@pytest.mark.parametrize("fault", ["swap", "overwrite", "lose_row"])
def test_a_fault_in_the_cache_is_flagged(
    fault: str, device: SteppedCpuDevice, weights: Qwen3Weights, reference: DenseReference
) -> None:
    """Two table entries swapped, a block overwritten, the newest row lost: 20 of 20 are flagged."""
    rng = np.random.default_rng(3)
    worker = model_worker(TINY, EngineConfig(SIZE, 512, max_model_len=256), weights, device)
    prompts = [rng.integers(0, 256, 200).tolist() for _ in range(20)]
    runs = [Run(p, range(1 + 16 * i, 17 + 16 * i), 0, 200) for i, p in enumerate(prompts)]
    logprobs = []
    for step in range(24):
        result = worker.submit_forward(step_plan(runs, SIZE)).collect()
        logprobs.append(result.logprobs)
        runs = [run.then(int(t)) for run, t in zip(runs, result.token_ids, strict=True)]
        if step == 8:
            runs = [_damage(worker, run, fault, rng) for run in runs]
    emissions = [
        Emission(run.tokens, 200, 0.0, 0, list(column))
        for run, column in zip(runs, np.array(logprobs).T, strict=True)
    ]
    assert all(verdict.wrong for verdict in reference.check_all(emissions, TOLERANCES))


class _TwoMinds:
    """A network of two tokens that says 1 with probability 1/2, or 3/4 if its embeddings moved."""

    device = torch.device("cpu")

    def __init__(self, odds: float) -> None:
        self._odds = odds

    def states(self, token_ids: Tensor) -> Tensor:
        return torch.zeros(*token_ids.shape, 1)

    def head(self, hidden: Tensor) -> Tensor:
        return torch.tensor([1.0, self._odds]).log().expand(len(hidden), 2)


@pytest.mark.parametrize(
    ("probability", "is_wrong"),
    [(0.5, False), (0.6, False), (0.75, False), (0.45, True), (0.8, True)],
)
def test_where_a_choice_is_open_either_answer_is_right(
    monkeypatch: pytest.MonkeyPatch, probability: float, is_wrong: bool
) -> None:
    """What a network says of slightly other embeddings counts too, and what lies between."""
    settings = load_profile(find_profile("cpu-v41-tiny")).model
    assert isinstance(settings, HybridSettings)
    model = settings.config()
    drawn = draw_weights(model)

    def dense_of(weights: HybridWeights, config: object) -> _TwoMinds:
        return _TwoMinds(1.0 if weights is drawn else 3.0)

    monkeypatch.setattr("bench.verify._dense_of", dense_of)
    reference = DenseReference(drawn, model)
    emission = Emission([0, 1], 1, 0.0, 0, [float(np.log(probability))])
    for _ in range(2):  # the second time from memory
        assert reference.check(emission, TOLERANCES).wrong == is_wrong


def _damage(worker: Worker, run: Run, fault: str, rng: np.random.Generator) -> Run:
    """The run after one fault in its table or its rows."""
    table = list(run.table)
    a, b = rng.choice(run.computed // SIZE, 2, replace=False)
    if fault == "swap":
        table[a], table[b] = table[b], table[a]
    elif fault == "overwrite":
        pair = torch.tensor([[table[a], table[b]]], dtype=torch.int32)
        cache_of(worker).copy_blocks(pair)
    else:
        newest = run.computed - 1
        for layer in range(TINY.num_hidden_layers):
            for pool in (cache_of(worker).keys(layer), cache_of(worker).values(layer)):
                pool[table[newest // SIZE], newest % SIZE] = 0
    return replace(run, table=table)
