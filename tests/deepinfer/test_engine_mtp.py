"""`drafter: mtp` through the engine: tokens of a run without drafts, guesses of the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from bench.dense.drafting import DenseDrafting
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.drafters.base import Asked, Drafts
from deepinfer.engine import LLMEngine
from deepinfer.errors import UserError
from deepinfer.hybrid_runner import HybridRunner
from deepinfer.models.hybrid.layer_plan import HybridConfig, v4_config, v41_config
from deepinfer.models.hybrid.loading import draw_weights
from deepinfer.models.hybrid.weights import HybridWeights
from deepinfer.sequence import SamplingParams
from tests.deepinfer.step_plans import TINY
from tests.hybrid_configs import dspark, v4_raw, v41_raw

MODELS = {
    "v41": v41_config(
        {
            **v41_raw([0, 2, 1, 1], sources=[1, 2], selectors=[1, 2], publisher=2, engram=[1]),
            **dspark([1, 3], 2),
        }
    ),
    "v4": v4_config({**v4_raw(ratios=(4, 16), window=8), "num_nextn_predict_layers": 1}),
}
ENGINE = EngineConfig(
    block_size=8,
    num_blocks=22,
    max_num_seqs=5,
    max_num_batched_tokens=40,
    max_model_len=120,
    checks="all",
)


@cache
def model(family: str) -> tuple[HybridConfig, HybridWeights]:
    """With a head of few likely tokens, so that some guesses are right."""
    config = replace(MODELS[family], dtype="float64", cache="fp64", seed=2)
    weights = draw_weights(config, torch.float64)
    weights.head[12:] *= 0.1
    return config, weights


@dataclass(frozen=True)
class Guess:
    """Drafts behind a request's newest token, which is at `position`."""

    newest: int
    position: int
    drafts: tuple[int, ...]


class Watched(HybridRunner):
    """Remembers what was proposed."""

    guesses: list[Guess]

    def propose(self, asked: Asked) -> Drafts:
        """As any runner."""
        drafts, counts = super().propose(asked)
        positions = asked.lengths - 1
        newest = asked.tokens[asked.slots, positions]
        columns = newest.tolist(), positions.tolist(), drafts.tolist(), asked.room.tolist()
        for token, position, row, room in zip(*columns, strict=True):
            if room:
                self.guesses.append(Guess(token, position, tuple(row[:room])))
        return Drafts(drafts, counts)


@dataclass(frozen=True)
class Served:
    """What a run left: tokens by request, guesses, drafts accepted, preemptions."""

    tokens: dict[str, list[int]]
    guesses: list[Guess]
    num_accepted: int
    num_preemptions: int


def serve(family: str, settings: EngineConfig, device: SteppedCpuDevice) -> Served:
    """Prompts in chunks, sampled and greedy, forks that go on otherwise, too small a pool."""
    config, weights = model(family)
    runner = Watched(config, settings, weights, device, tags=True)
    runner.guesses = []
    rng, tokens, num_accepted = np.random.default_rng(8), dict[str, list[int]](), 0
    with LLMEngine(config, settings, device=device, runner=runner) as engine:
        for number in range(6):
            prompt = rng.integers(0, 61, rng.integers(4, 60))
            sampling = SamplingParams(max_tokens=24, temperature=0.5 * (number % 2), seed=number)
            engine.add_request(f"r{number}", prompt, sampling)
        for _ in range(4):
            engine.step()
        for number, parent in enumerate(engine.scheduler.running[:2]):
            sampling = SamplingParams(max_tokens=12)
            engine.fork(parent.request_id, f"f{number}", sampling, own_token_ids=[7, 5])
        while engine.has_unfinished():
            output = engine.step()
            assert output is not None
            if output.stats.drafts is not None:
                num_accepted += sum(output.stats.drafts.accepted)
            for ended in output.finished:
                tokens[ended.request_id] = [*ended.prompt_token_ids, *ended.token_ids]
        assert engine.findings.first == []
        assert engine.blocks.num_free == engine.blocks.num_usable
        assert engine.states is not None
        assert engine.states.slots.num_free == engine.states.slots.num_usable
        num_preemptions = engine.scheduler.counters.num_preemptions
    return Served(tokens, runner.guesses, num_accepted, num_preemptions)


@pytest.mark.parametrize(("drafts", "overlap"), [(1, "off"), (3, "2"), (5, "off"), (5, "on")])
@pytest.mark.parametrize("family", MODELS)
def test_tokens_are_those_of_a_run_without_drafts(
    family: str, drafts: int, overlap: str, device: SteppedCpuDevice
) -> None:
    """Greedy and sampled ones; and each guess is the dense reference's behind the same tokens."""
    plain = serve(family, ENGINE, device)
    settings = replace(ENGINE, drafts=drafts, drafter="mtp", overlap=overlap)
    drafted = serve(family, settings, device)
    for name in [f"r{number}" for number in range(6)]:
        assert drafted.tokens[name] == plain.tokens[name]
    assert plain.guesses == []
    assert len(drafted.guesses) > 60
    assert drafted.num_accepted > 0
    assert drafted.num_preemptions > 0
    check_guesses(family, drafted, drafts)


def check_guesses(family: str, served: Served, num_drafts: int) -> None:
    """Each is what the reference guesses behind a request's tokens up to there."""
    config, weights = model(family)
    dense = DenseDrafting(weights, config, dtype=torch.float64)
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    for guess in served.guesses:
        end = guess.position + 1
        histories = {
            tuple(tokens[:end])
            for tokens in served.tokens.values()
            if len(tokens) >= end and tokens[guess.position] == guess.newest
        }
        for history in histories - known.keys():
            known[history] = tuple(dense.propose(torch.tensor(history), num_drafts).tolist())
        found = {known[history][: len(guess.drafts)] for history in histories}
        assert guess.drafts in found, guess


def test_a_run_repeats_guess_by_guess(device: SteppedCpuDevice) -> None:
    """The same requests are given the same drafts."""
    settings = replace(ENGINE, drafts=4, drafter="mtp", overlap="on")
    first, again = (serve("v4", settings, device) for _ in range(2))
    assert first == again


@pytest.mark.parametrize(
    ("config", "name"),
    [(TINY, "Qwen3"), (replace(MODELS["v4"], draft=None), "deepseek_v4")],
    ids=["qwen3", "v4"],
)
def test_a_model_without_draft_layers_is_refused(
    config: ModelConfig | HybridConfig, name: str, device: SteppedCpuDevice
) -> None:
    """By name, and only if drafts are asked for."""
    settings = EngineConfig(num_blocks=9, block_size=16, drafter="mtp", drafts=2)
    with pytest.raises(UserError, match=f"own draft layers, and .*{name}"):
        LLMEngine(config, settings, device=device)
    LLMEngine(config, replace(settings, drafts=0), device=device).close()
