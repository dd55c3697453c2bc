"""Memory with a directory behind it: what is found, what is a miss, and what gets a file.

The worker is the real thread; where a test says so, the disk holds it up.
"""

from __future__ import annotations

import threading

import pytest

from deepinfer.errors import OwnershipError, UserError
from deepinfer.store import tiers
from deepinfer.store.keys import state_key
from deepinfer.store.memory import HostStore
from deepinfer.store.tiers import TieredStore
from tests.deepinfer.store.entries import (
    OTHER_MODEL,
    PoisonedMemory,
    file_of,
    holds,
    opened,
    rows,
    warnings_of,
)
from tests.deepinfer.store.tiered import SIZE, HeldDirectory, fetched, found, save

# -- hits and misses -----------------------------------------------------------------------------


def test_what_one_process_saves_the_next_one_finds(tmp_path):
    """From memory at once; after a restart from files, and then from memory again."""
    with_files = TieredStore(HostStore(1000), opened(tmp_path))
    assert not with_files.has(1, None)
    assert save(with_files, 1)
    assert save(with_files, 2, 1)
    assert with_files.open(2, 1).ready
    with_files.close()
    assert with_files.counters.num_writes == 2
    assert with_files.counters.bytes_written == 2 * SIZE
    store = TieredStore(HostStore(1000), opened(tmp_path))
    assert store.has(1, None)
    assert store.has(2, 1)
    fetches = [store.open(1, None), store.open(2, 1)]
    store.drain()
    assert all(map(found, fetches))
    assert found(store.open(2, 1))
    counters = store.counters
    assert (counters.num_memory_hits, counters.num_file_hits, counters.num_misses) == (1, 2, 0)
    assert (counters.num_reads, counters.bytes_read, counters.num_writes) == (2, 2 * SIZE, 0)
    store.check_integrity()
    store.close()


def test_without_a_directory_there_is_memory_and_no_thread():
    """Everything is known at once, and nothing waits."""
    before = threading.active_count()
    store = TieredStore(HostStore(1000))
    assert save(store, 1)
    abandoned = store.begin_save(2, 1, SIZE)
    store.abandon(abandoned)
    assert store.has(1, None)
    assert not store.has(2, 1)
    assert found(store.open(1, None))
    assert not found(store.open(2, 1))
    store.drain()
    assert threading.active_count() == before
    store.close()
    store.close()


def test_an_entry_has_the_size_it_was_saved_with(filled):
    """Whoever opens it says none: memory's own, or the one the directory knows."""
    assert opened(filled).save(4, 3, rows(4, 3 * SIZE))
    store = TieredStore(HostStore(1000), opened(filled))
    assert save(store, 9, None, 7)
    fetches = [store.open(9, None), store.open(4, 3)]
    store.drain()
    assert all(map(found, fetches))
    assert [len(fetch.handle.buffer) for fetch in fetches] == [7, 3 * SIZE]
    store.close()


def test_an_entry_that_memory_can_never_have_is_not_there(filled):
    """Larger than its budget, or of no bytes; nothing is read, nothing goes for it."""
    assert opened(filled).save(4, 3, rows(4, SIZE + 1))
    assert opened(filled).save(5, 4, rows(5, 0))
    store = TieredStore(HostStore(SIZE), HeldDirectory(filled))
    for key in (4, 5):
        assert not store.has(key, key - 1)
        assert store.lacks(key, key - 1)
        assert not found(store.open(key, key - 1))
    assert store.has(3, 2)
    assert store.directory.calls == []
    assert store.host.counters.num_refused_saves == 0
    store.close()


def test_a_save_is_of_use_for_what_is_neither_there_nor_on_its_way(held):
    """In memory, in a file, being saved, and being read while its file is gone: of none."""
    assert save(held, 9)
    saving = held.begin_save(8, None, SIZE)
    assert [held.lacks(*place) for place in ((9, None), (1, None), (8, None))] == [False] * 3
    assert [held.has(*place) for place in ((9, None), (1, None), (8, None))] == [True, True, False]
    assert held.lacks(7, None)
    held.open(1, None)
    held.directory._forget(file_of(held.directory._path, 1).name)
    assert not held.has(1, None)
    assert not held.lacks(1, None)
    held.abandon(saving)
    assert held.lacks(8, None)


