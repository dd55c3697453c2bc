"""Hybrid models through the whole toolkit: every workload, every safe policy, every token right."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from bench.arrivals import RequestSpec
from bench.catalog import find_profile, find_workload
from bench.power import CLEAN, FAULTS_WITH_STATE, measure_power
from bench.probes.memory import profile_memory, waterfall
from bench.runner import RoundResult, Target
from bench.spec import Flags, Resolved, load_profile, load_workload, resolve
from deepinfer.models.hybrid.layer_plan import v4_config
from deepinfer.names import RELEASE_POLICIES, UNSAFE_POLICIES
from tests.bench.tiny import requests_of, run_round, silent, verdicts, workload
from tests.hybrid_configs import v4_raw

SAFE = [name for name in RELEASE_POLICIES if name not in UNSAFE_POLICIES]
SCALES = {
    "fork-batch": 0.1,
    "fork-prompt": 0.1,
    "long-chunked-prompt": 0.05,
    "mixed-chat": 0.1,
    "preemption-pressure": None,  # scaled down there would be none
    "restore-storm": 0.5,
    "multi-turn": 0.1,
    "shared-system-prompt": 0.2,
}


def tiny_v41(name: str, **engine: str) -> Resolved:
    """A workload of the catalogue on cpu-v41-tiny, shortened."""
    flags = Flags(scale_lengths=SCALES[name], engine=engine)
    profile = load_profile(find_profile("cpu-v41-tiny"))
    return resolve(profile, load_workload(find_workload(name)), flags)


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """cpu-v41-tiny; rounds have engines of their own."""
    opened = Target(tiny_v41("fork-batch"))
    yield opened
    opened.close()


def run_and_prove(resolved: Resolved, target: Target) -> RoundResult:
    """A round of which every request ended as it should, with the reference's tokens."""
    result = run_round(resolved, target, at_once(resolved))
    assert not result.problems
    assert {request.finish_reason for request in result.requests} <= {"length", "abort", "forked"}
    wrong = [name for name, v in verdicts(resolved, target, result).items() if v.wrong]
    assert not wrong
    return result


def at_once(resolved: Resolved) -> list[RequestSpec]:
    """The requests, none of which waits for the clock to arrive."""
    return [dataclasses.replace(request, arrival_s=0.0) for request in requests_of(resolved)]


@pytest.mark.parametrize("release", SAFE)
@pytest.mark.parametrize("name", ["fork-batch", "fork-prompt", "long-chunked-prompt"])
def test_forks_and_chunks_give_the_reference_s_tokens(
    target: Target, name: str, release: str
) -> None:
    """Under every safe policy; forks copy slots, long prompts take several steps."""
    result = run_and_prove(tiny_v41(name, release=release), target)
    counters = result.round.counters
    assert (counters["num_state_copies"] > 0) == name.startswith("fork")
    assert max(step.num_tokens for step in result.steps) <= 256


@pytest.mark.parametrize("release", SAFE)
def test_preempted_requests_give_the_reference_s_tokens(target: Target, release: str) -> None:
    """A request that lost its blocks and its slot starts anew with whatever slot it gets."""
    result = run_and_prove(tiny_v41("preemption-pressure", release=release), target)
    assert result.round.counters["num_preemptions"] > 0


def test_chats_that_are_given_up_leave_the_others_right(target: Target) -> None:
    """Aborted while a step is in flight, sampled with temperature."""
    result = run_and_prove(tiny_v41("mixed-chat"), target)
    assert any(request.finish_reason == "abort" for request in result.requests)


@pytest.mark.parametrize("name", ["fork-batch", "preemption-pressure"])
def test_a_v4_network_gives_the_reference_s_tokens(name: str) -> None:
    """Ratios 4 and 16 over blocks of 4: some blocks hold no row of the wider ratio."""
    model = v4_config(v4_raw(ratios=(4, 16), window=8))
    resolved = dataclasses.replace(tiny_v41(name), model=model)
    target = Target(resolved)
    try:
        run_and_prove(resolved, target)
    finally:
        target.close()


def test_planted_faults_are_flagged(target: Target) -> None:
    """Of rows, blocks and slots; clean requests are not."""
    rows = {row.fault: row for row in measure_power(tiny_v41("fork-batch"), target, 24, silent)}
    assert list(rows) == [CLEAN, *FAULTS_WITH_STATE]
    assert rows.pop(CLEAN).flagged == 0
    assert all(row.flagged >= 0.9 * row.trials for row in rows.values()), rows


def test_the_state_pool_has_a_place_in_the_waterfall() -> None:
    """Its slots are free, withheld, owned or nobody's, in every step."""
    fork = {"children": 3, "output_tokens": 6, "after_tokens": 1}
    work = workload({"count": 1, "prompt_tokens": 40, "output_tokens": 2, "fork": fork})
    resolved = resolve(load_profile(find_profile("cpu-v41-tiny")), work, Flags())
    profile = profile_memory(resolved)
    assert profile.num_wrong == 0
    for sample in profile.samples:
        rows = {row.layer: row for row in waterfall(sample)}
        parts = [rows[f"{state} state slots"].size for state in ("free", "withheld", "owned")]
        pool = rows["state pool"]
        assert pool.size is not None
        assert pool.gap == pool.size - sum(part or 0 for part in parts)
        assert pool.gap == sample.state_pool // 20  # 16 requests: 19 slots, and slot 0
    assert any(sample.states_owned for sample in profile.samples)
