"""Tokens that stay on the device: each decode goes on from the newest one of its own request."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer.config import EngineConfig
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.engine import LLMEngine
from deepinfer.last_tokens import LastTokens, make_last_tokens
from deepinfer.plan import PLACEHOLDER, LookAhead, StepPlan
from deepinfer.sequence import SamplingParams
from tests.deepinfer.ahead.scenes import model as tiny_model
from tests.deepinfer.step_plans import TINY, Run, step_plan

CONFIG = EngineConfig(block_size=4, num_blocks=65, max_num_seqs=4, max_model_len=64)
NUM_SLOTS = 6


def plan_of(*runs: Run, slots: list[int], known: list[int]) -> StepPlan:
    """A plan over `runs`, of which the host knows `known` tokens each."""
    plan, num_known = step_plan(list(runs), 4), np.array(known, np.int32)
    samples = np.array([run.sampled for run in runs], np.int32)
    none = np.zeros_like(num_known)
    ahead = LookAhead(
        slots=np.array(slots, np.int32),
        is_open=plan.context_lens > num_known,
        num_known=num_known,
        num_drafts=none,
        num_unsure=none,
        num_pending=samples,
        starts=(),
    )
    return replace(plan, ahead=ahead)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_each_placeholder_becomes_the_newest_token_of_its_slot(dtype):
    """A chunk and a decode whose token is known stay as they are; order of slots is no matter."""
    last = LastTokens(NUM_SLOTS, SteppedCpuDevice(), told=True)
    table = range(1, 9)
    prompts = [Run([n] * 3, table, 0, 3, sampled=n != 2) for n in (1, 2, 3)]
    last.keep(plan_of(*prompts, slots=[5, 2, 4], known=[3, 9, 3]), torch.tensor([70, 90]).int())
    runs = [
        Run([1, 1, 1, PLACEHOLDER], table, 3, 1),
        Run([2] * 9, table, 3, 4, sampled=False),
        Run([8, 8, 8, 80], table, 3, 1),
        Run([3, 3, 3, PLACEHOLDER], table, 3, 1),
    ]
    plan = plan_of(*runs, slots=[5, 2, 1, 4], known=[3, 9, 4, 3])
    token_ids = torch.from_numpy(plan.token_ids).to(dtype)
    found = last.put_in(plan, token_ids)
    assert found.tolist() == [70, 2, 2, 2, 2, 80, 90]
    assert found.dtype == dtype
    assert plan.token_ids[0] == PLACEHOLDER, "a plan is never written"
    told = last.keep(plan, torch.tensor([71, 81, 91]).int())
    assert told is not None
    assert told.numpy().tolist() == [70, 90]


def test_nothing_is_put_into_a_complete_plan():
    """Its tokens are the step's; what it samples is kept all the same."""
    last = LastTokens(NUM_SLOTS, SteppedCpuDevice())
    plan = plan_of(Run([5, 6], range(1, 3), 0, 2), slots=[1], known=[2])
    token_ids = torch.tensor([5, 6])
    for complete in (plan, replace(plan, ahead=None)):
        assert last.put_in(complete, token_ids) is token_ids
        assert last.keep(complete, torch.tensor([7]).int()) is None


@pytest.mark.parametrize(
    ("settings", "tags", "stay"),
    [
        ({}, False, False),
        ({"overlap": "on"}, False, True),
        ({"overlap": "2"}, False, True),
        ({"overlap": "on"}, True, False),
        ({"overlap": "on", "drafts": 3}, False, False),
        ({"drafts": 3}, False, False),
    ],
)
def test_tokens_stay_on_the_device_where_nothing_else_is_open(settings, tags, stay):
    """With overlap, without drafts, and without tags that are made of them."""
    config = replace(CONFIG, **settings)
    made = make_last_tokens(config, NUM_SLOTS, SteppedCpuDevice(), tags=tags, told=False)
    assert (made is not None) == stay


class _NoReading(SteppedCpuDevice):
    """A device of which an operation cannot ask what it has computed."""

    def read(self, readback):
        raise AssertionError("the step waits for its own result")


@pytest.mark.parametrize("overlap", ["on", "2"])
def test_no_step_asks_for_what_was_sampled(overlap):
    """On CUDA asking would hold up the host at each submit; the tokens are the right ones."""
    prompts = [np.arange(1, 4 + n, dtype=np.int32) for n in range(4)]
    sampling = [SamplingParams(9, temperature=0.7 * (n % 2), seed=n) for n in range(4)]
    with LLMEngine(TINY, CONFIG, device=SteppedCpuDevice()) as engine:
        true = engine.generate(prompts, sampling)
        stop = int(true[0].token_ids[3])
        sampling[0] = replace(sampling[0], stop_token_id=stop)
        true[0] = engine.generate(prompts[:1], sampling[:1])[0]
    with LLMEngine(TINY, replace(CONFIG, overlap=overlap), device=_NoReading()) as engine:
        found = engine.generate(prompts, sampling)
    for one, other in zip(true, found, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-4)


@pytest.mark.parametrize("checks", ["off", "order+conservation"])
def test_steps_without_drafts_say_so_and_plans_stay_as_they_were_made(checks):
    """No draft is counted as verified or waiting; what ran is known where a checker asks."""
    config = replace(CONFIG, overlap="on", checks=checks)
    with LLMEngine(TINY, config, device=SteppedCpuDevice()) as engine:
        for number in range(3):
            engine.add_request(f"r{number}", np.arange(1, 4 + number), SamplingParams(8))
        num_open = 0
        while engine.submit_all():
            step = engine._in_flight[0]
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
@pytest.mark.parametrize("family", ["qwen3", "v4", "v41"])
def test_no_submit_waits_for_the_gpu(family):
    """torch raises where the host would wait for what is queued: the host runs ahead."""
    model = replace(tiny_model(family)[0], dtype="bfloat16")
    config = replace(CONFIG, overlap="2", max_num_seqs=4, max_num_batched_tokens=64)
    with LLMEngine(model, config, device="cuda") as engine:
        for number in range(4):
            engine.add_request(f"r{number}", np.arange(1, 9 + number), SamplingParams(24))
        for _ in range(6):
            engine.step()
        for _ in range(8):
            torch.cuda.set_sync_debug_mode("error")
            try:
                assert engine.submit_all()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            engine.collect()


def test_with_drafts_a_step_does_ask():
    """Where they were rejected is where the next step begins."""
    config = replace(CONFIG, overlap="on", drafts=2)
    with (
        LLMEngine(TINY, config, device=_NoReading()) as engine,
        pytest.raises(Exception, match="waits for its own result"),
    ):
        engine.generate([[1, 2, 3]], SamplingParams(4))
