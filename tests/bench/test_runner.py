"""One round with the real engine: records, forks, aborts, refusals, arrivals, right answers."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bench.catalog import find_workload
from bench.runner import RoundResult, Target
from bench.samples import RequestRecord
from bench.schema import Workload
from bench.spec import Flags, load_workload, resolve
from deepinfer.errors import UserError
from deepinfer.names import FREE_ORDERS, RELEASE_POLICIES, UNSAFE_POLICIES
from tests.bench.tiny import (
    AZURE_ROWS,
    MOONCAKE_ROWS,
    PLAIN,
    load_profile_tiny,
    requests_of,
    run_round,
    tiny,
    verdicts,
    workload,
)

FORK = {"children": 3, "output_tokens": 10}
PARENT = {"count": 1, "prompt_tokens": 40, "output_tokens": 9}
TOO_LONG = {"count": 1, "prompt_tokens": 5000, "output_tokens": 4}
SCALES = {  # a scale where lengths of the whole size would not fit, or would take long
    "fork-batch": None,
    "fork-prompt": None,
    "long-chunked-prompt": 0.4,
    "mixed-chat": 0.25,
    "preemption-pressure": None,
    "restore-storm": None,
    "multi-turn": None,
    "shared-system-prompt": None,
}


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """cpu-tiny, shared by the tests: rounds have engines of their own."""
    opened = Target(tiny(workload(PLAIN)))
    yield opened
    opened.close()


def check_records(result: RoundResult, num_blocks: int) -> None:
    """What holds for the records of every round."""
    for request in result.requests:
        times = request.token_times_s
        assert len(times) == request.num_output_tokens
        assert all(before <= after for before, after in pairwise(times))
        assert request.finish_reason in ("length", "abort", "never", "forked")
        assert (request.first_scheduled_s is None) == (request.finish_reason == "never")
        if times:
            started_s = request.first_scheduled_s
            assert started_s is not None
            assert request.arrival_s <= started_s <= times[0]
            emission = result.emissions[request.request_id]
            assert emission.num_prompt == request.num_prompt_tokens
            assert len(emission.token_ids) == emission.num_prompt + len(times)
            assert len(emission.logprobs) == len(times)
    with_tokens = {request.request_id for request in result.requests if request.token_times_s}
    assert result.emissions.keys() == with_tokens
    assert [step.step for step in result.steps] == list(range(1, len(result.steps) + 1))
    for step in result.steps:
        assert step.blocks_free + step.blocks_held + step.blocks_withheld + 1 == num_blocks
        assert step.num_tokens > 0
    counted = result.round
    assert counted.counters["num_steps"] == len(result.steps)
    assert counted.counters["num_block_copies"] == sum(step.num_copies for step in result.steps)
    assert counted.num_output_tokens == sum(len(r.token_times_s) for r in result.requests)
    assert counted.num_prompt_tokens == sum(r.num_prompt_tokens for r in result.requests)


def reasons(result: RoundResult) -> Counter[str]:
    """How many requests ended how."""
    return Counter(request.finish_reason for request in result.requests)


def counter(result: RoundResult, name: str) -> float:
    """A counter of the round, which must have been counted."""
    value = result.round.counters[name]
    assert value is not None
    return value


def test_plain_requests_get_all_their_tokens(target: Target) -> None:
    """Each request is recorded once, with the tokens it asked for, and no block is lost."""
    resolved = tiny(workload(PLAIN, {**PLAIN, "count": 2, "prompt_tokens": 300}))
    result = run_round(resolved, target)
    check_records(result, resolved.engine.num_blocks)
    assert [r.request_id for r in result.requests] == [r.request_id for r in requests_of(resolved)]
    assert {request.num_output_tokens for request in result.requests} == {12}
    assert reasons(result) == {"length": 6}
    computed = sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in result.requests)
    assert sum(step.num_tokens for step in result.steps) == computed


def test_decode_path_fork_replaces_the_parent(target: Target) -> None:
    """Children go on from all the parent has, each its own way; the parent ends as `forked`."""
    resolved = tiny(workload({**PARENT, "fork": {**FORK, "after_tokens": 2}}))
    result = run_round(resolved, target)
    check_records(result, resolved.engine.num_blocks)
    assert reasons(result) == {"forked": 1, "length": 3}
    parent, *children = result.requests
    assert parent.num_output_tokens == 2
    history = result.emissions[parent.request_id].token_ids
    outputs = []
    for child in children:
        tokens = result.emissions[child.request_id].token_ids
        assert child.request_id.startswith(f"{parent.request_id}.")
        assert child.num_prompt_tokens == 42
        assert tokens[:42] == history
        outputs.append(tuple(tokens[42:]))
    assert len(set(outputs)) == 3
    assert result.round.counters["num_block_copies"] == 3
    assert not any(verdict.wrong for verdict in verdicts(resolved, target, result).values())


def test_prompt_path_fork_shares_the_prefix_alone(target: Target) -> None:
    """A child reads the parent's prompt and then tokens of its own, not the parent's output."""
    resolved = tiny(workload({**PARENT, "fork": {**FORK, "own_prompt_tokens": 7}}))
    (parent,) = requests_of(resolved)
    result = run_round(resolved, target)
    check_records(result, resolved.engine.num_blocks)
    assert parent.fork is not None
    for child in parent.fork.children:
        emission = result.emissions[child.request_id]
        prompt = [*parent.prompt_token_ids.tolist(), *child.own_prompt_token_ids.tolist()]
        assert emission.num_prompt == 47
        assert emission.token_ids[:47] == prompt
    assert not any(verdict.wrong for verdict in verdicts(resolved, target, result).values())


@pytest.mark.parametrize("own", [0, 7])
def test_a_kept_parent_goes_on_beside_its_children(target: Target, own: int) -> None:
    """With keep_parent the parent gets all its tokens, and they are what it gets alone."""
    fork = {**FORK, "own_prompt_tokens": own, "keep_parent": True}
    resolved = tiny(workload({**PARENT, "fork": fork}))
    result = run_round(resolved, target)
    check_records(result, resolved.engine.num_blocks)
    assert reasons(result) == {"length": 4}
    (spec,) = requests_of(resolved)
    alone = run_round(resolved, target, [dataclasses.replace(spec, fork=None)])
    name = spec.request_id
    assert result.emissions[name].token_ids == alone.emissions[name].token_ids


def test_clients_that_leave_keep_the_tokens_they_had(target: Target) -> None:
    """An abort comes while a step is in flight, whose token nobody gets; others do not notice."""
    abort = {"fraction": 0.5, "after_tokens": {"uniform": [1, 9]}}
    resolved = tiny(workload({**PLAIN, "count": 12, "abort": abort}))
    specs = requests_of(resolved)
    result = run_round(resolved, target)
    check_records(result, resolved.engine.num_blocks)
    expected = {s.request_id: s.abort_after_tokens or s.max_tokens for s in specs}
    assert {r.request_id: r.num_output_tokens for r in result.requests} == expected
    num_leaving = sum(spec.abort_after_tokens is not None for spec in specs)
    assert 0 < num_leaving < 12
    assert reasons(result) == {"abort": num_leaving, "length": 12 - num_leaving}
    assert result.round.counters["num_aborted"] == num_leaving
    stay = run_round(
        resolved, target, [dataclasses.replace(spec, abort_after_tokens=None) for spec in specs]
    )
    for request_id, emission in result.emissions.items():
        whole = stay.emissions[request_id].token_ids
        assert emission.token_ids == whole[: len(emission.token_ids)]


def test_a_request_that_can_never_fit_is_reported_while_the_rest_run(target: Target) -> None:
    """NEVER is a record without tokens, ahead of others or behind them."""
    first = dict(TOO_LONG)
    last = {**TOO_LONG, "arrival": {"at_s": 0.2}}
    resolved = tiny(workload(first, PLAIN, last))
    result = run_round(resolved, target)
    check_records(result, resolved.engine.num_blocks)
    assert reasons(result) == {"never": 2, "length": 4}
    assert result.round.counters["num_never"] == 2


def test_nothing_but_refusals_is_a_round_without_steps(target: Target) -> None:
    """If no request can ever fit, the round ends at once and says so of each."""
    result = run_round(tiny(workload({**TOO_LONG, "count": 3})), target)
    assert reasons(result) == {"never": 3}
    assert result.steps == []
    assert (result.round.wall_s, result.round.num_output_tokens) == (0, 0)


def test_a_child_that_can_never_fit_is_reported(target: Target) -> None:
    """A fork whose own prompt is too long is refused like any request; its parent still ends."""
    fork = {**FORK, "own_prompt_tokens": 5000}
    result = run_round(tiny(workload({**PARENT, "fork": fork})), target)
    assert reasons(result) == {"forked": 1, "never": 3}


def test_the_engine_waits_for_who_comes_later(target: Target) -> None:
    """A request is not started before its arrival, and no step runs while nobody is there."""
    for at_s in (0.3, 3.0, 30.0):  # a busy machine may need longer for the first request
        late = {**PLAIN, "count": 1, "arrival": {"at_s": at_s}}
        result = run_round(tiny(workload({**PLAIN, "count": 1}, late)), target)
        early_record, late_record = result.requests
        assert late_record.arrival_s == at_s
        assert late_record.first_scheduled_s is not None
        assert late_record.first_scheduled_s >= at_s
        if early_record.token_times_s[-1] < at_s:
            break
    assert early_record.token_times_s[-1] < at_s
    assert len(result.steps) == 24
    assert result.round.wall_s == late_record.token_times_s[-1]


def test_a_round_leaves_nothing_for_the_next(target: Target) -> None:
    """The same requests give the same tokens again, and a full pool at the start."""
    resolved = tiny(workload({**PLAIN, "temperature": 1.0}))
    first, second = (run_round(resolved, target) for _ in range(2))
    assert first.emissions == second.emissions
    assert first.steps[0].blocks_free == second.steps[0].blocks_free


CHOICES = [
    *((release, "reverse") for release in RELEASE_POLICIES if release not in UNSAFE_POLICIES),
    *(("polled", order) for order in FREE_ORDERS if order != "reverse"),
]


@pytest.fixture(scope="module")
def crowded() -> Workload:
    """Forks, samples and a pool that is too small, so that every path of a block is taken."""
    return workload(
        {**PARENT, "count": 2, "fork": {**FORK, "children": 6, "keep_parent": True}},
        {**PLAIN, "count": 10, "output_tokens": 40, "temperature": 0.8},
        engine={"num_blocks": 33, "block_size": 16},
    )


@pytest.fixture(scope="module")
def expected_tokens(target: Target, crowded: Workload) -> dict[str, list[int]]:
    """Tokens of the crowded workload in a pool where nobody waits."""
    result = run_round(tiny(crowded, num_blocks=257), target)
    assert result.round.counters["num_preemptions"] == 0
    return {name: list(emission.token_ids) for name, emission in result.emissions.items()}


@pytest.mark.parametrize(("release", "free_order"), CHOICES)
def test_tokens_do_not_depend_on_the_choices(
    target: Target,
    crowded: Workload,
    expected_tokens: dict[str, list[int]],
    release: str,
    free_order: str,
) -> None:
    """Preempted, forked or early, in any order: a request's tokens are the ones it gets at ease."""
    resolved = tiny(crowded, release=release, free_order=free_order)
    result = run_round(resolved, target)
    check_records(result, resolved.engine.num_blocks)
    assert counter(result, "num_preemptions") > 0
    tokens = {name: list(emission.token_ids) for name, emission in result.emissions.items()}
    assert tokens == expected_tokens


