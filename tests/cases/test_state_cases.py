"""Reports from public trackers that concern state slots, as cases with the right value for each."""

from __future__ import annotations

import pytest

from deepinfer.block_manager import Verdict
from deepinfer.config import EngineConfig
from deepinfer.names import RELEASE_POLICIES
from tests.deepinfer.host_world import World


def world(num_slots, num_blocks=100, **changes):
    """So many slots to hand out, beside slot 0."""
    settings = {
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "checks": "order+conservation",
    }
    config = EngineConfig(
        num_blocks=num_blocks, num_state_slots=num_slots + 1, **(settings | changes)
    )
    return World(config)


@pytest.mark.parametrize("release", RELEASE_POLICIES)
def test_r24_slots_come_back_when_the_engine_goes_idle(release):
    """vllm#15296: finished ids were cleared with no step to consume them. Right: 5 run, 4 free."""
    w = world(4, release=release)
    for index in range(5):
        assert w.add(f"r{index}", [index, 1, 2], max_tokens=2) is Verdict.OK
        while w.tokens:
            w.step()
        assert w.slots.num_free == 4
    assert {reason for reason, _ in w.ended.values()} == {"length"}


def test_r25_a_failed_admission_keeps_no_slot():
    """sglang#16067: the slot stayed taken when blocks were missing. Right: 3 tries, 3 slots."""
    w = world(3, num_blocks=5)
    assert w.transfers.load_in("all", 16)
    w.add("a", range(6), max_tokens=2)
    for _ in range(10):
        assert not w.submit()
        assert w.slots.num_free == 3
    assert w.scheduler.counters.num_later_blocks >= 10
    w.drain()


def test_r52_as_many_run_as_there_are_slots():
    """sglang-rtxpro6000#5: reserved 5 for a use of 4, 40 slots ran 8. Right: 40 run, one each."""
    w = world(40, max_num_seqs=48, num_blocks=200)
    for index in range(48):
        w.add(f"r{index}", [index], max_tokens=3)
    w.submit()
    assert len(w.running_ids()) == 40
    assert w.slots.num_free == 0
    assert (w.scheduler.counters.num_later_blocks, w.scheduler.counters.num_later_slots) == (0, 1)
    w.collect()
    w.drain()
