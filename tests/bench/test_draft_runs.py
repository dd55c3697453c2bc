"""Drafts and overlap through the toolkit: the same tokens, whatever was planned ahead."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from bench.catalog import find_profile, find_workload
from bench.matrix import Matrix
from bench.runner import RoundResult, Target
from bench.samples import FORKED, SampleWriter, read_samples
from bench.spec import Flags, Resolved, load_profile, load_workload, resolve
from tests.bench.tiny import cells_of, requests_of, run_round, silent, tiny, verdicts, workload

WORKLOADS = ("draft-storm", "draft-ngram", "decode-overlap")
PROFILES = ("cpu-tiny", "cpu-v41-tiny")
PLAIN = {"count": 3, "prompt_tokens": {"uniform": [13, 17]}, "output_tokens": 14}
FORK = {"children": 2, "output_tokens": 6, "after_tokens": 3}


@functools.cache
def shipped(name: str, profile: str) -> Resolved:
    """A plain cell of a workload; shorter where the model is slow, and blocks are small."""
    work = load_workload(find_workload(name))
    scale = 0.3 if profile == "cpu-v41-tiny" else None
    flags = Flags(engine={"drafts": 0, "overlap": "off"}, scale_lengths=scale)
    return resolve(load_profile(find_profile(profile)), work, flags)


@pytest.fixture(scope="module", params=PROFILES)
def shipped_target(request: pytest.FixtureRequest) -> Iterator[tuple[str, Target]]:
    """A profile's name, and its device and weights."""
    opened = Target(shipped("draft-storm", request.param))
    yield request.param, opened
    opened.close()


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """cpu-tiny."""
    opened = Target(tiny(workload(PLAIN)))
    yield opened
    opened.close()


def tokens_of(result: RoundResult) -> dict[str, list[int]]:
    """What each request was given and said."""
    return {name: list(emission.token_ids) for name, emission in result.emissions.items()}


@pytest.mark.parametrize("name", WORKLOADS)
def test_what_is_planned_ahead_changes_no_token(
    shipped_target: tuple[str, Target], name: str
) -> None:
    """Each shipped workload, planned ahead by nothing, a step, two, with its drafts and without."""
    profile, target = shipped_target
    plain = shipped(name, profile)
    requests = requests_of(plain)
    expected = run_round(plain, target, requests)
    assert not any(verdict.wrong for verdict in verdicts(plain, target, expected).values())
    drafter = "ngram" if name == "draft-ngram" else "replay"
    acceptance = {"acceptance": [0.9, 0.5]} if name == "decode-overlap" else {}
    work = plain.workload.model_copy(update=acceptance)
    for overlap, drafts in (("off", 5), ("on", 0), ("on", 3), ("2", 5)):
        cell = plain.with_engine(overlap=overlap, drafts=drafts, drafter=drafter)
        cell = dataclasses.replace(cell, workload=work)
        result = run_round(cell, target, requests)
        assert not result.problems
        assert tokens_of(result) == tokens_of(expected), (overlap, drafts)
        assert bool(result.round.counters["num_drafts_proposed"]) == bool(drafts)


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize(("acceptance", "accepted"), [("all-reject", 0.0), ("all-accept", 1.0)])
def test_replayed_drafts_are_accepted_as_asked(
    target: Target, acceptance: str, accepted: float, overlap: str
) -> None:
    """All or none, counted by step and by round, and no request is wrong."""
    resolved = tiny(
        workload(PLAIN, acceptance=acceptance), drafts=3, drafter="replay", overlap=overlap
    )
    result = run_round(resolved, target)
    assert not any(verdict.wrong for verdict in verdicts(resolved, target, result).values())
    counters, steps = result.round.counters, result.steps
    assert counters["num_drafts_proposed"] > 0
    assert counters["num_drafts_accepted"] == accepted * counters["num_drafts_proposed"]
    assert sum(map(sum, (s.drafts_proposed for s in steps))) == counters["num_drafts_proposed"]
    if acceptance == "all-reject":
        assert max(step.blocks_for_drafts or 0 for step in steps) > 0
    if (acceptance, overlap) == ("all-reject", "off"):
        assert counters["num_blocks_shrunk"] > 0


def test_tokens_that_came_together_have_one_time(target: Target) -> None:
    """A delivery: the first token alone, then four at a time."""
    work = workload({**PLAIN, "count": 1}, acceptance=1)
    result = run_round(tiny(work, drafts=3, drafter="replay"), target)
    (request,) = result.requests
    times = list(dict.fromkeys(request.token_times_s))
    assert [request.token_times_s.count(t) for t in times] == [1, 4, 4, 4, 1]


@pytest.mark.parametrize(
    ("overlap", "keep_parent", "output_tokens"), list(product(("off", "2"), (False, True), (4, 9)))
)
def test_a_child_knows_no_token_that_came_with_the_last_it_is_to_know(
    target: Target, overlap: str, keep_parent: bool, output_tokens: int
) -> None:
    """A step may bring its parent tokens beyond the fork, the very last among them."""
    fork = {**FORK, "keep_parent": keep_parent}
    group = {"count": 2, "prompt_tokens": 20, "output_tokens": output_tokens, "fork": fork}
    work = workload(group, acceptance=1)
    requests = requests_of(tiny(work))
    expected = tokens_of(run_round(tiny(work), target, requests))
    ahead = tiny(work, drafts=5, drafter="replay", overlap=overlap, checks="all")
    result = run_round(ahead, target, requests)
    assert not result.problems
    found = tokens_of(result)
    assert found.keys() == expected.keys()
    for name, tokens in found.items():
        shorter = min(len(tokens), len(expected[name]))  # a replaced parent may have said more
        assert tokens[:shorter] == expected[name][:shorter]
    assert all(len(found[name]) == 29 for name in found if "." in name)
    reasons = {record.request_id: record.finish_reason for record in result.requests}
    parent = "length" if keep_parent else FORKED
    assert [reasons[spec.request_id] for spec in requests] == [parent] * 2


def test_clients_leave_behind_the_token_they_wait_for(target: Target) -> None:
    """With several tokens a step the one that makes a client leave need not be the step's last."""
    abort = {"fraction": 1.0, "after_tokens": 4}
    work = workload({**PLAIN, "output_tokens": 40, "abort": abort}, acceptance=1)
    for overlap in ("off", "on"):
        resolved = tiny(work, drafts=5, drafter="replay", overlap=overlap)
        result = run_round(resolved, target)
        assert {record.finish_reason for record in result.requests} == {"abort"}
        assert not any(verdict.wrong for verdict in verdicts(resolved, target, result).values())


def test_a_comparison_of_drafts_runs_warm_up_and_all(tmp_path: Path) -> None:
    """References of both kinds of round; a file of it reads back with what was counted."""
    cells = cells_of(
        workload(PLAIN), "drafter=replay", "drafts=0,2", "overlap=off,on", "acceptance=0,0.5"
    )
    with (
        Matrix(cells, rounds=1, axes={}, progress=silent) as matrix,
        SampleWriter(tmp_path / "run") as writer,
    ):
        assert matrix.run(writer)
    samples = read_samples(tmp_path / "run")
    assert not samples.failures
    assert all(verdict.wrong_requests == 0 for verdict in samples.verifications)
    drafting = [r.cell for r in samples.rounds if r.counters["num_drafts_proposed"]]
    assert set(drafting) == {4, 5, 6, 7}
    assert any(step.drafts_proposed for step in samples.steps if step.round < 0)
