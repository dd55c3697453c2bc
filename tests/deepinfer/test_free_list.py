"""Free lists: which id comes next, for single ids, short and long runs, and round the ring."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.free_list import SCALAR_LIMIT, LinkedFreeList, make_free_list
from deepinfer.names import DISCIPLINES


class PlainList:
    """The disciplines in their plainest form, one id at a time."""

    def __init__(self, discipline):
        self.discipline, self.ids = discipline, deque()

    def push(self, ids):
        for block_id in ids:
            self.ids.appendleft(block_id) if self.discipline == "lifo" else self.ids.append(
                block_id
            )
        if self.discipline == "by_id":
            self.ids = deque(sorted(self.ids))

    def take(self, count):
        return [self.ids.popleft() for _ in range(count)]


@pytest.mark.parametrize(
    ("discipline", "order"),
    [("fifo", [1, 2, 7, 5, 4]), ("lifo", [4, 5, 7, 2, 1]), ("by_id", [1, 2, 4, 5, 7])],
)
def test_where_ids_join_and_leave(discipline, order):
    """fifo joins at the back, lifo at the front, by_id gives the smallest first."""
    free = make_free_list(discipline, 8)
    free.push([1, 2])
    free.push([7, 5, 4])
    assert list(free) == order
    assert free.take(5).tolist() == order
    assert len(free) == 0


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_taken_ids_are_a_copy(discipline):
    """What was taken does not change when the list goes on."""
    free = make_free_list(discipline, 70)
    free.push(np.arange(1, 70, dtype=np.int32))
    taken = free.take(60)
    before = taken.tolist()
    free.push(np.arange(200, 260, dtype=np.int32))
    assert taken.dtype == np.int32
    assert taken.tolist() == before


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_taking_nothing_gives_an_empty_array(discipline):
    """Zero ids are a valid request, also of an empty list."""
    free = make_free_list(discipline, 4)
    free.push([])
    assert free.take(0).tolist() == []
    assert list(free) == []


@pytest.mark.parametrize("discipline", DISCIPLINES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equals_the_plain_list_on_any_history(discipline, data):
    """Any mix of short and long pushes and takes gives the ids of the one-by-one list."""
    capacity = data.draw(st.integers(2, 3 * SCALAR_LIMIT))
    free, plain = make_free_list(discipline, capacity), PlainList(discipline)
    outside = list(range(1, capacity))
    for _ in range(data.draw(st.integers(1, 12))):
        count = data.draw(st.integers(0, len(outside)))
        pushed, outside = outside[:count], outside[count:]
        as_array = data.draw(st.booleans())
        free.push(np.array(pushed, np.int32) if as_array else pushed)
        plain.push(pushed)
        assert list(free) == list(plain.ids)
        count = data.draw(st.integers(0, len(free)))
        one = data.draw(st.booleans())
        taken = [free.take_one() for _ in range(count)] if one else free.take(count).tolist()
        assert taken == plain.take(count)
        assert len(free) == len(plain.ids)
        outside += data.draw(st.permutations(taken))


@pytest.mark.parametrize("stack", [False, True])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_id_leaves_a_linked_list_and_the_rest_keep_their_order(stack, data):
    """Two queues, the front one at its head if it is a stack, equal two plain lists."""
    capacity = data.draw(st.integers(2, 40))
    chosen = data.draw(st.sets(st.integers(1, capacity - 1)))
    free = LinkedFreeList(capacity, joins_front=chosen.__contains__, stack=stack)
    front, back, outside = [], [], list(range(1, capacity))
    for _ in range(data.draw(st.integers(1, 12))):
        count = data.draw(st.integers(0, len(outside)))
        pushed, outside = outside[:count], outside[count:]
        free.push(np.array(pushed, np.int32) if data.draw(st.booleans()) else pushed)
        for block_id in pushed:
            queue = front if block_id in chosen else back
            queue.insert(0 if stack and queue is front else len(queue), block_id)
        assert list(free) == front + back
        for block_id in data.draw(st.permutations(front + back))[:3]:
            free.remove(block_id)
            (front if block_id in chosen else back).remove(block_id)
            outside.append(block_id)
        count = data.draw(st.integers(0, len(free)))
        taken = free.take(count).tolist()
        assert taken == (front + back)[:count]
        front, back = front[count:], back[max(count - len(front), 0) :]
        outside += data.draw(st.permutations(taken))
        assert len(free) == len(front) + len(back)
