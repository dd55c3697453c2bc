"""A submit asks the device for nothing: what a step has found stays there for the next one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer import device
from deepinfer.config import EngineConfig
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.drafters.acceptance import Acceptance
from deepinfer.drafters.base import Drafter
from deepinfer.drafters.ngram import NgramDrafter
from deepinfer.drafters.replay import ReplayDrafter
from deepinfer.engine import LLMEngine
from deepinfer.plan import PLACEHOLDER
from deepinfer.sequence import SamplingParams
from tests.deepinfer.ahead.scenes import VOCAB, model
from tests.deepinfer.test_engine_mtp import model as model_with_draft_layers

CONFIG = EngineConfig(
    block_size=4, num_blocks=129, max_num_seqs=4, max_model_len=64, max_num_batched_tokens=64
)
PROMPTS = [np.tile(np.arange(1, 4 + n, dtype=np.int32), 2) for n in range(4)]
MIXED = [SamplingParams(12, temperature=0.7 * (n % 2), seed=n) for n in range(4)]
ASKING = {  # operations by what the host would have to know
    "_local_scalar_dense": "a value",
    "equal": "a value",
    "allclose": "a value",
    "nonzero": "how many there are",
    "masked_select": "how many there are",
    "_unique2": "how many there are",
    "unique_dim": "how many there are",
    "unique_consecutive": "how many there are",
    "bincount": "how many there are",
    "repeat_interleave.Tensor": "how many there are",
}
READING = ("tolist", "numpy", "item", "cpu", "__array__", "__bool__", "__int__", "__index__")
KERNELS_OF_CPU = str(Path(device.__file__).parent)  # CUDA has others, but see `device.grouped`
FROM_HOST = ("tensor", "as_tensor", "asarray")


class NoAsking(TorchDispatchMode):
    """Raises at what would make the host wait on CUDA: a shape or a value that it must know."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        for asking, what in ASKING.items():
            if asking in (name, name.split(".")[0]):
                raise AssertionError(f"{name}: the host waits to know {what}")
        by = args[1] if name.startswith(("index.", "index_put", "_index_put_impl_")) else ()
        if any(index is not None and index.dtype == torch.bool for index in by):
            raise AssertionError(f"{name} by a mask: the host waits to know how many")
        if name == "copy_.default" and not args[0].dim() and not args[1].dim():
            raise AssertionError("x[i] = number: the host waits until it is copied")
        return func(*args, **(kwargs or {}))


class NoReading(TorchFunctionMode):
    """The same for what is no operation on the CPU: reading a tensor, or making one of numbers."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READING or (name in FROM_HOST and func.__module__ != "numpy"):
            caller = sys._getframe(1).f_code
            if not caller.co_filename.startswith(KERNELS_OF_CPU):
                raise AssertionError(f"{name}: the host waits, asked by {caller.co_name}")
        return func(*args, **(kwargs or {}))


class SilentDevice(SteppedCpuDevice):
    """A device of which an operation cannot ask what it has computed."""

    def read(self, readback):
        raise AssertionError("the step waits for its own result")

    def _run(self, stream, work, label):
        def asking_nothing():
            with NoReading(), NoAsking():
                work()

        super()._run(stream, asking_nothing if "forward step" in label else work, label)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: x.cpu(),
        lambda x: int(x[0]),
        lambda x: [0, 1, 2][x[0]],
        lambda x: bool((x > 1).any()),
        lambda x: torch.equal(x, x),
        lambda x: torch.allclose(x, x),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x.masked_select(x > 1),
        lambda x: x.unique(),
        lambda x: x.unique_consecutive(),
        lambda x: x.bincount(),
        lambda x: torch.arange(3).repeat_interleave(x),
        lambda x: x.index_put_((x > 1,), torch.zeros(1, dtype=torch.int64)),
        lambda x: x.__setitem__(0, 3),
        lambda x: torch.tensor([1, 2]),
    ],
)
def test_what_would_wait_is_seen(ask: Callable) -> None:
    """Each way to ask a tensor of the device for a value or a size, or to make one of numbers."""
    x = torch.arange(3)
    with NoReading(), NoAsking(), pytest.raises(AssertionError, match="the host waits"):
        ask(x)


def drafter_of(name: str, references: dict) -> Drafter | None:
    """None: the model's own draft layers, or nobody."""
    if name == "replay":
        return ReplayDrafter(references, Acceptance(((0.7,),)), 0, VOCAB)
    return NgramDrafter() if name == "ngram" else None


def model_of(family: str, drafter: str):
    return model_with_draft_layers(family) if drafter == "mtp" else model(family)


CASES = [
    (family, drafter, overlap)
    for family in ("qwen3", "v4", "v41")
    for drafter in ("none", "ngram", "replay", "mtp")
    for overlap in ("off", "on", "2")
    if (family, drafter) != ("qwen3", "mtp") and (drafter, overlap) != ("none", "off")
]


