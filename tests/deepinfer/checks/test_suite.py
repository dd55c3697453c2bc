"""The checkers in a real engine: silent on every policy, and nothing of an answer changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer.block_manager import BlockManager
from deepinfer.checks.blocks import ObservedBlocks, observed
from deepinfer.checks.suite import Checks, parse_checks
from deepinfer.config import EngineConfig
from deepinfer.device import open_device
from deepinfer.device.observed import ObservedDevice
from deepinfer.engine import LLMEngine
from deepinfer.errors import UserError
from deepinfer.models.weights import load_weights
from deepinfer.names import DISCIPLINES, FENCES, FREE_ORDERS, RELEASE_POLICIES
from deepinfer.observer import KV, Access, Observer
from deepinfer.sequence import SamplingParams
from tests.deepinfer.step_plans import TINY

CONFIG = EngineConfig(
    block_size=4, num_blocks=16, max_num_seqs=6, max_num_batched_tokens=24, max_model_len=48
)
BOTH = "order+conservation"


@pytest.fixture(scope="module")
def weights():
    """One set of weights for every engine of this file."""
    return load_weights(TINY, open_device("cpu-stepped"))


def busy_run(engine, seed):
    """Arrivals, forks, aborts in flight and preemptions, then to the end; tokens by request."""
    rng, tokens = np.random.default_rng(seed), {}

    def someone():
        running = engine.scheduler.running
        return running[int(rng.integers(len(running)))].request_id if running else None

    for number in range(24):
        sampling = SamplingParams(int(rng.integers(4, 16)), temperature=0.8, seed=number)
        own = rng.integers(0, TINY.vocab_size, int(rng.integers(1, 12)))
        parent = someone()
        if parent is not None and rng.random() < 0.4:
            engine.fork(parent, f"r{number}", sampling, own_token_ids=own[: number % 3])
        else:
            engine.add_request(f"r{number}", own, sampling)
        if engine.submit():
            victim = someone()
            if victim is not None and rng.random() < 0.25:
                tokens[victim] = engine.abort(victim).token_ids.tolist()
            tokens.update((e.request_id, e.token_ids.tolist()) for e in engine.collect().finished)
    while engine.has_unfinished():
        tokens.update((e.request_id, e.token_ids.tolist()) for e in engine.step().finished)
    return tokens


@pytest.mark.parametrize("device", ["cpu", "cpu-stepped"])
@pytest.mark.parametrize("release", RELEASE_POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_every_policy_is_silent_and_gives_the_same_tokens(weights, device, release, seed):
    """On one compute stream `early` is ordered by luck, so it is silent as well."""
    config = replace(
        CONFIG,
        release=release,
        free_order=FREE_ORDERS[seed + 2 * (device == "cpu")],
        discipline=DISCIPLINES[seed],
        fence=FENCES[seed],
        fork_copy=("last", "partial")[seed],
    )
    results = []
    for checks in (BOTH, "off"):
        with LLMEngine(
            TINY, replace(config, checks=checks), device=device, weights=weights
        ) as engine:
            results.append(busy_run(engine, seed))
            assert [str(finding) for finding in engine.findings.first] == []
            counters = engine.scheduler.counters
            assert counters.num_preemptions > 0
            assert counters.num_block_copies > 0
            assert counters.num_aborted > 0
    assert results[0] == results[1]


def test_a_writer_on_another_stream_shows_what_early_lets_through(weights):
    """Blocks given up in flight and written on `load`: hazards under `early`, not `deferred`."""
    counts = {}
    for release in ("early", "deferred"):
        config = replace(CONFIG, release=release, checks=BOTH)
        with LLMEngine(TINY, config, device="cpu-stepped", weights=weights) as engine:
            engine.add_request("a", np.arange(6), SamplingParams(max_tokens=8))
            engine.step()
            engine.submit()
            engine.abort("a")  # its blocks are still read by the step in flight
            free = engine.blocks.num_free
            ids = engine.blocks.allocate(free)
            engine.device.stream("load").submit(
                lambda: None, writes=(Access(KV, ids),), label="load"
            )
            counts[release] = engine.findings.counts["order"]
            engine.blocks.release(ids)
            engine.collect()
    assert counts == {"early": 2, "deferred": 0}


def test_off_leaves_everything_as_it_is():
    """No wrapper, no observer, no call."""
    checks = Checks("off", 4)
    device, blocks = object(), object()
    assert checks.observer is None
    assert checks.watch_device(device) is device
    assert observed(blocks, checks.observer) is blocks
    checks.bind(None)
    checks.planned(None)
    checks.settled(1)
    assert len(checks.findings) == 0


def test_an_observer_of_the_caller_s_own_is_enough_to_watch():
    """With no checker it is told directly, with checkers before them."""
    told = []

    class Own(Observer):
        def allocated(self, ids):
            told.append(list(ids))

    checks = Checks("off", 4, [Own()])
    blocks = observed(BlockManager(4), checks.observer)
    assert isinstance(blocks, ObservedBlocks)
    blocks.allocate(2)
    assert told == [[1, 2]]
    device = open_device("cpu-stepped")
    assert isinstance(checks.watch_device(device), ObservedDevice)
    assert isinstance(checks.observer, Own)
    assert not isinstance(Checks("order", 4, [Own()]).observer, Own)


def test_checkers_are_named_one_by_one():
    """Joined by +, each once."""
    assert parse_checks("off") == ()
    assert parse_checks("tags+order+tags") == ("tags", "order")
    with pytest.raises(UserError, match="'oder'") as caught:
        parse_checks("tags+oder")
    assert caught.value.hint == "did you mean 'order'? valid: tags, order, conservation"
