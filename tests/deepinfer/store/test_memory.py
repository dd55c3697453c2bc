"""Entries in host memory: when they are found, what is evicted, and whose bytes stay put.

A state machine compares the store with a model that has neither heap nor handles.
`DEEPINFER_STATEFUL_EXAMPLES` sets how many runs it makes.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer.errors import OwnershipError, UserError
from deepinfer.store.memory import HostStore
from tests.deepinfer.store.entries import PoisonedMemory


def saved(store, key, parent=None, num_bytes=1):
    """Save an entry whose bytes are its key; whether it could be."""
    handle = store.begin_save(key, parent, num_bytes)
    if handle is None:
        return False
    handle.buffer[:] = key
    store.commit(handle)
    return True


def present(store, keys):
    return [key for key in keys if key in store]


# -- two steps -----------------------------------------------------------------------------------


def test_an_entry_is_found_when_its_bytes_are_there_and_not_before():
    """Between `begin_save` and `commit` it takes room and is a miss."""
    store = HostStore(10)
    handle = store.begin_save(1, None, 4)
    assert handle.buffer.shape == (4,)
    assert 1 not in store
    assert store.open(1) is None
    assert (store.is_saving(1), store.is_saving(2)) == (True, False)
    assert (store.num_bytes, store.num_entries) == (4, 0)
    handle.buffer[:] = 9
    store.commit(handle)
    with pytest.raises(OwnershipError, match="has ended"):
        _ = handle.buffer
    opened = store.open(1)
    assert opened.buffer.tolist() == [9] * 4
    assert opened.parent is None
    assert store.num_entries == 1
    counters = store.counters
    assert (counters.num_hits, counters.num_misses) == (1, 1)
    assert (counters.bytes_saved, counters.bytes_loaded) == (4, 4)
    store.check_integrity()


def test_an_abandoned_save_leaves_nothing():
    """Its room is free, its key can be saved anew, its parent may go again."""
    memory = PoisonedMemory()
    store = HostStore(3, memory)
    assert saved(store, 1)
    handle = store.begin_save(2, 1, 2)
    assert store.begin_save(2, 1, 2) is None
    store.abandon(handle)
    assert (store.num_bytes, store.num_entries, len(memory.out)) == (1, 1, 1)
    assert 2 not in store
    assert saved(store, 3, None, 3)
    assert 1 not in store
    assert store.counters.bytes_saved == 4
    store.check_integrity()


def test_a_key_is_saved_once():
    """A second save of an entry that is there, or on its way, is not refused for lack of room."""
    store = HostStore(8)
    handle = store.begin_save(1, None, 1)
    assert store.begin_save(1, None, 1) is None
    store.commit(handle)
    assert store.begin_save(1, None, 1) is None
    assert store.counters.num_refused_saves == 0


# -- eviction ------------------------------------------------------------------------------------


def test_the_tail_of_the_chain_used_longest_ago_goes_first():
    """The chain 1-2-3 is older than 4 until it is used; then 4 goes before it."""
    store = HostStore(4)
    for key, parent in ((1, None), (2, 1), (3, 2), (4, None)):
        assert saved(store, key, parent)
    assert saved(store, 5)
    assert present(store, range(1, 6)) == [1, 2, 4, 5]
    store.close(store.open(2))
    assert saved(store, 6)
    assert present(store, range(1, 7)) == [1, 2, 5, 6]


def test_a_parent_is_not_evicted_for_its_own_child():
    """A chain longer than the store keeps its head, and what does not fit is refused."""
    store = HostStore(3)
    assert saved(store, 9)
    for key in range(1, 4):
        assert saved(store, key, key - 1 or None)
    assert 9 not in store
    before = store.counters.num_evictions
    assert not saved(store, 4, 3)
    assert not saved(store, 5, 4)  # 3 is evicted for nothing that nobody would find
    assert present(store, range(1, 6)) == [1, 2, 3]
    assert store.counters.num_refused_saves == 2
    assert store.counters.num_evictions == before == 1


def test_what_somebody_waits_for_needs_no_parent():
    """Others go for it, and once its parent is there, too, that does not go before it."""
    store = HostStore(3)
    for key in (7, 8, 9):
        assert saved(store, key)
    assert store.begin_save(2, 1, 1) is None
    handle = store.begin_save(2, 1, 1, on_demand=True)
    store.commit(handle)
    assert present(store, range(10)) == [2, 8, 9]
    assert saved(store, 1)
    assert saved(store, 3, None, 2)
    assert present(store, range(10)) == [1, 3]


def test_a_save_that_cannot_fit_evicts_nothing():
    """Neither if it is larger than the budget nor if too much is held."""
    store = HostStore(4)
    for key in (1, 2, 3):
        assert saved(store, key)
    handle = store.open(2)
    assert store.begin_save(4, None, 5) is None
    assert store.begin_save(4, None, 4) is None
    assert present(store, (1, 2, 3)) == [1, 2, 3]
    assert store.counters.num_refused_saves == 2
    store.close(handle)
    assert store.begin_save(4, None, 4) is not None


def test_bytes_under_an_open_copy_are_never_freed():
    """One buffer's room, open: the next save is refused until every holder has closed."""
    memory = PoisonedMemory()
    store = HostStore(4, memory)
    assert saved(store, 1, None, 4)
    first, second = store.open(1), store.pin(1)
    assert not saved(store, 2, None, 4)
    store.close(first)
    assert not saved(store, 2, None, 4)
    assert second.buffer.tolist() == [1] * 4
    store.close(second)
    assert saved(store, 2, None, 4)
    assert present(store, (1, 2)) == [2]


