"""Rows kept beyond the pool, through the toolkit: the same tokens, and what it cost and brought."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from bench.catalog import find_profile, find_workload
from bench.runner import RoundResult, Target
from bench.spec import Flags, Resolved, load_profile, load_workload, resolve
from tests.bench.tiny import requests_of, run_round, verdicts

PROFILES = ("cpu-tiny", "cpu-v41-tiny")
GIB = 1 << 30


def shipped(name: str, profile: str, **engine: object) -> Resolved:
    """One cell of a workload; shorter where the model is slow."""
    work = load_workload(find_workload(name))
    scale = 0.4 if profile == "cpu-v41-tiny" else None
    flags = Flags(engine=dict(engine), scale_lengths=scale)
    return resolve(load_profile(find_profile(profile)), work, flags)


@pytest.fixture(scope="module", params=PROFILES)
def target(request: pytest.FixtureRequest) -> Iterator[tuple[str, Target]]:
    """A profile's name, and its device and weights."""
    opened = Target(shipped("multi-turn", request.param))
    yield request.param, opened
    opened.close()


def tokens_of(result: RoundResult) -> dict[str, list[int]]:
    """What each request was given and said."""
    return {name: list(emission.token_ids) for name, emission in result.emissions.items()}


@pytest.mark.parametrize("name", ["multi-turn", "shared-system-prompt"])
def test_a_store_changes_no_token_and_spares_prompts(target: tuple[str, Target], name: str) -> None:
    """With a store, with blocks found by what they hold, with both, and with neither."""
    profile, opened = target
    plain = shipped(name, profile, store_bytes=0, prefix_cache=False)
    requests = requests_of(plain)
    expected = run_round(plain, opened, requests)
    assert not any(verdict.wrong for verdict in verdicts(plain, opened, expected).values())
    assert "num_loads" not in expected.round.counters
    for settings in ({"store_bytes": GIB}, {"store_bytes": GIB, "prefix_cache": True}):
        result = run_round(plain.with_engine(**settings), opened, requests)
        assert not result.problems
        assert tokens_of(result) == tokens_of(expected), settings
        counters = result.round.counters
        assert counters["bytes_saved"] > 0
        assert counters["num_loaded_tokens"] or counters["num_hit_blocks"]
        assert counters["transfer_ms"] >= counters["transfer_beside_steps_ms"] >= 0


def test_early_release_is_found_wrong_where_rows_come_back_on_a_stream_of_their_own() -> None:
    """By tags or by happens-before; with loads behind the forward passes, nothing is."""
    found = {}
    for stream in ("load", "compute"):
        cell = shipped(
            "restore-storm", "cpu-tiny", release="early", load_stream=stream, checks="all"
        )
        work = cell.workload.model_copy(update={"delay": "copy=2ms"})
        cell = dataclasses.replace(cell, workload=work)
        opened = Target(cell)
        try:
            found[stream] = sum(
                run_round(cell, opened).round.counters[name] or 0
                for name in ("wrong_rows", "hazards")
            )
        finally:
            opened.close()
    assert found["load"] > 0
    assert found["compute"] == 0
