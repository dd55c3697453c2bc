"""What watching costs: one engine, every other step recorded."""

from __future__ import annotations

import numpy as np
import pytest

from bench.observer import (
    BATCH,
    OUTPUT_TOKENS,
    AlternatingRound,
    ObserverCost,
    measure_observer,
    observer_workload,
)
from bench.runner import Target
from bench.stats import Interval
from tests.bench.tiny import requests_of, silent, tiny


@pytest.fixture(scope="module")
def resolved():
    """The observer's batch on cpu-tiny, with room for all of it."""
    return tiny(observer_workload(), num_blocks=BATCH * 25 + 1, max_num_batched_tokens=4096)


@pytest.fixture
def target(resolved):
    """A device with the weights, closed at the end."""
    opened = Target(resolved)
    yield opened
    opened.close()


def test_one_step_of_each_pair_is_recorded(resolved, target):
    """Both kinds of step have a time for all pairs, and only one kind left records."""
    played = AlternatingRound(
        resolved,
        target,
        requests_of(resolved),
        cell=0,
        index=0,
        warmup=False,
        rng=np.random.default_rng(0),
    )
    result = played.run()
    plain, noted = played.step_ns
    assert abs(len(plain) - len(noted)) <= 1
    assert len(plain) + len(noted) > OUTPUT_TOKENS - 10
    assert len(result.steps) == len(noted) + 6
    assert len(result.emissions) == BATCH
    assert not result.problems


def test_the_cost_is_a_share_of_the_step(resolved, target):
    """Two rounds give twice the pairs of one, and a total of its parts."""
    cost = measure_observer(resolved, target, requests_of(resolved), 2, silent)
    assert cost.num_pairs > OUTPUT_TOKENS - 12
    assert cost.step_us > 0
    assert 0 < cost.clock_reads < 0.05
    assert cost.total == pytest.approx(max(cost.records, 0) + cost.nvml + cost.clock_reads)


def test_noise_below_nothing_is_no_gain():
    """Steps that were faster while recorded do not pay for NVML."""
    cost = ObserverCost(1e4, 100, -0.02, Interval(-0.03, 0.01), 0.004, 0.001)
    assert cost.total == pytest.approx(0.005)
