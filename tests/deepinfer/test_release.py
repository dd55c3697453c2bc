"""The release queue: when each policy makes a given-up block allocatable, and what that costs."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.block_manager import BlockManager
from deepinfer.errors import UserError
from deepinfer.names import DISCIPLINES, FREE_ORDERS, RELEASE_POLICIES
from deepinfer.release import POLICIES, Fence, ReleaseQueue

SAFE = [name for name, policy in POLICIES.items() if policy.safe]


class FakeEvent:
    """An event that passes when told to, or when waited for."""

    def __init__(self):
        self.passed, self.num_waits = False, 0

    def query(self):
        return self.passed

    def synchronize(self, timeout_s=None):
        self.passed, self.num_waits = True, self.num_waits + 1


def make(policy, num_blocks=6, **order):
    blocks = BlockManager(num_blocks, **order)
    return blocks, ReleaseQueue(blocks, policy, clock=count().__next__)


def free_after_each_moment(policy):
    """Free blocks after: give up, release point, event passed and looked at, result collected."""
    blocks, queue = make(policy)
    event = FakeEvent()
    queue.give_up(blocks.allocate(5), Fence(1, event))
    moments = [blocks.num_free]
    queue.release_point()
    moments.append(blocks.num_free)
    event.passed = True
    queue.make_room(5)
    moments.append(blocks.num_free)
    queue.collected(1)
    return [*moments, blocks.num_free], event.num_waits


@pytest.mark.parametrize(
    ("policy", "free", "num_waits"),
    [
        ("early", [5, 5, 5, 5], 0),
        ("blocking", [5, 5, 5, 5], 1),
        ("deferred", [0, 5, 5, 5], 1),
        ("polled", [0, 0, 5, 5], 0),
        ("step", [0, 0, 0, 5], 0),
        ("ordered", [5, 5, 5, 5], 0),
    ],
)
def test_when_blocks_come_back_and_who_waits(policy, free, num_waits):
    """Each policy frees at its own moment and makes the host wait as often as it says."""
    assert free_after_each_moment(policy) == (free, num_waits)


@pytest.mark.parametrize("policy", RELEASE_POLICIES)
def test_without_a_fence_blocks_are_free_at_once(policy):
    """Nothing in flight, nothing to wait for: the same under every policy."""
    blocks, queue = make(policy)
    queue.give_up(blocks.allocate(2))
    queue.give_up(blocks.allocate(2), Fence(1, FakeEvent(), passed=True))
    queue.give_up([], Fence(1, FakeEvent()))
    assert blocks.num_free == 5
    assert queue.num_entries == 0


def test_early_hands_out_a_block_whose_fence_is_open():
    """Early is what the other policies guard against: the block is free while work is open."""
    blocks, queue = make("early")
    event = FakeEvent()
    queue.give_up(blocks.allocate(5), Fence(1, event))
    assert blocks.allocate(5).tolist() == [5, 4, 3, 2, 1]
    assert not event.query()


def test_polled_frees_oldest_first_and_stops_at_an_open_fence():
    """A newer passed fence waits behind an older open one, so the order stays that of giving up."""
    blocks, queue = make("polled")
    old, new = FakeEvent(), FakeEvent()
    first, second = blocks.allocate(2), blocks.allocate(2)
    queue.give_up(first, Fence(1, old))
    queue.give_up(second, Fence(1, new))
    new.passed = True
    queue.release_point()
    assert blocks.free_ids() == [5]
    old.passed = True
    assert queue.make_room(5)
    assert blocks.free_ids() == [5, 2, 1, 4, 3]


def test_a_step_fence_needs_no_event():
    """Under `step` the collected result is the proof, for its own step and older ones only."""
    blocks, queue = make("step")
    queue.give_up(blocks.allocate(1), Fence(1))
    queue.give_up(blocks.allocate(1), Fence(3))
    queue.collected(2)
    assert (blocks.num_free, blocks.num_withheld) == (4, 1)
    queue.collected(3)
    assert blocks.num_free == 5


def test_flush_waits_for_everything():
    """An engine that goes idle gets every block back; a shared event is waited for once."""
    blocks, queue = make("polled")
    event = FakeEvent()
    fence = Fence(1, event)
    for _ in range(2):
        queue.give_up(blocks.allocate(2), fence)
    queue.flush()
    assert blocks.num_free == 5
    assert event.num_waits == queue.counters.num_waits == 1


def test_refusals_that_withheld_blocks_would_have_met_are_counted():
    """A no is counted only where the withheld blocks would have sufficed."""
    blocks, queue = make("step")
    queue.give_up(blocks.allocate(3), Fence(1))
    assert queue.make_room(2)
    assert not queue.make_room(4)
    assert not queue.make_room(6)
    assert queue.counters.num_refused_while_withheld == 1


def test_withheld_peak_and_integral():
    """Block-nanoseconds are blocks times the clock while withheld, and the peak is kept."""
    blocks, queue = make("step")  # the clock ticks once at each look
    queue.give_up(blocks.allocate(3), Fence(1))  # 3 blocks from here
    queue.give_up(blocks.allocate(1), Fence(1))  # one tick later 4
    queue.collected(1)  # one tick later none
    assert queue.counters.withheld_peak == 4
    assert queue.withheld_block_ns() == 3 + 4
    assert queue.withheld_block_ns() == 3 + 4


def test_a_block_withheld_by_an_older_fence_counts_from_its_last_release():
    """A block its other owner still held is not billed as withheld for that time."""
    blocks, queue = make("step")
    ids = blocks.allocate(1)
    blocks.pin(ids)
    queue.give_up(ids, Fence(1))
    for _ in range(10):
        queue.withheld_block_ns()
    assert queue.counters.withheld_peak == 0
    queue.give_up(ids)  # no fence of its own, but the older one keeps the block
    assert queue.counters.withheld_peak == 1
    queue.collected(1)
    assert queue.withheld_block_ns() == 1


def test_ordered_names_the_fences_the_next_writer_must_wait_for():
    """The next owner of a tagged block waits for its fence once; others wait for nothing."""
    blocks, queue = make("ordered", free_order="forward")
    fence = Fence(1, FakeEvent())
    queue.give_up(blocks.allocate(2), fence)
    assert queue.fences_before_writing([3, 4]) == []
    assert queue.fences_before_writing([1, 2]) == [fence]
    assert queue.fences_before_writing([1, 2]) == []
    assert queue.counters.num_stream_waits == 1


def test_ordered_keeps_the_fences_of_every_owner():
    """Two owners gave a block up behind different work: its next writer waits for both."""
    blocks, queue = make("ordered")
    ids = blocks.allocate(1)
    blocks.pin(ids)
    reader, other = Fence(1, FakeEvent()), Fence(1, FakeEvent())
    queue.give_up(ids, reader)
    queue.give_up(ids, other)
    assert queue.fences_before_writing(ids) == [reader, other]


def test_ordered_forgets_fences_that_have_passed():
    """A collected step and a passed event need no wait on the device."""
    blocks, queue = make("ordered")
    event = FakeEvent()
    queue.give_up(blocks.allocate(1), Fence(1, FakeEvent()))
    queue.give_up(blocks.allocate(1), Fence(2, event))
    queue.collected(1)
    assert queue.fences_before_writing([1]) == []
    event.passed = True
    assert queue.fences_before_writing([2]) == []
    assert queue.counters.num_stream_waits == 0


def test_an_unknown_policy_is_a_user_error_with_the_nearest_name():
    """The hint names what was probably meant."""
    with pytest.raises(UserError, match="release: unknown name 'defered'") as error:
        make("defered")
    assert "did you mean 'deferred'?" in error.value.hint


@settings(max_examples=150, deadline=None)
@given(
    policy=st.sampled_from(SAFE),
    free_order=st.sampled_from(FREE_ORDERS),
    discipline=st.sampled_from(DISCIPLINES),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    per_block=st.booleans(),
)
def test_every_policy_leaves_the_free_order_of_an_immediate_release(
    policy, free_order, discipline, sizes, per_block
):
    """Waiting changes when blocks join the free list, never in which order."""

    def free_ids(name, fenced):
        blocks, queue = make(name, sum(sizes) + 1, free_order=free_order, discipline=discipline)
        tables = [blocks.allocate(size) for size in sizes]
        for step, table in enumerate(tables, 1):
            if fenced and per_block:
                for block_id in blocks.in_free_order(table):
                    queue.give_up([int(block_id)], Fence(step, FakeEvent()))
            else:
                queue.give_up(table, Fence(step, FakeEvent()) if fenced else None)
        queue.release_point()
        queue.collected(len(tables))
        return blocks.free_ids()

    assert free_ids(policy, fenced=True) == free_ids("early", fenced=False)