@pytest.mark.parametrize(("family", "drafter", "overlap"), CASES)
def test_no_step_asks_for_what_was_found(family: str, drafter: str, overlap: str) -> None:
    """Whoever proposes, in every family: and the tokens are those of a run without drafts."""
    config, weights = model_of(family, drafter)
    settings = replace(CONFIG, drafts=0 if drafter == "none" else 3, overlap=overlap)
    if drafter != "none":
        settings = replace(settings, drafter=drafter)
    sampling = list(MIXED)
    with LLMEngine(config, CONFIG, device=SteppedCpuDevice(), weights=weights) as engine:
        true = engine.generate(PROMPTS, sampling)
        references = {
            f"generate-{n}": np.concatenate((out.prompt_token_ids, out.token_ids))
            for n, out in enumerate(true)
        }
        stop = int(true[0].token_ids[3])
        sampling[0] = replace(sampling[0], stop_token_id=stop)
        true[0] = engine.generate(PROMPTS[:1], sampling[:1])[0]
    silent, num_drafts = SilentDevice(), 0
    by = drafter_of(drafter, references)
    with LLMEngine(config, settings, device=silent, weights=weights, drafter=by) as engine:
        collect = engine.collect

        def counted():
            nonlocal num_drafts
            output = collect()
            if output.stats.drafts is not None:
                num_drafts += sum(output.stats.drafts.proposed)
            return output

        engine.collect = counted
        found = engine.generate(PROMPTS, sampling)
    for one, other in zip(true, found, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-3)
    assert (num_drafts > 0) == (drafter != "none")


@pytest.mark.parametrize("drafts", [0, 2])
def test_tags_are_made_of_tokens_so_the_host_asks_for_them(drafts: int) -> None:
    """And a runner of one's own knows plans alone."""
    config, weights = model("qwen3")
    settings = replace(CONFIG, overlap="on", drafts=drafts, checks="tags")
    with (
        LLMEngine(config, settings, device=SilentDevice(), weights=weights) as engine,
        pytest.raises(Exception, match="waits for its own result"),
    ):
        engine.generate([[1, 2, 3]], SamplingParams(4))


@pytest.mark.parametrize("checks", ["off", "order+conservation"])
def test_what_ran_is_known_where_a_checker_asks(checks: str) -> None:
    """Plans stay as they were made; without drafts no draft is counted."""
    config, weights = model("qwen3")
    settings = replace(CONFIG, overlap="on", checks=checks)
    with LLMEngine(config, settings, device=SteppedCpuDevice(), weights=weights) as engine:
        for number in range(3):
            engine.add_request(f"r{number}", np.arange(1, 4 + number), SamplingParams(8))
        num_open = 0
        while engine.submit_all():
            step = engine._in_flight[0]
            assert step.plan.ahead is not None
            is_open, planned = step.plan.ahead.is_open, step.plan.token_ids.copy()
            output = engine.collect()
            assert output.stats.drafts is None
            assert not engine.scheduler.seqs.num_proposed_drafts.any()
            assert (step.plan.token_ids == planned).all()
            assert (planned == PLACEHOLDER).sum() == is_open.sum()
            ran = step.flight.plan.token_ids
            assert (PLACEHOLDER in ran) == (checks == "off" and is_open.any())
            num_open += int(is_open.sum())
        assert num_open > 10


@pytest.mark.cuda
@pytest.mark.parametrize(("family", "drafter", "overlap"), [c for c in CASES if c[2] == "2"])
def test_no_submit_waits_for_the_gpu(family: str, drafter: str, overlap: str) -> None:
    """torch raises where the host would wait for what is queued: the host runs ahead.

    In steps that only decode, of more tokens than go to all experts, and where a request begins.
    """
    config = replace(model_of(family, drafter)[0], dtype="bfloat16")
    if family != "qwen3":
        config = replace(config, cache="bf16")
    settings = replace(CONFIG, drafts=0 if drafter == "none" else 3, overlap=overlap)
    settings = replace(settings, max_num_seqs=12, num_blocks=257)
    if drafter != "none":
        settings = replace(settings, drafter=drafter)
    names = [f"r{n}" for n in range(11)]
    references = {name: np.tile(np.arange(40, dtype=np.int32), 2) % 50 for name in names}
    by = drafter_of(drafter, references)
    with LLMEngine(config, settings, device="cuda", drafter=by) as engine:
        for n, name in enumerate(names[:-1]):
            sampling = SamplingParams(40, temperature=0.7 * (n % 2), seed=n)
            engine.add_request(name, PROMPTS[n % 4], sampling)
        for _ in range(6):
            engine.step()
        for number in range(8):
            if number == 3:
                engine.add_request(names[-1], PROMPTS[0], SamplingParams(20))
            torch.cuda.set_sync_debug_mode("error")
            try:
                assert engine.submit_all()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            engine.collect()