@pytest.mark.parametrize("name", SCALES)
def test_every_workload_runs_right_and_says_many_things(target: Target, name: str) -> None:
    """The workloads of the toolkit: no wrong request, and no token above a tenth of the output."""
    flags = Flags(scale_lengths=SCALES[name])
    resolved = resolve(load_profile_tiny(), load_workload(find_workload(name)), flags)
    result = run_round(resolved, target)
    check_records(result, resolved.engine.num_blocks)
    assert "never" not in reasons(result)
    found = verdicts(resolved, target, result)
    assert [request_id for request_id, verdict in found.items() if verdict.wrong] == []
    outputs = [np.asarray(e.token_ids[e.num_prompt :]) for e in result.emissions.values()]
    counts = np.bincount(np.concatenate(outputs))
    assert counts.sum() >= 200
    assert counts.max() <= 0.1 * counts.sum()
    if name == "preemption-pressure":
        assert counter(result, "num_preemptions") > 0
    if name.startswith("fork"):
        assert counter(result, "num_block_copies") > 0


@pytest.mark.parametrize(
    ("name", "rows"),
    [("azure-code", AZURE_ROWS), ("azure-conv", AZURE_ROWS), ("mooncake", MOONCAKE_ROWS)],
)
def test_every_trace_workload_replays_a_trace(
    target: Target, tmp_path: Path, name: str, rows: tuple[str, ...]
) -> None:
    """Recorded arrivals are kept, and the answers are right."""
    path = tmp_path / "trace"
    path.write_text("\n".join(rows))
    flags = Flags(trace_path=str(path), scale_lengths=0.1)
    resolved = resolve(load_profile_tiny(), load_workload(find_workload(name)), flags)
    result = run_round(resolved, target)
    check_records(result, resolved.engine.num_blocks)
    assert reasons(result) == {"length": 3}
    arrivals = (0.0, 0.052, 0.09814) if name.startswith("azure") else (0.0, 0.09, 0.09)
    assert tuple(request.arrival_s for request in result.requests) == pytest.approx(arrivals)
    assert not any(verdict.wrong for verdict in verdicts(resolved, target, result).values())


