"""A pool of slots: one for each request, taken and given up as blocks are."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.block_manager import BlockManager
from deepinfer.observer import Observer
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.sequence import SamplingParams, Sequence
from deepinfer.slots import Slots


class Told(Observer):
    """What a pool says of hands that change."""

    def __init__(self):
        self.log = []

    def took(self, owner, ids, path):
        self.log.append((owner, list(ids), path))

    def giving_up(self, table, step, owner, path, event=None):
        self.log.append((owner, list(table), path))


def pool(num_slots=3, held_in="draft_slot", observer=None):
    slots = BlockManager(num_slots)
    return Slots(slots, ReleaseQueue(slots, "step", observer=observer), held_in)


def request(name="a"):
    return Sequence(name, 0, np.array([1], np.int32), 1, SamplingParams())


@pytest.mark.parametrize("held_in", ["draft_slot", "state_id"])
def test_a_slot_is_named_in_the_field_of_its_pool(held_in):
    """And in no other; given up it is 0 there."""
    slots, seq = pool(held_in=held_in), request()
    assert not slots.holds_one(seq)
    assert slots.take(seq) == []
    assert slots.holds_one(seq)
    assert getattr(seq, held_in) == 1
    assert seq.draft_slot + seq.state_id == 1
    slots.give_up(seq, None, "finish")
    assert (seq.draft_slot, seq.state_id, slots.slots.num_free) == (0, 0, 2)


def test_a_slot_given_up_under_a_step_in_flight_is_withheld():
    """Nobody gets it until that step has been collected."""
    slots, one, two, three = pool(), request("one"), request("two"), request("three")
    slots.take(one)
    slots.take(two)
    slots.give_up(one, Fence(1), "abort")
    assert not slots.has_room()
    slots.release.collected(1)
    assert slots.has_room()
    slots.take(three)
    assert (two.draft_slot, three.draft_slot) == (2, 1)


def test_who_holds_none_gives_none_up():
    """A second time changes nothing and frees nobody else's slot."""
    slots, one, two = pool(), request("one"), request("two")
    slots.take(one)
    slots.take(two)
    slots.give_up(one, None, "finish")
    slots.give_up(one, None, "finish")
    assert slots.slots.num_held == 1
    assert slots.slots.ref_count(two.draft_slot) == 1


def test_an_observer_hears_of_both():
    """Who, which slot, and why."""
    told = Told()
    slots, seq = pool(observer=told), request()
    slots.take(seq)
    slots.give_up(seq, None, "abort")
    assert told.log == [("a", [1], "admit"), ("a", [1], "abort")]