def test_what_is_being_saved_is_not_there_though_it_has_a_file(held):
    """It cannot be read beside: its place in memory is taken until the save has ended."""
    saving = held.begin_save(1, None, SIZE)
    assert not held.has(1, None)
    assert not held.lacks(1, None)
    assert not found(held.open(1, None))
    held.abandon(saving)
    assert held.has(1, None)


@pytest.mark.parametrize("damage", ["corrupt", "cut off", "vanished", "foreign", "folder"])
def test_a_bad_file_is_a_miss_once_and_is_replaced(filled, damage, caplog):
    """It became so behind the listing; from the read on it is not there, and can be saved anew."""
    store = TieredStore(HostStore(1000), opened(filled))
    path = file_of(filled, 2, 1)
    content = bytearray(path.read_bytes())
    path.unlink()
    if damage == "corrupt":
        content[-1] ^= 1
        path.write_bytes(content)
    elif damage == "cut off":
        path.write_bytes(content[:-1])
    elif damage == "foreign":
        assert opened(filled, OTHER_MODEL).save(2, 1, rows(5))
        file_of(filled, 2, 1, OTHER_MODEL).rename(path)
    elif damage == "folder":
        path.mkdir()
    assert store.has(2, 1)
    assert not fetched(store, 2, 1)
    assert not store.has(2, 1)
    assert store.lacks(2, 1)
    assert store.open(2, 1).ready
    assert store.host.num_entries == 0
    assert len(warnings_of(caplog)) == 1
    assert store.directory.counters.num_misses == 1
    assert fetched(store, 1)
    if damage != "folder":
        assert save(store, 2, 1)
        store.drain()
        assert holds(opened(filled), 2, 1)
        assert store.directory.known(2, 1) == SIZE
    store.close()


@pytest.mark.parametrize("cut", [1, SIZE - 1, SIZE, SIZE + 1])
def test_a_file_that_was_cut_off_before_the_listing_is_a_miss(filled, cut):
    """Whatever the listing makes of its length; then it is saved anew."""
    path = file_of(filled, 3, 2)
    path.write_bytes(path.read_bytes()[:-cut])
    store = TieredStore(HostStore(1000), opened(filled))
    assert store.directory.known(3, 2) == (SIZE - cut if cut <= SIZE else None)
    assert not fetched(store, 3, 2)
    assert store.lacks(3, 2)
    assert save(store, 3, 2)
    store.close()
    assert holds(opened(filled), 3, 2)


def test_a_directory_that_raises_is_a_miss_and_a_warning(held, monkeypatch, caplog):
    """No fault of a file is the fault of a request; the worker goes on."""

    def fail(*args):
        raise RuntimeError("of a kind nobody thought of")

    monkeypatch.setattr(held.directory, "hold_up", fail)
    assert held.has(1, None)
    assert not fetched(held, 1)
    assert held.lacks(1, None)
    assert save(held, 9)
    held.drain()
    assert held.counters.num_refused_writes == 1
    assert len(warnings_of(caplog)) == 2
    assert "of a kind nobody thought of" in caplog.text
    monkeypatch.undo()
    held.directory.let_go()
    assert fetched(held, 2, 1)


def test_no_room_for_a_read_is_a_miss(filled):
    """Memory that is held is not taken away; nothing is read."""
    store = TieredStore(HostStore(SIZE), opened(filled))
    assert save(store, 9)
    copying = store.open(9, None)
    store.drain()
    assert not found(store.open(1, None))
    assert found(copying)
    copying.close()
    assert fetched(store, 1)
    store.close()


def test_a_read_needs_no_parent_in_memory(filled):
    """Whoever opens the entry wants it now; a save behind a parent that is not there is refused."""
    store = TieredStore(HostStore(SIZE), opened(filled))
    assert save(store, 9)
    store.drain()
    assert not save(store, 5, 4)
    assert fetched(store, 3, 2)
    assert 9 not in store.host
    store.close()


def test_what_another_process_saves_is_found_after_the_next_listing(filled):
    """Not before, however often it is asked for; `find` makes it known, too."""
    directory = opened(filled)
    store = TieredStore(HostStore(1000), directory)
    for key in (4, 5):
        assert opened(filled).save(key, key - 1, rows(key))
        assert not store.has(key, key - 1)
        assert not found(store.open(key, key - 1))
    assert directory.find(4, 3) == SIZE
    assert (store.has(4, 3), store.has(5, 4)) == (True, False)
    directory._listed()
    assert store.has(5, 4)
    assert fetched(store, 5, 4)
    store.close()