def test_weights_that_cannot_be_loaded_leave_no_device_open(tmp_path: Path) -> None:
    """A folder without weights is the user's error, and the device's threads are gone."""
    before = threading.active_count()
    resolved = tiny(workload(PLAIN))
    broken = dataclasses.replace(resolved.model, path=tmp_path)
    with pytest.raises(UserError):
        Target(dataclasses.replace(resolved, model=broken))
    assert threading.active_count() == before


TALK = {"count": 3, "prompt_tokens": 5, "think_s": 0.05}


def by_id(result: RoundResult) -> dict[str, RequestRecord]:
    """The records of a round's requests."""
    return {record.request_id: record for record in result.requests}


def test_a_conversation_comes_back_with_all_that_was_said(target: Target) -> None:
    """A turn is a request of its own, so long after the answer as its client thinks."""
    resolved = tiny(workload({**PLAIN, "count": 2, "temperature": 0.8, "turns": TALK}))
    result = run_round(resolved, target)
    check_records(result, resolved.engine.num_blocks)
    assert reasons(result) == {"length": 6}
    found = by_id(result)
    for number in range(2):
        turns = [f"r0-0-{number}", f"r0-0-{number}-1", f"r0-0-{number}-2"]
        assert [found[name].num_prompt_tokens for name in turns] == [40, 57, 74]
        for before, after in pairwise(turns):
            said = list(result.emissions[before].token_ids)
            assert list(result.emissions[after].token_ids[: len(said)]) == said
            waited_s = found[after].arrival_s - found[before].token_times_s[-1]
            assert waited_s == pytest.approx(TALK["think_s"])
    assert not any(verdict.wrong for verdict in verdicts(resolved, target, result).values())


