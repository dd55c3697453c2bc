"""Decode of a DeepSeek-V4 model beside transformers: `python benchmarks/peers.py --family v4`.

The network of the profile `cpu-v4` in float32, the same weights in both, 16 sequences of 1024
random tokens (`--prompt-tokens`), greedy. Every round starts a process of each: one OpenMP team
cannot slow the other's, and no round inherits what an earlier one's allocator happened to do. Both
compute their prompts and warm up; then blocks of steps alternate, so that they meet the same
contexts and the same slow minutes of the machine. The ratio is that of the medians of a round's
steps, paired by round.

transformers runs `generate` with its own cache, eager attention and experts. A step is from one
call of its logits processors to the next, without what these do here: they keep the logits, to be
compared, and put this engine's token in the place of its own. Of equal index scores it is made to
take the first, by this engine's own `top_indices` (2 us a call more than torch's `topk`).

A step of transformers makes tensors of 32 MiB and more. glibc may ask the kernel anew for each of
them, tens of thousands of page faults a step, or keep the memory: that differs from process to
process, and the faults are printed beside the times. With `--keep-memory` both run with glibc told
to keep what it has (MALLOC_MMAP_MAX_=0 and no trimming), and neither has any.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections import deque
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
from deepinfer.models.hybrid.selection import top_indices
from deepinfer.models.hybrid.weight_names import canonical
from deepinfer.plan import Int64
from deepinfer.sequence import SamplingParams
from deepinfer.step_inputs import StepInputs

SEQUENCES, OUTPUT, BLOCK = 16, 128, 128
WARM_UP, BLOCKS, STEPS = 4, 4, 6  # steps: in all, and of each of so many blocks
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
NOT_THEIRS = {"family", "dtype", "cache", "qat", "seed", "num_stored_layers", "max_draft_tokens"}


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its time and page faults, its logits float32 [sequences, vocab], its tokens int64
    [sequences]."""

    seconds: float
    faults: int
    logits: NDArray[np.float32]
    tokens: NDArray[np.int64]


class _Clock:
    """Time and page faults of this process since it was made or read."""

    def __init__(self) -> None:
        self.resume()

    def resume(self) -> None:
        """From here on."""
        self._faults = _page_faults()
        self._start = time.perf_counter()

    def read(self) -> tuple[float, int]:
        """Seconds, and page faults."""
        seconds = time.perf_counter() - self._start
        return seconds, _page_faults() - self._faults


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def settings() -> V4Settings:
    """The model of the profile `cpu-v4`."""
    model = load_profile(find_profile("cpu-v4")).model
    assert isinstance(model, V4Settings)
    return model


def prompts(vocab_size: int, num_tokens: int) -> NDArray[np.int64]:
    """[sequences, tokens]."""
    return np.random.default_rng(0).integers(vocab_size, size=(SEQUENCES, num_tokens))


# -- this engine ---------------------------------------------------------------------------------


class _Runner(HybridRunner):
    """Keeps the logits of the last step."""

    last: Tensor

    def logits(self, inputs: StepInputs, tokens: Int64 | None) -> Any:
        """As `HybridRunner.logits`."""
        logits, wrong_rows = super().logits(inputs, tokens)
        if logits is not None:
            self.last = logits
        return logits, wrong_rows


def serve_ours(pipe: Connection, weights: Path, num_tokens: int) -> None:
    """In a process: a list of steps for each number of them asked for; None ends it."""
    model, longest = settings().config(), num_tokens + OUTPUT
    config = EngineConfig(
        block_size=BLOCK,
        num_blocks=1 + SEQUENCES * -(-longest // BLOCK),
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=SEQUENCES * num_tokens,  # all prompts in one step
        max_model_len=longest,
    )
    device = open_device("cpu")
    loaded = device.run(lambda: load_weights(model, torch.load(weights)))
    runner = _Runner(model, config, loaded, device)
    engine = LLMEngine(model, config, device=device, runner=runner)
    for number, prompt in enumerate(prompts(model.vocab_size, num_tokens)):
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=OUTPUT))

    clock = _Clock()

    def step() -> Step:
        clock.resume()
        output = engine.step()
        measured = clock.read()
        assert output is not None
        assert output.request_ids == [str(number) for number in range(SEQUENCES)]
        return Step(*measured, runner.last.numpy(), output.token_ids.astype(np.int64))

    while (count := pipe.recv()) is not None:
        pipe.send([step() for _ in range(count)])


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


def serve_theirs(pipe: Connection, weights: Path, num_tokens: int) -> None:
    """In a process: the weights go to a file, which is said; then a list of steps for each list of
    tokens to take, int64 [sequences] each. None ends it."""
    from transformers import LogitsProcessorList

    model, config = transformers_model()
    torch.save(model.state_dict(), weights)
    pipe.send("weights")
    torch.Tensor.topk = _first_of_equal  # type: ignore[method-assign, assignment]
    with torch.inference_mode():
        token_ids = torch.from_numpy(prompts(config.vocab_size, num_tokens))
        model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=OUTPUT,
            do_sample=False,
            logits_processor=LogitsProcessorList([_Between(pipe)]),
        )


