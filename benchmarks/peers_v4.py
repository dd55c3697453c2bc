"""Decode of a DeepSeek-V4 model beside transformers: `python benchmarks/peers.py --family v4`.

The network of the profile `cpu-v4` in float32, the same weights in both, 16 sequences of 512 random
tokens, greedy. Each engine lives in a process of its own (one OpenMP team cannot slow the other's),
computes its prompts once and keeps its cache. Then blocks of steps alternate, so that both meet the
same contexts and the same slow minutes of the machine; the ratio is that of the blocks' medians,
paired by round.

transformers decodes with its own cache (`DynamicCache`), eager attention and experts, without
`generate`'s work around a step. It is fed this engine's tokens, so that the logits of every step
can be compared; of equal index scores it is made to take the first, as this engine does.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.catalog import find_profile
from bench.model_schema import V4Settings
from bench.spec import load_profile
from bench.stats import paired_ratio
from deepinfer.config import EngineConfig
from deepinfer.device import open_device
from deepinfer.engine import LLMEngine
from deepinfer.hybrid_runner import HybridRunner
from deepinfer.models.hybrid.drawing import Drawn
from deepinfer.models.hybrid.layer_plan import HybridConfig, v4_config
from deepinfer.models.hybrid.loading import load_weights
from deepinfer.models.hybrid.weight_names import canonical
from deepinfer.plan import Int64, StepPlan
from deepinfer.sequence import SamplingParams

SEQUENCES, PROMPT, MAX_LEN, BLOCK, WARM_UP, STEPS = 16, 512, 1024, 128, 4, 6
NOT_THEIRS = {"family", "dtype", "cache", "qat", "seed", "num_stored_layers", "max_draft_tokens"}


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its time, its logits float32 [sequences, vocab], its tokens int64 [sequences]."""

    seconds: float
    logits: NDArray[np.float32]
    tokens: NDArray[np.int64]


def settings() -> V4Settings:
    """The model of the profile `cpu-v4`."""
    model = load_profile(find_profile("cpu-v4")).model
    assert isinstance(model, V4Settings)
    return model


def prompts(vocab_size: int) -> NDArray[np.int64]:
    """[sequences, tokens]."""
    return np.random.default_rng(0).integers(vocab_size, size=(SEQUENCES, PROMPT))


# -- this engine ---------------------------------------------------------------------------------


class _Runner(HybridRunner):
    """Keeps the logits of the last step."""

    last: Tensor

    def logits(self, plan: StepPlan, tokens: Int64 | None) -> Any:
        """As `HybridRunner.logits`."""
        logits, wrong_rows = super().logits(plan, tokens)
        if logits is not None:
            self.last = logits
        return logits, wrong_rows


def serve_ours(pipe: Connection, weights: Path) -> None:
    """In a process: a list of steps for each number of steps asked for."""
    model = settings().config()
    config = EngineConfig(
        block_size=BLOCK,
        num_blocks=1 + SEQUENCES * MAX_LEN // BLOCK,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=SEQUENCES * PROMPT,  # all prompts in one step
        max_model_len=MAX_LEN,
    )
    device = open_device("cpu")
    loaded = device.run(lambda: load_weights(model, torch.load(weights)))
    runner = _Runner(model, config, loaded, device)
    engine = LLMEngine(model, config, device=device, runner=runner)
    for number, prompt in enumerate(prompts(model.vocab_size)):
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=MAX_LEN - PROMPT))

    def step() -> Step:
        start = time.perf_counter()
        output = engine.step()
        seconds = time.perf_counter() - start
        assert output is not None
        assert output.request_ids == [str(number) for number in range(SEQUENCES)]
        return Step(seconds, runner.last.numpy(), output.token_ids.astype(np.int64))

    _serve(pipe, lambda count: [step() for _ in range(count)])


# -- transformers --------------------------------------------------------------------------------


