"""A store changes no token: all pairs of what saves and loads meet, or the whole product.

`DEEPINFER_FULL_PRODUCT=1` runs every combination instead of a pairwise covering array. Each run is
held, token for token, against an engine without a store, and watched by all checkers.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from itertools import cycle, product

import pytest

from deepinfer.block_manager import Verdict
from deepinfer.names import FREE_ORDERS, LOAD_STREAMS, OVERLAPS, RELEASE_POLICIES
from tests.deepinfer.ahead.covering import pairwise
from tests.deepinfer.ahead.scenes import (
    CONFIG,
    FAMILIES,
    Stage,
    describe,
    prompt_of,
    sampled,
)

AXES = {
    "family": list(FAMILIES),
    "overlap": list(OVERLAPS),
    "drafts": [0, 3],
    "budget": [6, 40],  # chunks, and fewer tokens than rows and drafts; whole prompts
    "forks": [False, True],
    "preemption": [False, True],
    "release": [name for name in RELEASE_POLICIES if name != "early"],
    "order": list(FREE_ORDERS),
    "stream": list(LOAD_STREAMS),
    "cache": [False, True],
    "entries": [3, 1000],  # room in the store for so many of the smallest
}
DEVICES = ("cpu", "cpu-stepped")
FULL = bool(os.environ.get("DEEPINFER_FULL_PRODUCT"))
TURNS = ((0, 21), (1, 12), (2, 30), (0, 26), (1, 12), (2, 9), (0, 30), (3, 16), (1, 25), (2, 30))
SEEN: Counter[str] = Counter()


def rows() -> list[dict]:
    """The combinations to run; of the whole product each on one of the devices, in turn."""
    if not FULL:
        return pairwise(AXES | {"device": DEVICES})
    every = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
    return [row | {"device": device} for row, device in zip(every, cycle(DEVICES), strict=False)]


def play(stage: Stage, *, forks: bool) -> None:
    """Prompts that were there before come again, longer or shorter, while others run."""
    for number, (seed, size) in enumerate(TURNS):
        if number % 3 == 1:
            stage.submit_all()
        assert stage.add(f"r{number}", prompt_of(seed, size), sampled(number, 9)) is not (
            Verdict.NEVER
        )
        if forks and number >= 3 and stage.running:
            parent = stage.running[number % len(stage.running)]
            shared = None if number % 2 else max(1, len(stage.known(parent)) - 2)
            stage.fork(parent, f"f{number}", sampled(number + 1, 6), (), shared)
        for _ in range(1 + 6 * (number % 4 == 3)):
            stage.step()
    stage.finish()


@pytest.mark.parametrize("row", rows(), ids=describe)
def test_tokens_are_those_of_a_run_without_a_store(row):
    """All requests; and nothing is left behind, in the pools or in the store."""
    config = replace(
        CONFIG,
        overlap=row["overlap"],
        drafts=row["drafts"],
        release=row["release"],
        free_order=row["order"],
        max_num_batched_tokens=row["budget"],
        num_blocks=14 if row["preemption"] else CONFIG.num_blocks,
        prefix_cache=row["cache"],
        load_stream=row["stream"],
        store_bytes=row["entries"] * 3000,
    )
    with Stage(row["family"], config, 0.7, row["device"]) as stage:
        play(stage, forks=row["forks"])
        assert stage.ended.keys() == stage.requests.keys()
        store, transfers = stage.engine.store, stage.engine.transfers
        counters = stage.engine.scheduler.store_reuse.counters
        SEEN.update(
            loads=counters.num_loads,
            tokens=counters.num_loaded_tokens,
            saves=transfers.counters.num_saves,
            refused=transfers.counters.num_refused_saves,
            evicted=store.host.counters.num_evictions,
            hits=stage.engine.scheduler.counters.num_hit_blocks,
            preemptions=stage.engine.scheduler.counters.num_preemptions,
        )


def test_the_runs_above_had_what_they_are_about():
    """Loads, saves, refusals, evictions, hits and preemptions."""
    if len(SEEN) == 0:
        pytest.skip("none was run")
    print(f"\n{dict(SEEN)}")
    assert all(SEEN.values())
