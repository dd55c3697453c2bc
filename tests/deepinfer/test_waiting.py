"""The queue of waiting requests: by arrival, with the pins of its forks counted."""

from __future__ import annotations

import numpy as np

from deepinfer.sequence import SamplingParams, Sequence
from deepinfer.waiting import WaitingQueue


def request(arrival, *pinned):
    seq = Sequence(f"r{arrival}", arrival, np.array([1], np.int32), 1, SamplingParams())
    seq.forked_table = np.array(pinned, np.int32)
    return seq


def test_whoever_comes_back_takes_its_old_place():
    """The order is that of arrival, not of queuing."""
    queue = WaitingQueue()
    for arrival in (2, 0, 1):
        queue.add(request(arrival))
    assert [seq.arrival for seq in queue] == [0, 1, 2]
    assert queue.head.arrival == 0
    assert len(queue) == 3


def test_pins_are_counted_by_fork_and_taken_once():
    """Whether the fork leaves the queue with them or stays without."""
    queue, one, two = WaitingQueue(), request(0, 5, 6), request(1, 7)
    queue.add(one)
    queue.add(two)
    queue.add(request(2))
    assert queue.num_pinned_forks == 2
    assert queue.newest_fork is two
    assert queue.unpin(two).tolist() == [7]
    assert queue.unpin(two).tolist() == []
    assert (queue.num_pinned_forks, queue.newest_fork) == (1, one)
    assert queue.remove(one).tolist() == [5, 6]
    assert (queue.num_pinned_forks, queue.newest_fork, len(queue)) == (0, None, 2)
