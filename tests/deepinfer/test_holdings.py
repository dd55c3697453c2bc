"""What requests hold goes back on every path, behind the step in flight."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.block_manager import BlockManager
from deepinfer.holdings import Holdings
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.sequence import SamplingParams, Sequence, SequenceTable
from deepinfer.slots import Slots
from deepinfer.state_slots import StateSlots

NUM_BLOCKS, NUM_SLOTS = 10, 4


class Scene:
    """Holdings over pools of their own, whose requests come and run without a scheduler."""

    def __init__(self, release="step"):
        blocks, states, drafts = (BlockManager(n) for n in (NUM_BLOCKS, NUM_SLOTS, NUM_SLOTS))
        self.blocks = blocks
        self.seqs = SequenceTable(3, 16, 4)
        self.queues = [ReleaseQueue(pool, release) for pool in (blocks, states, drafts)]
        self.held = Holdings(
            self.seqs,
            self.queues[0],
            StateSlots(states, self.queues[1], max_rewind=0),
            Slots(drafts, self.queues[2], "draft_slot"),
            None,
        )
        self.num_arrived = 0

    def request(self, num_tokens=6):
        name = f"r{self.num_arrived}"
        seq = Sequence(name, self.num_arrived, np.ones(num_tokens, np.int32), 6, SamplingParams())
        self.num_arrived += 1
        return seq

    def running(self):
        """A request with a row, two blocks and a slot of each pool."""
        seq = self.request()
        for pool in self.held.slots:
            pool.take(seq)
        row = self.seqs.add(seq, self.blocks.allocate(2))
        self.held.running = np.append(self.held.running, row)
        return seq

    def waiting_fork(self, parent):
        """A request that has pinned its parent's first block, and taken a state slot."""
        seq = self.request()
        seq.forked_table, seq.num_computed_tokens = self.seqs.table(parent.row)[:1], 4
        self.blocks.pin(seq.forked_table)
        self.held.states.fork(seq, parent)
        self.held.waiting.add(seq)
        return seq

    def num_held(self):
        return [queue.blocks.num_held for queue in self.queues]

    def num_withheld(self):
        return [queue.blocks.num_withheld for queue in self.queues]


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_request_that_ends_gives_up_all_it_has(in_flight):
    """At once, or once the step in flight has been collected; the other keeps its own."""
    scene = Scene()
    one, two = scene.running(), scene.running()
    if in_flight:
        scene.held.in_flight = Fence(1)
    rows, row = scene.held.running, two.row
    scene.held.end(one, "finish")
    assert scene.num_held() == [2, 1, 1]
    assert scene.num_withheld() == ([2, 1, 1] if in_flight else [0, 0, 0])
    assert (one.row, one.state_id, one.draft_slot) == (-1, 0, 0)
    assert scene.held.running.tolist() == [row]
    assert rows.tolist() == [0, 1], "whoever keeps the set of rows has it unchanged"
    for queue in scene.queues:
        queue.collected(1)
    assert scene.num_withheld() == [0, 0, 0]


def test_a_waiting_fork_that_ends_gives_up_its_pins_and_its_slot():
    """And the pin on its parent's state, which nobody will copy any more."""
    scene = Scene()
    parent = scene.running()
    scene.held.end(scene.waiting_fork(parent), "abort")
    assert len(scene.held.waiting) == 0
    assert scene.held.states.pinned == []
    assert scene.num_held() == [2, 1, 1]
    assert scene.blocks.ref_count(1) == 1


def test_a_preempted_request_waits_in_its_old_place_with_its_tokens():
    """Before those that came after it; its rows are lost, and counted."""
    scene = Scene()
    seq, later = scene.running(), scene.request()
    scene.held.waiting.add(later)
    scene.seqs.num_computed_tokens[seq.row] = 5
    scene.held.preempt(seq.row)
    assert list(scene.held.waiting) == [seq, later]
    assert (seq.row, seq.num_tokens, seq.num_preemptions) == (-1, 6, 1)
    assert scene.num_held() == [0, 0, 0]
    counters = scene.held.counters
    assert (counters.num_preemptions, counters.num_recomputed_tokens) == (1, 5)


def test_the_newest_fork_is_parted_from_its_pins_first():
    """It goes on waiting, and computes all its tokens; without forks nobody can be."""
    scene = Scene()
    parent = scene.running()
    old, new = scene.waiting_fork(parent), scene.waiting_fork(parent)
    assert scene.held.unfork_newest()
    assert (len(new.forked_table), new.num_computed_tokens, new.state_id) == (0, 0, 0)
    assert (len(old.forked_table), old.num_computed_tokens) == (1, 4)
    assert list(scene.held.waiting) == [old, new]
    assert scene.held.unfork_newest()
    assert not scene.held.unfork_newest()
    assert scene.held.counters.num_unforked == 2
    assert scene.num_held() == [2, 1, 1]


def test_what_comes_back_is_what_a_fence_keeps_or_a_step_may_bring():
    """Of blocks and of slots; what requests hold does not come back by itself."""
    scene = Scene()
    seq = scene.running()
    assert not scene.held.comes_back
    scene.held.in_flight = Fence(1)
    assert scene.held.comes_back
    scene.held.states.give_up(seq, scene.held.in_flight, "finish")
    scene.held.in_flight = None
    assert scene.held.comes_back, "a slot is withheld"
    scene.queues[1].collected(1)
    assert not scene.held.comes_back
