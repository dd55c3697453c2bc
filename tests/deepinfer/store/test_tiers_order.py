"""Memory with a directory behind it: who waits for whom, and calls in any order.

The worker's jobs are held up or done one by one, on its own thread between other calls, where a
test says so. `DEEPINFER_STATEFUL_EXAMPLES` sets how many runs the state machine makes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer.errors import OwnershipError
from deepinfer.store.directory import DirectoryStore
from deepinfer.store.memory import HostStore
from deepinfer.store.tiers import TieredStore
from tests.deepinfer.store.entries import BUDGET, MODEL, file_of, holds, opened, rows
from tests.deepinfer.store.tiered import SIZE, found, save, with_turns

ROOT = Path(__file__).resolve().parents[3]

# -- who waits -----------------------------------------------------------------------------------


def test_nobody_waits_for_a_slow_disk(held):
    """Looking, loading, saving and polling go on while no read and no save ends."""
    assert held.has(1, None)
    fetches = [held.open(1, None), held.open(2, 1)]
    held.directory.wait_until_begun()
    for key in (10, 11, 12):
        assert save(held, key)
        assert found(held.open(key, None))
        held.poll()
        assert held.has(1, None)
        held.check_integrity()
    assert not any(fetch.ready for fetch in fetches)
    assert held.directory.calls == [("read", 1)]
    held.directory.let_go()
    held.drain()
    assert all(map(found, fetches))


def test_reads_go_before_the_saves_that_wait(held):
    """A request waits for a read; nobody for a save."""
    for key in (10, 11, 12):
        assert save(held, key)
    held.directory.wait_until_begun()
    held.open(1, None)
    held.directory.let_go()
    held.drain()
    assert held.directory.calls == [("save", 10), ("read", 1), ("save", 11), ("save", 12)]


def test_two_who_want_one_entry_share_its_read(held):
    """Each has a handle of its own, and the bytes stay until both have closed."""
    first, second = (held.open(1, None) for _ in range(2))
    assert held.begin_save(1, None, SIZE) is None
    held.directory.let_go()
    held.drain()
    assert held.directory.calls == [("read", 1)]
    assert held.counters.num_file_hits == 2
    first.close()
    assert found(second)
    assert len(held.host.handles) == 1


@pytest.mark.parametrize("when", ["before", "running", "done", "ready", "missed", "in memory"])
def test_a_fetch_is_given_up_once_at_any_time(held, when):
    """A read that has begun lands in memory, one that has not is left out; nothing is held."""
    directory = held.directory
    first = held.open(1, None)
    directory.wait_until_begun()
    if when == "before":
        fetch = held.open(2, 1)
    elif when == "missed":
        fetch = held.open(4, 3)
    elif when == "in memory":
        assert save(held, 9)
        fetch = held.open(9, None)
    else:
        fetch = first
    if when in ("done", "ready"):
        directory.let_go()
        held._worker.submit(int).result()
    if when == "ready":
        held.poll()
    assert fetch.ready == (when in ("ready", "missed", "in memory"))
    fetch.cancel()
    held.check_integrity()
    for _ in range(2):
        with pytest.raises(OwnershipError, match=r"fetch of entry 0+[1249] has ended"):
            fetch.close()
    directory.let_go()
    held.drain()
    assert (1 in held.host, 2 in held.host) == (True, False)
    assert ("read", 2) not in directory.calls
    if fetch is not first:
        assert found(first)
        first.close()
    assert not held.host.handles
    assert held.counters.num_given_up == (when in ("before", "running", "done"))
    held.check_integrity()


def test_a_handle_that_was_closed_by_itself_ends_its_fetch(held):
    """Closing that fetch, too, would take away another holder's hold."""
    assert save(held, 9)
    fetch = held.open(9, None)
    held.host.close(fetch.handle)
    with pytest.raises(OwnershipError, match="has ended"):
        fetch.close()


