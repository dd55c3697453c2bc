"""Aborts at any moment, with up to three steps in flight: no block and no slot of any kind is lost.

`DEEPINFER_ABORT_RUNS` sets how many runs there are.
"""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest

from deepinfer.config import EngineConfig
from deepinfer.drafters.acceptance import Acceptance
from deepinfer.names import (
    ADMISSIONS,
    DISCIPLINES,
    FENCES,
    LOAD_STREAMS,
    PREEMPTIONS,
    RELEASE_POLICIES,
)
from deepinfer.store import keys
from tests.deepinfer.ahead.scenes import Stage, prompt_of, sampled

RUNS = int(os.environ.get("DEEPINFER_ABORT_RUNS", "60"))
CHUNKS = 6
ACTIONS = 60
LONGEST = 25  # tokens of a request
SEEN: Counter[str] = Counter()


def stage_of(rng: np.random.Generator) -> Stage:
    """An engine of any family and setting, its pool often too small for what runs in it."""
    family = str(rng.choice(["qwen3", "v4", "v41"], p=[0.7, 0.15, 0.15]))
    size = int(rng.choice([1, 2, 4])) if family == "qwen3" else 4
    longest = -(-LONGEST // size)
    release = str(rng.choice(RELEASE_POLICIES))
    store_bytes = int(rng.choice([0, 6000, 1 << 20]))
    config = EngineConfig(
        block_size=size,
        num_blocks=longest + 1 + int(rng.integers(1 + longest // 2)),
        max_num_seqs=int(rng.integers(1, 5)),
        max_num_batched_tokens=int(rng.choice([5, 9, 30])),
        max_model_len=LONGEST,
        release=release,
        discipline=str(rng.choice(DISCIPLINES)),
        fence=str(rng.choice(FENCES)),
        admission=str(rng.choice(ADMISSIONS, p=[0.8, 0.2])),
        preemption=str(rng.choice(PREEMPTIONS)),
        overlap=str(rng.choice(["off", "on", "2", "2"])),
        drafts=int(rng.choice([0, 1, 3, 5, 5])),
        store_bytes=0 if release == "early" else store_bytes,  # which a load makes wrong
        load_stream=str(rng.choice(LOAD_STREAMS)),
        checks=str(rng.choice(["all", "order+conservation"])),
    )
    right = float(rng.choice([0, 0.3, 0.7, 1]))
    acceptance = Acceptance(((right,), (1.0 - right,)), length=2)
    return Stage(family, config, acceptance, str(rng.choice(["cpu", "cpu-stepped"])))


def act(stage: Stage, rng: np.random.Generator, number: int) -> None:
    """One of all that a caller may do now; an abort one time in seven."""
    in_flight = len(stage.plans)
    kind = rng.choice(["submit", "collect", "add", "fork", "abort"], p=[0.3, 0.25, 0.2, 0.1, 0.15])
    if kind == "submit":
        stage.submit()
    elif kind == "collect" and in_flight:
        stage.collect()
    elif kind == "add" and len(stage.live) < 8:
        text, size = int(rng.integers(3)), int(rng.integers(1, 12))
        stage.add(f"r{number}", prompt_of(text, size), sampled(text, int(rng.integers(1, 14))))
    elif kind == "fork" and stage.running and len(stage.live) < 8:
        parent = stage.running[int(rng.integers(len(stage.running)))]
        known = len(stage.known(parent))
        shared = int(rng.integers(1, known + 1)) if rng.random() < 0.5 else None
        if known < 16:
            stage.fork(
                parent, f"f{number}", sampled(number % 2, 6), ((), (7, 5))[number % 2], shared
            )
            SEEN["forks"] += 1
    elif kind == "abort" and stage.live:
        victim = stage.live[int(rng.integers(len(stage.live)))]
        SEEN[f"{stage.state_of(victim)} aborted"] += 1
        SEEN[f"{in_flight} in flight"] += 1
        stage.abort(victim)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """What is kept in a store ends every 4 tokens, so that short prompts have some of it."""
    monkeypatch.setattr(keys, "SEGMENT_TOKENS", 4)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_pools_drain_to_their_start_whatever_is_aborted_when(chunk):
    """Blocks, state slots and draft slots are all free, and no counter of anything ahead is left.

    Half of the runs end with everybody aborted, the rest run on; what was emitted is the truth.
    """
    for number in range(chunk, RUNS, CHUNKS):
        rng = np.random.default_rng(number)
        with stage_of(rng) as stage:
            for action in range(ACTIONS):
                act(stage, rng, action)
            for request_id in stage.live if number % 2 else []:
                SEEN[f"{len(stage.plans)} in flight"] += 1
                stage.abort(request_id)
            stage.finish()
            SEEN["preemptions"] += stage.engine.scheduler.counters.num_preemptions
            SEEN["rejected"] += stage.accepted()[0] - stage.accepted()[1]


def test_the_runs_above_met_what_they_are_about():
    """Aborts of running and waiting requests with 0, 1, 2 and 3 steps in flight."""
    if not SEEN or RUNS < 60:
        pytest.skip("too few were run")
    print(f"\n{dict(SEEN)}")
    for what in ("running aborted", "waiting aborted", "forks", "preemptions", "rejected"):
        assert SEEN[what] >= RUNS / 6
    for count in range(4):
        assert SEEN[f"{count} in flight"] >= RUNS / 6