def transformers_model() -> tuple[Any, HybridConfig]:
    """The network of `cpu-v4` in transformers, filled by the rule of drawn weights; our config."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    ours = settings()
    raw = ours.model_dump(exclude=NOT_THEIRS)
    raw["rope_parameters"]["main"]["rope_type"] = "default"
    # Left out, transformers would lengthen the rotated vectors; the model's own config has 1.
    raw["rope_parameters"]["compress"] |= {"rope_type": "yarn", "attention_factor": 1.0}
    theirs = DeepseekV4Config(
        **{key: list(value) if isinstance(value, tuple) else value for key, value in raw.items()},
        num_hidden_layers=len(ours.layer_types),
        num_key_value_heads=1,
        n_shared_experts=1,
        max_position_embeddings=16 * 65536,
        eos_token_id=None,
    )
    theirs._attn_implementation = theirs._experts_implementation = "eager"
    config = ours.config()
    assert v4_config(theirs.to_dict()) == config, "two networks"
    model = DeepseekV4ForCausalLM(theirs).eval()
    drawn = Drawn(config)
    for name, tensor in canonical(model.state_dict()).items():  # views of the model's own tensors
        tensor.copy_(drawn(name, tuple(tensor.shape)))
    return model, config


def serve_theirs(pipe: Connection, weights: Path) -> None:
    """In a process: the weights go to a file; a list of steps for each list of tokens to feed."""
    from transformers import DynamicCache

    model, config = transformers_model()
    torch.save(model.state_dict(), weights)
    cache = DynamicCache(config=model.config)
    torch.Tensor.topk = _first_of_equal  # type: ignore[method-assign, assignment]

    @torch.inference_mode()
    def step(token_ids: NDArray[np.int64]) -> Step:
        start = time.perf_counter()
        output = model(
            input_ids=torch.from_numpy(token_ids), cache=cache, use_cache=True, logits_to_keep=1
        )
        logits = output.logits[:, -1]
        tokens = logits.argmax(-1)
        seconds = time.perf_counter() - start
        return Step(seconds, logits.numpy(), tokens.numpy())

    pipe.send(prompts(config.vocab_size))
    _serve(pipe, lambda fed: [step(token_ids) for token_ids in fed])


def _first_of_equal(
    self: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    """`Tensor.topk`, which does not say which of equal numbers it takes: the first."""
    found = torch.sort(self, dim=dim, descending=largest, stable=True)
    parts = (found.values.narrow(dim, 0, k), found.indices.narrow(dim, 0, k))
    return torch.return_types.topk(parts)


# -- both ----------------------------------------------------------------------------------------


def _serve(pipe: Connection, answer: Callable[[Any], list[Step]]) -> None:
    while (request := pipe.recv()) is not None:
        pipe.send(answer(request))


def compare(rounds: int) -> None:
    """Print what a step takes in both, the ratio, and how far the logits differ."""
    times: dict[str, dict[int, float]] = {"deepinfer": {}, "transformers": {}}
    differences: list[float] = []
    num_equal = 0
    with tempfile.TemporaryDirectory() as folder:
        theirs = _start(serve_theirs, folder)
        fed = [theirs.recv()]  # prompts; the weights are in the folder
        ours = _start(serve_ours, folder)
        for number in range(-1, rounds):  # the first is not measured: prompts, then a warm-up
            ours.send(STEPS if number >= 0 else 1 + WARM_UP)
            mine = ours.recv()
            fed += [step.tokens[:, None] for step in mine]
            theirs.send(fed[:-1])
            other, fed = theirs.recv(), fed[-1:]
            for a, b in zip(mine, other, strict=True):
                differences += np.abs(a.logits - b.logits).max(1).tolist()
                num_equal += int((a.tokens == b.tokens).sum())
            if number >= 0:
                times["deepinfer"][number] = statistics.median(step.seconds for step in mine)
                times["transformers"][number] = statistics.median(step.seconds for step in other)
        for pipe in (ours, theirs):
            pipe.send(None)
    _report(times, differences, num_equal)


def _start(serve: Callable[[Connection, Path], None], folder: str) -> Connection:
    context = multiprocessing.get_context("spawn")
    pipe, its = context.Pipe()
    context.Process(target=serve, args=(its, Path(folder, "weights")), daemon=True).start()
    its.close()  # so that the end of the process ends our wait
    return pipe


def _report(times: dict[str, dict[int, float]], differences: list[float], num_equal: int) -> None:
    ratio = paired_ratio(times["transformers"], times["deepinfer"])
    assert ratio is not None
    milliseconds = {name: 1e3 * statistics.median(of.values()) for name, of in times.items()}
    for name, each in milliseconds.items():
        print(f"{name:13} {each:7.2f} ms a decode step of {SEQUENCES} sequences")
    interval = ratio.interval
    between = "" if interval is None else f"{interval.low:.2f} to {interval.high:.2f}, "
    print(
        f"transformers takes {ratio.center:.2f} times as long "
        f"({between}{ratio.num_values} rounds of {STEPS} steps)"
    )
    typical, largest = statistics.median(differences), max(differences)
    print(
        f"largest difference of a token's logits: median {typical:.1e}, most {largest:.1e}; "
        f"{num_equal} of {len(differences)} greedy tokens are equal"
    )
    print(json.dumps({"ms": milliseconds, "ratio": ratio.center, "logits_differ": largest}))