def test_close_waits_for_a_read_and_ends_the_thread(held):
    """The fetch has its bytes; then there is only memory, and closing again is no matter."""
    fetch = held.open(1, None)
    held.directory.wait_until_begun()
    (thread,) = (one for one in threading.enumerate() if one.name.startswith("store"))
    threading.Timer(0.05, held.directory.let_go).start()
    held.close()
    assert not thread.is_alive()
    assert found(fetch)
    held.close()
    assert not held.has(2, 1)
    assert not found(held.open(2, 1))
    assert save(held, 9)
    assert found(held.open(9, None))
    held.poll()
    held.check_integrity()
    assert not holds(opened(held.directory._path), 9)
    fetch.close()


def test_a_process_that_ends_without_close_ends(tmp_path):
    """An error on its way out leaves no process that hangs, and what was committed has a file."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from deepinfer.store.directory import DirectoryStore\n"
        "from deepinfer.store.memory import HostStore\n"
        "from deepinfer.store.tiers import TieredStore\n"
        "store = TieredStore(HostStore(10), DirectoryStore(Path(sys.argv[1]), b'm' * 16, 1000))\n"
        "handle = store.begin_save(1, None, 1)\n"
        "handle.buffer[:] = 7\n"
        "store.commit(handle)\n"
        "raise SystemExit(3)\n"
    )
    command = [sys.executable, "-c", code, tmp_path]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == 3
    store = TieredStore(HostStore(10), opened(tmp_path))
    fetch = store.open(1, None)
    store.close()
    assert fetch.handle.buffer.tolist() == [7]


def test_a_read_that_was_left_out_is_done_for_who_comes_after_that(filled):
    """Given up before it began, wanted again before `poll` has seen that it was left out."""
    store = with_turns(opened(filled), 1000)
    store.open(1, None).close()
    store._worker.result()
    fetch = store.open(1, None)
    store.poll()
    assert not fetch.ready
    store.check_integrity()
    store.drain()
    assert found(fetch)
    assert store.counters.num_reads == 1


# -- in any order --------------------------------------------------------------------------------

KEYS = st.integers(1, 9)
BYTES = 12


class Judged(DirectoryStore):
    """A directory that keeps the keys whose file was bad, until the entry is saved again."""

    def __init__(self, path):
        super().__init__(path, MODEL, BUDGET)
        self.bad = set()

    def read(self, key, parent, into):
        right = super().read(key, parent, into)
        if not right:
            self.bad.add(key)
        return right

    def save(self, key, parent, content):
        there = super().save(key, parent, content)
        if there:
            self.bad.discard(key)
        return there


class InAnyOrder(RuleBasedStateMachine):
    """Saves, loads, turns of the worker and damage: no wrong bytes, no loss without a reason.

    Keys are chains of three; an entry has as many bytes as its key modulo 4, and one. Somebody else
    may save one of more bytes.
    """

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.store = with_turns(Judged(self.path), BYTES)
        self.saving, self.fetches = [], []
        self.sound = set()  # keys with a file nobody damaged at any time
        self.damaged = set()
        self.num_opens = self.num_given_up = 0

    def place(self, key):
        return key, None if key % 3 == 1 else key - 1

    @property
    def num_refused(self):
        return self.store.host.counters.num_refused_saves

    @rule(key=KEYS)
    def begin_save(self, key):
        lacks, num_refused = self.store.lacks(*self.place(key)), self.num_refused
        handle = self.store.begin_save(*self.place(key), 1 + key % 4)
        if handle is not None:
            handle.buffer[:] = rows(key, len(handle.buffer))
            self.saving.append(handle)
        else:
            assert not lacks or self.num_refused > num_refused

    @precondition(lambda self: self.saving)
    @rule(which=st.integers(0, 99), well=st.booleans())
    def end_save(self, which, well):
        handle = self.saving.pop(which % len(self.saving))
        (self.store.commit if well else self.store.abandon)(handle)

    @rule(key=KEYS)
    def has(self, key):
        said = self.store.has(*self.place(key))
        assert said or key not in self.store.host
        assert said or key not in self.sound - self.damaged or self.is_saving(key)
        assert self.store.lacks(*self.place(key)) == (not said and not self.is_saving(key))

    def is_saving(self, key):
        return any(handle.key == key and handle.saving for handle in self.store.host.handles)

    @rule(key=KEYS)
    def open(self, key):
        there, reading = key in self.store.host, key in self.store._reads
        said, num_refused = self.store.has(*self.place(key)), self.num_refused
        num_stuck = self.num_stuck(self.place(key)[1])
        fetch = self.store.open(*self.place(key))
        self.num_opens += 1
        if self.num_refused > num_refused:
            assert num_stuck + self.store.directory.known(*self.place(key)) > BYTES
            assert not there
            assert not reading
            assert not found(fetch)
        elif there:
            assert found(fetch)
        elif said or reading:
            assert not fetch.ready
        else:
            assert not found(fetch)
        self.fetches.append(fetch)

    def num_stuck(self, parent):
        """Bytes of entries that cannot go for one behind `parent`: in use, or continued by such."""
        stuck = set()
        for key in [parent, *(handle.key for handle in self.store.host.handles)]:
            while key in self.store.host._entries:
                stuck.add(key)
                key = self.place(key)[1]
        return sum(len(self.store.host._entries[key].buffer) for key in stuck)

    @precondition(lambda self: self.fetches)
    @rule(which=st.integers(0, 99))
    def close(self, which):
        fetch = self.fetches.pop(which % len(self.fetches))
        self.num_given_up += not fetch.ready
        fetch.close()

    @precondition(lambda self: self.store._worker.calls)
    @rule()
    def work(self):
        self.store._worker.calls.popleft()()

    @rule()
    def poll(self):
        waiting = [fetch for fetch in self.fetches if not fetch.ready]
        done = {job.handle.key for job in self.store._done if job.outcome is not None}
        self.store.poll()
        assert all(fetch.ready == (fetch.key in done) for fetch in waiting)

    @rule(key=KEYS, how=st.sampled_from(["vanishes", "flips", "cut", "grows"]))
    def damage(self, key, how):
        path = file_of(self.path, *self.place(key))
        if path.exists():
            content = path.read_bytes()
            path.unlink()
            self.damaged.add(key)
            if how == "grows":
                assert opened(self.path).save(*self.place(key), rows(key, 2 + key % 4))
            elif how != "vanishes":
                end = bytes([content[-1] ^ 1]) if how == "flips" else b""
                path.write_bytes(content[:-1] + end)

    @rule(restart=st.booleans())
    def drain(self, restart):
        self.store.drain()
        assert all(fetch.ready for fetch in self.fetches)
        assert not self.store._writes
        directory = opened(self.path)
        for key in set(range(1, 10)) - self.damaged:
            if key in self.store.host:
                assert holds(directory, *self.place(key))
                self.sound.add(key)
        if restart and not self.fetches and not self.saving:
            self.store.close()
            self.store = with_turns(Judged(self.path), BYTES)
            self.num_opens = self.num_given_up = 0
            for key in self.sound - self.damaged:
                assert self.store.has(*self.place(key))

    @invariant()
    def agrees(self):
        self.store.check_integrity()
        for key in self.store.directory.bad:
            assert not self.store.has(*self.place(key)) or key in self.store.host
        for fetch in self.fetches:
            assert not fetch.ready or fetch.handle is None or found(fetch)
        counters = self.store.counters
        waiting = sum(not fetch.ready for fetch in self.fetches)
        hits = counters.num_memory_hits + counters.num_file_hits
        assert hits + counters.num_misses + self.num_given_up + waiting == self.num_opens
        assert counters.num_given_up == self.num_given_up
        open_fetches = sum(fetch.handle is not None for fetch in self.fetches)
        jobs = len(self.store._reads) + len(self.store._writes)
        assert len(self.store.host.handles) == len(self.saving) + open_fetches + jobs

    def teardown(self):
        for handle in self.saving:
            self.store.abandon(handle)
        for fetch in self.fetches:
            fetch.close()
        self.store.close()
        assert not self.store.host.handles
        self.folder.cleanup()


InAnyOrder.TestCase.settings = settings(
    max_examples=int(os.environ.get("DEEPINFER_STATEFUL_EXAMPLES", "60")),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
)
test_in_any_order = InAnyOrder.TestCase
