"""A directory that others use too: leftovers of the killed, living neighbours, and the budget."""

from __future__ import annotations

import fcntl
import re
import threading
import time

from deepinfer.store import directory
from deepinfer.store.segment import HEADER_BYTES, Identity
from tests.deepinfer.store.entries import (
    KEY,
    MODEL,
    ONE,
    OTHER_MODEL,
    PARENT,
    file_of,
    holds,
    leftovers,
    opened,
    rows,
    warnings_of,
)

# -- leftovers and neighbours --------------------------------------------------------------------


def test_what_a_killed_process_was_writing_is_removed(good):
    """At the next start; files with other names are let alone, even if they look alike."""
    for name in ("saving-0123456789abcdef.part", "saving-ffffffffffffffff.part"):
        (good / name).write_bytes(b"half")
    kept = ("notes.txt", "saving-0123456789abcdef.part~", "saving-xyz.part", "saving.part")
    for name in kept:
        (good / name).write_bytes(b"mine")
    store = opened(good)
    assert {file.name for file in good.iterdir()} == {*kept, file_of(good, KEY, PARENT).name}
    assert store.num_bytes == HEADER_BYTES + 200


def test_what_a_living_process_is_writing_is_let_alone(tmp_path):
    """It is locked by whoever writes it."""
    path = tmp_path / "saving-0123456789abcdef.part"
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        opened(tmp_path)
        assert path.exists()
    opened(tmp_path)
    assert not path.exists()


def test_a_file_taken_for_a_leftover_before_it_was_locked_is_made_anew(tmp_path, monkeypatch):
    """Another process starts in the moment between making a file and locking it."""
    store, lock = opened(tmp_path), fcntl.flock
    removed = []

    def late(fd, how):
        if not removed:
            removed.extend(leftovers(tmp_path))
            monkeypatch.setattr(fcntl, "flock", lock)
            opened(tmp_path)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    assert store.save(1, None, rows(1))
    assert len(removed) == 1
    assert holds(store, 1)


def test_two_stores_see_one_another(tmp_path, caplog):
    """What one saves the other finds, and saving the same twice at once is no matter."""
    one, two = opened(tmp_path), opened(tmp_path)
    assert one.save(1, None, rows(1))
    assert holds(two, 1)
    one._write(Identity(MODEL, 1, None), rows(1))
    assert holds(two, 1)
    assert two.num_bytes == one.num_bytes
    assert not warnings_of(caplog)


def test_a_listing_under_way_hides_nothing(good, monkeypatch):
    """What was known before it is known until the new one is whole."""
    store, place = opened(good), directory._place
    other = opened(good)
    assert other.save(1, None, rows(1))
    seen = []

    def slow(name):
        seen.append((store.known(KEY, PARENT), store.known(1, None)))
        return place(name)

    monkeypatch.setattr(directory, "_place", slow)
    store._listed()
    assert seen == [(200, None)] * 2
    assert (store.known(KEY, PARENT), store.known(1, None)) == (200, 200)