def test_what_was_not_there_is_found_once_it_was_saved(tmp_path):
    """Its file is known, also when memory has no room for it any more."""
    store = TieredStore(HostStore(SIZE), opened(tmp_path))
    assert not store.has(1, None)
    assert save(store, 1)
    store.drain()
    assert save(store, 2)
    store.drain()
    assert 1 not in store.host
    assert store.has(1, None)
    assert fetched(store, 1)
    store.close()


# -- memory --------------------------------------------------------------------------------------


def test_a_slow_disk_holds_a_quarter_of_the_memory(held):
    """More can be evicted before it has a file; what stays in memory gets one in its turn."""
    for key in range(100, 140):
        assert save(held, key)
        held.poll()
        held.check_integrity()
    assert held._num_waiting_bytes == 4 * SIZE
    assert held.host.num_bytes == 16 * SIZE
    held.directory.let_go()
    held.drain()
    kept = [key for key in range(100, 140) if key in held.host]
    assert len(kept) == 16
    assert {100, 101, 102, 103} < set(kept)
    with_files = [key for key in range(100, 140) if holds(opened(held.directory._path), key)]
    assert with_files == kept
    assert (held.counters.num_writes, held.counters.num_dropped_writes) == (16, 24)


def test_one_entry_larger_than_that_quarter_gets_its_file(tmp_path):
    """When nothing else waits."""
    store = TieredStore(HostStore(2 * SIZE), opened(tmp_path))
    assert save(store, 1)
    assert save(store, 2)
    store.close()
    assert store.counters.num_writes == 2


def test_what_is_owed_a_file_is_bounded(held, monkeypatch):
    """Past `MAX_KEYS` the entry that was committed first goes without."""
    monkeypatch.setattr(tiers, "MAX_KEYS", 2)
    for key in range(100, 110):
        assert save(held, key)
    held.directory.let_go()
    held.drain()
    saved = [key for call, key in held.directory.calls]
    assert saved == [100, 101, 102, 103, 108, 109]
    assert held.counters.num_dropped_writes == 4


def test_bytes_stay_while_a_copy_or_a_save_to_a_file_is_open(filled):
    """Room for one entry: nothing is saved over what is read by others."""
    store = TieredStore(HostStore(SIZE, PoisonedMemory()), HeldDirectory(filled))
    fetch = store.open(1, None)
    store.directory.let_go(1)
    store.drain()
    assert not save(store, 9)
    assert found(fetch)
    fetch.close()
    assert save(store, 9)
    assert not save(store, 8)
    store.directory.let_go(2)
    store.drain()
    assert holds(opened(filled), 9)
    assert save(store, 8)
    store.close()


def test_the_state_at_a_segment_s_end_continues_the_segment():
    """It has a key of its own, goes before its segment, and is not evicted by it."""
    keys = [state_key(key) for key in (1, 2, 1 << 127)]
    assert len({*keys, 1, 2, 1 << 127}) == 6
    assert keys[0] == 0xC3E9F7817D551202F28A15359092C00A  # in files of earlier processes
    with pytest.raises(UserError, match="segment_key: -1; expected"):
        state_key(-1)
    store = TieredStore(HostStore(4))
    assert save(store, 1, None, 1)
    assert save(store, state_key(1), 1, 1)
    assert save(store, 2, 1, 1)
    assert save(store, state_key(2), 2, 1)
    assert found(store.open(state_key(2), 2))
    assert save(store, 9, None, 1)
    assert [key in store.host for key in (1, keys[0], 2, keys[1])] == [True, False, True, True]


@pytest.mark.parametrize("damage", ["handle", "bytes", "fetch", "worker"])
def test_the_integrity_check_sees(held, damage):
    """Each of its comparisons can fail."""
    fetch = held.open(1, None)
    assert save(held, 9)
    held.check_integrity()
    before = (held._worker, held._num_waiting_bytes, held._reads[1])
    if damage == "handle":
        held._reads[1] = held._writes[9]
    elif damage == "bytes":
        held._num_waiting_bytes += 1
    elif damage == "fetch":
        fetch.ready = True
    else:
        held._worker = None
    with pytest.raises(OwnershipError):
        held.check_integrity()
    held._worker, held._num_waiting_bytes, held._reads[1] = before
    fetch.ready = False
