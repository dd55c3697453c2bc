"""Records of collected steps: readable until the next release point, then never wrong."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.block_manager import BlockManager
from deepinfer.config import EngineConfig
from deepinfer.engine import LLMEngine
from deepinfer.errors import OutOfBlocksError, StaleRecordError
from deepinfer.names import RELEASE_POLICIES
from deepinfer.records import RecordPool
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.sequence import SamplingParams
from tests.deepinfer.step_plans import TINY


def pool(num_slots=3, policy="deferred"):
    slots = BlockManager(num_slots)
    return RecordPool(slots, ReleaseQueue(slots, policy), max_tokens=4)


def told(records, *tokens, step=1):
    names = [f"r{token}" for token in tokens]
    return records.tell(Fence(step, passed=True), names, np.array(tokens, np.int32))


@pytest.mark.parametrize("policy", RELEASE_POLICIES)
def test_a_record_goes_stale_at_the_release_point(policy):
    """Until then it shows its tokens; from then on reading it raises, filled again or not."""
    records = pool(policy=policy)
    record = told(records, 7, 8)
    assert (record.request_ids, record.token_ids.tolist()) == (["r7", "r8"], [7, 8])
    records.take_back()
    with pytest.raises(StaleRecordError, match="clone"):
        _ = record.token_ids
    with pytest.raises(StaleRecordError):
        _ = record.request_ids


def test_slots_are_used_again():
    """However many steps there are, the pool's slots suffice, and none is lost."""
    records = pool(num_slots=2)
    for token in range(10):
        record = told(records, token)
        assert record.token_ids.tolist() == [token]
        records.take_back()
    assert records.slots.num_free == records.slots.num_usable
    records.slots.check_integrity()


def test_a_slot_is_not_given_twice_while_the_caller_may_read_it():
    """Between two release points each result has a slot of its own."""
    records = pool(num_slots=3)
    first, second = told(records, 1), told(records, 2)
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([1], [2])
    with pytest.raises(OutOfBlocksError):
        told(records, 3)


@pytest.mark.parametrize("overlap", ["off", "on", "2"])
def test_an_output_is_readable_until_the_next_submit_and_its_clone_for_good(overlap):
    """The engine's own outputs, with as many steps in flight as there may be."""
    config = EngineConfig(
        block_size=4, num_blocks=17, max_num_seqs=2, max_model_len=32, overlap=overlap
    )
    kept, clones = [], []
    with LLMEngine(TINY, config, device="cpu-stepped") as engine:
        engine.add_request("a", [1, 2, 3], SamplingParams(8))
        while engine.has_unfinished():
            output = engine.step()
            assert output is not None
            assert output.request_ids in ([], ["a"])
            kept.append(output)
            clones.append(output.clone())
            finished = output.finished
    for output in kept[: -engine.max_in_flight]:
        with pytest.raises(StaleRecordError):
            _ = output.token_ids
    tokens = [token for clone in clones for token in clone.token_ids.tolist()]
    assert tokens == finished[0].token_ids.tolist()