def test_a_pin_is_no_use():
    """It is not counted, and the entry is as old as before."""
    store = HostStore(2)
    assert saved(store, 1)
    assert saved(store, 2)
    store.close(store.pin(1))
    assert store.pin(7) is None
    assert (store.counters.num_hits, store.counters.num_misses) == (0, 0)
    assert saved(store, 3)
    assert present(store, (1, 2, 3)) == [2, 3]


def test_loads_leave_no_hold_behind():
    """Four chunks of room, one loaded twice and closed: four new ones are all saved."""
    store = HostStore(4)
    for key in range(4):
        assert saved(store, key)
    for _ in range(2):
        store.close(store.open(1))
    assert all(saved(store, key) for key in range(10, 14))
    assert present(store, range(20)) == [10, 11, 12, 13]
    assert not store.handles


def test_a_host_without_memory_refuses_the_save():
    """The allocator's MemoryError is a refusal, and the store goes on."""
    store = HostStore(100, PoisonedMemory(8))
    assert saved(store, 1, None, 8)
    assert store.begin_save(2, None, 4) is None
    assert store.counters.num_refused_saves == 1
    assert 1 in store
    store.check_integrity()


# -- misuse --------------------------------------------------------------------------------------


def test_a_handle_ends_once_and_in_its_own_way():
    """Closing twice would take away another holder's hold; committing an open makes no sense."""
    store = HostStore(4)
    saving = store.begin_save(1, None, 1)
    with pytest.raises(OwnershipError, match="cannot close"):
        store.close(saving)
    store.commit(saving)
    with pytest.raises(OwnershipError, match=r"cannot abandon.*has ended"):
        store.abandon(saving)
    one, other = store.open(1), store.open(1)
    store.close(one)
    with pytest.raises(OwnershipError, match=r"cannot close.*has ended"):
        store.close(one)
    with pytest.raises(OwnershipError, match="of another store"):
        HostStore(4).close(other)
    assert other.buffer is not None
    store.check_integrity()
    store.close(other)


@pytest.mark.parametrize("key", [-1, 1 << 128, "1", 1.0, True, None])
def test_a_key_is_an_integer_of_16_bytes(key):
    """Anything else is refused with what is expected."""
    with pytest.raises(UserError, match=r"key: .*; expected an integer of 16 bytes"):
        HostStore(4).begin_save(key, None, 1)


def test_sizes_are_checked():
    """An entry has at least one byte, and so has a budget."""
    with pytest.raises(UserError, match="budget_bytes: 0; at least 1"):
        HostStore(0)
    with pytest.raises(UserError, match="num_bytes: 0; at least 1"):
        HostStore(1).begin_save(1, None, 0)