def test_who_gives_up_or_does_not_fit_does_not_come_back(target: Target) -> None:
    """The conversation ends there; the others go on."""
    leaves = {**PLAIN, "count": 1, "abort": {"fraction": 1.0, "after_tokens": 2}, "turns": TALK}
    grows = {**PLAIN, "count": 1, "turns": {"count": 3, "prompt_tokens": 4080}}
    resolved = tiny(workload(leaves, grows, {**PLAIN, "count": 1, "turns": TALK}))
    result = run_round(resolved, target)
    check_records(result, resolved.engine.num_blocks)
    assert {name: record.finish_reason for name, record in by_id(result).items()} == {
        "r0-0-0": "abort",
        "r0-1-0": "length",
        "r0-1-0-1": "never",
        "r0-2-0": "length",
        "r0-2-0-1": "length",
        "r0-2-0-2": "length",
    }


def test_a_phase_begins_when_the_one_before_is_over(target: Target) -> None:
    """Its forks and later turns included; then its own arrivals count. Nobody is left behind."""
    resolved = tiny(
        workload(
            {**PARENT, "fork": FORK},
            {**PLAIN, "count": 1, "turns": TALK, "name": "talk"},
            {**PLAIN, "count": 2, "phase": 2, "prompts_of": "talk", "prompt_tokens": 3},
            {**TOO_LONG, "phase": 3},
            {**PLAIN, "count": 1, "phase": 4, "arrival": {"at_s": 0.1}},
        )
    )
    result = run_round(resolved, target)
    check_records(result, resolved.engine.num_blocks)
    ends: dict[int, list[float]] = {1: [], 2: [], 4: []}
    arrivals: dict[int, list[float]] = {1: [], 2: [], 3: [], 4: []}
    for name, record in by_id(result).items():
        phase = {"0": 1, "1": 1, "2": 2, "3": 3, "4": 4}[name.split("-")[1]]
        arrivals[phase].append(record.arrival_s)
        if record.token_times_s:
            ends[phase].append(record.token_times_s[-1])
    assert len(ends[1]) == 4 + 3
    assert max(ends[1]) <= min(arrivals[2])
    assert max(ends[2]) <= min(arrivals[3])
    assert min(arrivals[4]) >= max(ends[2]) + 0.1
    prompt = list(result.emissions["r0-1-0"].token_ids[:40])
    assert list(result.emissions["r0-2-1"].token_ids[:40]) == prompt
    assert not any(verdict.wrong for verdict in verdicts(resolved, target, result).values())


def test_planted_delays_change_times_and_no_token(target: Target) -> None:
    """The copies are 60 ms late, on a device that other cells share without the delay."""
    fork = workload({**PARENT, "fork": FORK})
    plain, late = (tiny(fork.model_copy(update={"delay": d})) for d in ("none", "copy=60ms"))
    assert target.device_of(plain) is target.device
    assert target.device_of(late) is target.device_of(late) is not target.device
    slow, quick = run_round(late, target), run_round(plain, target)
    assert slow.round.wall_s >= 0.06
    assert quick.round.wall_s < slow.round.wall_s
    assert {name: list(e.token_ids) for name, e in slow.emissions.items()} == {
        name: list(e.token_ids) for name, e in quick.emissions.items()
    }