def test_threads_and_stores_at_once(tmp_path, caplog):
    """Saves, loads and evictions of two stores with two threads each: never wrong, never an error.

    Together they stay below the budget, but for what a store writes before it looks again.
    """
    budget = 40 * (HEADER_BYTES + 200)
    stores = [opened(tmp_path, budget=budget) for _ in range(2)]
    failures, hits = [], []

    def work(store, start):
        try:
            for number in range(200):
                key = 1 + (start + 7 * number) % 60
                parent = None if key % 3 == 1 else key - 1
                if not holds(store, key, parent):
                    store.save(key, parent, rows(key))
                else:
                    hits.append(key)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(stores[i % 2], 11 * i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(hits) > 50
    expected = re.compile("has vanished|not saved: no more room")
    assert all(expected.search(warning) for warning in warnings_of(caplog))
    num_bytes = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert num_bytes <= budget * 17 // 16 + 4 * (HEADER_BYTES + 200)
    assert not leftovers(tmp_path)


# -- budget --------------------------------------------------------------------------------------


def there(path, keys):
    """Which entries have files, by their names alone."""
    found = {int(file.name.split("-")[1], 16) for file in path.iterdir()}
    return [key for key in keys if key in found]


def test_the_oldest_use_goes_first_across_restarts(tmp_path):
    """A use is written into the file's time, so the next process knows it."""
    store = opened(tmp_path, budget=3 * ONE)
    for key in (1, 2, 3):
        assert store.save(key, None, rows(key))
    assert holds(store, 1)
    store = opened(tmp_path, budget=3 * ONE)
    assert store.save(4, None, rows(4))
    assert there(tmp_path, range(5)) == [1, 3, 4]
    assert store.counters.num_evicted_tail == 1
    assert store.num_bytes == 3 * ONE


def test_the_time_of_a_file_is_our_own(tmp_path, monkeypatch):
    """The system's may be the same for all files written within some milliseconds."""
    store = opened(tmp_path)
    monkeypatch.setattr(time, "time_ns", iter(range(7, 100)).__next__)
    for key in (3, 2, 1):
        assert store.save(key, None, rows(key))
    assert holds(store, 3)
    assert [file_of(tmp_path, key).stat().st_mtime_ns for key in (3, 2, 1)] == [10, 8, 9]


def test_the_last_of_a_chain_goes_before_its_first(tmp_path):
    """Also when the chain was written by another process, oldest first."""
    store = opened(tmp_path, budget=4 * ONE)
    for key, parent in ((1, None), (2, 1), (3, 2), (9, None)):
        assert store.save(key, parent, rows(key))
    store = opened(tmp_path, budget=4 * ONE)
    assert store.save(10, None, rows(10))
    assert there(tmp_path, range(11)) == [1, 2, 9, 10]
    assert store.save(11, None, rows(11))
    assert there(tmp_path, range(12)) == [1, 9, 10, 11]


def test_a_chain_longer_than_the_budget_keeps_its_head(tmp_path, caplog):
    """A parent does not go for its own child; what does not fit is refused with one warning."""
    store = opened(tmp_path, budget=3 * ONE)
    saved = [store.save(key, key - 1 or None, rows(key)) for key in range(1, 6)]
    assert saved == [True, True, True, False, False]
    assert there(tmp_path, range(6)) == [1, 2, 3]
    assert warnings_of(caplog) == [
        f"{tmp_path}: entries are not saved: no more room within {3 * ONE} bytes"
    ]


def test_a_smaller_budget_takes_effect_at_the_start(tmp_path):
    """And an entry larger than all of it evicts nothing."""
    store = opened(tmp_path)
    for key in range(1, 11):
        assert store.save(key, None, rows(key))
    store = opened(tmp_path, budget=4 * ONE)
    assert there(tmp_path, range(11)) == [7, 8, 9, 10]
    assert store.num_bytes == 4 * ONE
    assert not store.save(20, None, rows(20, 5 * ONE))
    assert there(tmp_path, range(11)) == [7, 8, 9, 10]


def test_files_of_other_models_and_versions_count_and_go(tmp_path):
    """They are as large as others; files that are not of this kind neither count nor go."""
    assert opened(tmp_path, OTHER_MODEL).save(1, None, rows(1))
    old = file_of(tmp_path, 2)
    old.with_suffix(".kv0").write_bytes(bytes(ONE))
    (tmp_path / "notes.txt").write_bytes(bytes(10 * ONE))
    twin = file_of(tmp_path, 2, 5).with_suffix(".kv0")
    twin.write_bytes(bytes(ONE))
    store = opened(tmp_path, budget=3 * ONE)
    assert store.num_bytes == 3 * ONE
    for key in (3, 4, 5):
        assert store.save(key, None, rows(key))
    assert there_names(tmp_path) == {file_of(tmp_path, key).name for key in (3, 4, 5)}
    assert (tmp_path / "notes.txt").exists()


def there_names(path):
    return {file.name for file in path.iterdir() if file.suffix != ".txt"}


def test_another_store_s_files_are_seen_before_the_budget_is_passed_by_much(tmp_path):
    """A store that wrote a sixteenth of the budget looks at what the others did."""
    budget = 32 * ONE
    one, two = (opened(tmp_path, budget=budget) for _ in range(2))
    for key in range(1, 200, 2):
        assert one.save(key, None, rows(key))
        assert two.save(key + 1, None, rows(key + 1))
        num_bytes = sum(file.stat().st_size for file in tmp_path.iterdir())
        assert num_bytes <= budget + budget // 16 + ONE
    assert num_bytes >= budget * 3 // 4