@pytest.mark.parametrize("damage", ["size", "handle", "visible", "child"])
def test_the_integrity_check_sees(damage):
    """Each of its comparisons can fail."""
    store = HostStore(8)
    assert saved(store, 1)
    assert saved(store, 2, 1)
    store.check_integrity()
    if damage == "size":
        store._entries[1].buffer = np.zeros(2, np.uint8)
    elif damage == "handle":
        store._chains.hold(2)
    elif damage == "visible":
        store._entries[2].visible = False
    else:
        store._chains._num_children[1] = 2
    with pytest.raises(OwnershipError):
        store.check_integrity()


# -- against a model -----------------------------------------------------------------------------

BUDGET = 12
KEYS = st.integers(0, 9)


class AgainstModel(RuleBasedStateMachine):
    """Saves, loads and closes in any order, beside a model that looks at every entry each time."""

    def __init__(self):
        super().__init__()
        self.memory = PoisonedMemory()
        self.store = HostStore(BUDGET, self.memory)
        self.entries = {}  # key -> [parent, num_bytes, last use, visible]
        self.handles = []
        self.num_refused = self.now = 0
        self.evicted = []

    def tick(self):
        self.now += 1
        return self.now

    def room(self, need, spare, on_demand):
        """Evict from the model until `need` bytes fit; None, and nothing done, if they cannot."""
        left, victims = dict(self.entries), []
        if spare is not None and spare not in left and not on_demand:
            return [] if sum(entry[1] for entry in left.values()) + need <= BUDGET else None
        while sum(entry[1] for entry in left.values()) + need > BUDGET:
            busy = {handle.key for handle in self.handles} | {spare}
            busy |= {entry[0] for entry in left.values()}
            able = [key for key in left if key not in busy]
            if not able:
                return None
            victims.append(min(able, key=lambda key: left[key][2]))
            del left[victims[-1]]
        return victims

    @rule(key=KEYS, parent=st.none() | KEYS, num_bytes=st.integers(1, 6), on_demand=st.booleans())
    def begin_save(self, key, parent, num_bytes, on_demand):
        if parent is not None and parent >= key:
            parent = None
        handle = self.store.begin_save(key, parent, num_bytes, on_demand=on_demand)
        if key in self.entries:
            assert handle is None
            return
        victims = self.room(num_bytes, parent, on_demand)
        if victims is None:
            self.num_refused += 1
            assert handle is None
            return
        for victim in victims:
            del self.entries[victim]
        self.evicted += victims
        assert (handle.key, handle.parent, len(handle.buffer)) == (key, parent, num_bytes)
        self.entries[key] = [parent, num_bytes, self.tick(), False]
        self.handles.append(handle)
        handle.buffer[:] = key

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 99), well=st.booleans())
    def end(self, which, well):
        handle = self.handles.pop(which % len(self.handles))
        assert set(handle.buffer.tolist()) == {handle.key}
        if not handle.saving:
            self.store.close(handle)
        elif well:
            self.store.commit(handle)
            self.entries[handle.key][2:] = [self.tick(), True]
        else:
            self.store.abandon(handle)
            del self.entries[handle.key]

    @rule(key=KEYS, use=st.booleans())
    def open(self, key, use):
        handle = self.store.open(key) if use else self.store.pin(key)
        visible = key in self.entries and self.entries[key][3]
        assert (handle is not None) == visible
        if visible:
            self.handles.append(handle)
            if use:
                self.entries[key][2] = self.tick()

    @invariant()
    def agrees(self):
        self.store.check_integrity()
        visible = {key for key, entry in self.entries.items() if entry[3]}
        assert {key for key in range(10) if key in self.store} == visible
        assert {key for key in range(10) if self.store.is_saving(key)} == set(
            self.entries
        ) - visible
        assert self.store.num_entries == len(visible)
        assert self.store.num_bytes == sum(entry[1] for entry in self.entries.values())
        assert self.store.handles == set(self.handles)
        assert self.store.counters.num_refused_saves == self.num_refused
        assert self.store.counters.num_evictions == len(self.evicted)
        assert len(self.memory.out) == len(self.entries)
        assert all(set(handle.buffer.tolist()) == {handle.key} for handle in self.handles)


AgainstModel.TestCase.settings = settings(
    max_examples=int(os.environ.get("DEEPINFER_STATEFUL_EXAMPLES", "150")),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
)
test_the_store_does_what_the_model_does = AgainstModel.TestCase
