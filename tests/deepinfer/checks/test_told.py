"""Records as their reader sees them: what changes too early, and what stays too long."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.block_manager import BlockManager
from deepinfer.checks.findings import Findings
from deepinfer.checks.told import ToldChecker
from deepinfer.config import EngineConfig
from deepinfer.engine import LLMEngine
from deepinfer.names import RELEASE_POLICIES
from deepinfer.records import RecordPool
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.sequence import SamplingParams
from tests.deepinfer.step_plans import TINY


class World:
    """A pool of records, what watches it, and what was found."""

    def __init__(self):
        slots = BlockManager(4, discipline="lifo")
        self.records = RecordPool(slots, ReleaseQueue(slots, "deferred"), max_tokens=4)
        self.findings = Findings()
        self.checker = ToldChecker(self.findings)

    def tell(self, step, *tokens):
        names = [f"r{token}" for token in tokens]
        record = self.records.tell(Fence(step, passed=True), names, np.array(tokens, np.int32))
        self.checker.told(step, record)

    def release_point(self, step):
        self.records.take_back()
        self.checker.taken_back(step)

    @property
    def messages(self):
        return [finding.message for finding in self.findings.first]


@pytest.fixture
def world():
    return World()


def test_records_that_go_at_the_release_point_are_right(world):
    """Several may be out at once, and slots are used again."""
    for step in range(0, 9, 3):
        world.tell(step, 7, 8)
        world.tell(step + 1)
        world.tell(step + 2, step)
        world.release_point(step + 3)
    assert not world.messages


def test_a_slot_used_again_before_the_release_point_is_found_once(world):
    """The reader of the first record sees the tokens of the second."""
    world.tell(1, 7, 8)
    world.records.slots.release([world.records._out.pop()[0]])
    world.tell(2, 9)
    world.tell(3)
    assert world.messages == [
        "the record of step 1, told as [7, 8] of ['r7', 'r8'], shows [9, 8] of ['r9'] before the "
        "next release point"
    ]


def test_a_record_taken_back_too_early_is_found(world):
    """Also if its tokens are where they were."""
    world.tell(1, 7)
    world.records.take_back()
    world.tell(2, 9)
    assert world.messages == [
        "the record of step 1, told as [7] of ['r7'], cannot be read before the next release point"
    ]


def test_a_record_that_can_be_read_behind_the_release_point_is_found(world):
    """Whoever kept it would read a later step's tokens in it one day."""
    world.tell(1, 7)
    world.checker.taken_back(4)
    assert world.messages == [
        "the record of step 1 can be read behind the release point of step 4: it shows [7] of "
        "['r7']"
    ]


def test_a_record_that_nobody_can_read_is_found(world):
    """It is stale when it is told."""
    record = world.records.tell(Fence(1, passed=True), [], np.empty(0, np.int32))
    world.records.take_back()
    world.checker.told(1, record)
    assert world.messages == ["the record of step 1 cannot be read when it is told"]


@pytest.mark.parametrize("overlap", ["off", "on", "2"])
@pytest.mark.parametrize("release", RELEASE_POLICIES)
def test_an_engine_tells_its_steps_rightly(release, overlap):
    """Under every policy, however many steps are in flight when the last request ends."""
    config = EngineConfig(
        block_size=4,
        num_blocks=17,
        max_num_seqs=2,
        max_model_len=32,
        overlap=overlap,
        release=release,
        checks="conservation",
    )
    with LLMEngine(TINY, config, device="cpu-stepped") as engine:
        for name in "abc":
            engine.add_request(name, [1, 2, 3], SamplingParams(5))
        while engine.has_unfinished():
            engine.step()
        assert not len(engine.findings), engine.findings.first