class _Between:
    """A logits processor: what happens between two steps of `generate`, whose clock stands still.

    It keeps the step's logits, and has the token taken that it was given for the step; steps go
    back when all tokens given are used.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._tokens = deque[NDArray[np.int64]]()
        self._steps: list[Step] = []
        self._clock = _Clock()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        measured = self._clock.read()
        if not self._tokens:  # the first call: the prompts are computed
            self._tokens.extend(self._pipe.recv())
        token = self._tokens.popleft()
        self._steps.append(Step(*measured, scores.numpy(), scores.argmax(-1).numpy()))
        if not self._tokens:
            self._pipe.send(self._steps)
            self._steps = []
            more = self._pipe.recv()
            if more is None:
                raise SystemExit
            self._tokens.extend(more)
        taken = torch.full_like(scores, -torch.inf)
        taken[range(SEQUENCES), token] = 0
        self._clock.resume()
        return taken


def _first_of_equal(
    self: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    """`Tensor.topk`, which does not say which of equal numbers it takes: the first."""
    assert dim in (-1, self.dim() - 1), "of the last dimension"
    assert largest, "the highest"
    indices = top_indices(self, k)
    return torch.return_types.topk((self.gather(-1, indices), indices))


# -- both ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Round:
    """The measured steps of both; `warm_up` has pairs that were not measured, too."""

    ours: list[Step]
    theirs: list[Step]
    warm_up: list[tuple[Step, Step]]

    def milliseconds(self) -> tuple[float, float]:
        """Median step of each."""
        ours, theirs = (
            1e3 * statistics.median(step.seconds for step in steps)
            for steps in (self.ours, self.theirs)
        )
        return ours, theirs

    def faults(self) -> tuple[float, float]:
        """Median page faults of a step of each."""
        ours, theirs = (
            statistics.median(step.faults for step in steps) for steps in (self.ours, self.theirs)
        )
        return ours, theirs

    def pairs(self) -> list[tuple[Step, Step]]:
        """All steps, measured or not."""
        return [*self.warm_up, *zip(self.ours, self.theirs, strict=True)]


def play_round(num_tokens: int) -> Round:
    """Start a process of each; blocks of steps in turn."""
    found = Round([], [], [])
    with tempfile.TemporaryDirectory() as folder:
        theirs = _start(serve_theirs, folder, num_tokens)
        theirs.recv()  # the weights are in the folder
        ours = _start(serve_ours, folder, num_tokens)
        for block in range(1 + BLOCKS):
            ours.send(STEPS if block else 1 + WARM_UP)
            mine = ours.recv()
            theirs.send([step.tokens for step in mine])
            other = theirs.recv()
            if block:
                found.ours.extend(mine)
                found.theirs.extend(other)
            else:
                found.warm_up.extend(zip(mine, other, strict=True))
        for pipe in (ours, theirs):
            pipe.send(None)
    for process in multiprocessing.active_children():
        process.join()
    return found


def compare(rounds: int, num_tokens: int, *, keep_memory: bool) -> None:
    """Print what a step takes in both, the ratio, and how far the logits differ."""
    if keep_memory:
        os.environ.update(KEEP_MEMORY)  # glibc reads it when a process starts
    played = []
    print(
        "round    deepinfer  faults   transformers  faults    ratio   (ms and page faults a step)"
    )
    for number in range(1, rounds + 1):
        played.append(play_round(num_tokens))
        (mine, other), (faults, more) = played[-1].milliseconds(), played[-1].faults()
        print(
            f"{number:5}  {mine:9.2f}  {faults:8.0f}  {other:11.2f}  {more:8.0f}"
            f"  {other / mine:7.2f}",
            flush=True,
        )
    _report(played, num_tokens)


def _start(
    serve: Callable[[Connection, Path, int], None], folder: str, num_tokens: int
) -> Connection:
    context = multiprocessing.get_context("spawn")
    pipe, its = context.Pipe()
    args = its, Path(folder, "weights"), num_tokens
    context.Process(target=serve, args=args, daemon=True).start()
    its.close()  # so that the end of the process ends our wait
    return pipe


def _report(played: list[Round], num_tokens: int) -> None:
    times = [each.milliseconds() for each in played]
    ours, theirs = ({n: pair[i] for n, pair in enumerate(times)} for i in range(2))
    ratio = paired_ratio(theirs, ours)
    assert ratio is not None
    interval = ratio.interval
    between = "" if interval is None else f"{interval.low:.2f} to {interval.high:.2f}, "
    print(
        f"transformers takes {ratio.center:.2f} times as long "
        f"({between}{ratio.num_values} rounds of {BLOCKS * STEPS} steps of {SEQUENCES} sequences "
        f"of {num_tokens} tokens and more)"
    )
    pairs = [pair for each in played for pair in each.pairs()]
    differences = [d for a, b in pairs for d in np.abs(a.logits - b.logits).max(1).tolist()]
    num_equal = sum(int((a.tokens == b.tokens).sum()) for a, b in pairs)
    typical, largest = statistics.median(differences), max(differences)
    print(
        f"largest difference of a token's logits: median {typical:.1e}, most {largest:.1e}; "
        f"{num_equal} of {len(differences)} greedy tokens are equal"
    )
    print(json.dumps({"ms": times, "ratio": ratio.center, "logits_differ": largest}))
