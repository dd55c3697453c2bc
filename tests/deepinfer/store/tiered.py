"""A `TieredStore` whose disk or whose worker waits for the test, and what is asked of one."""

from __future__ import annotations

import threading
from collections import deque

from deepinfer.store.directory import DirectoryStore
from deepinfer.store.memory import HostStore
from deepinfer.store.tiers import TieredStore
from tests.deepinfer.store.entries import BUDGET, MODEL, PoisonedMemory, rows

SIZE = 200
PATIENCE_S = 20


class HeldDirectory(DirectoryStore):
    """A directory whose reads and saves begin when they are let go; `calls` has them in order."""

    def __init__(self, path):
        super().__init__(path, MODEL, BUDGET)
        self.calls = []
        self.begun = threading.Semaphore(0)
        self.may_go = threading.Semaphore(0)

    def hold_up(self, *call):
        self.calls.append(call)
        self.begun.release()
        assert self.may_go.acquire(timeout=PATIENCE_S)

    def let_go(self, count=1000):
        self.may_go.release(count)

    def wait_until_begun(self):
        assert self.begun.acquire(timeout=PATIENCE_S)

    def read(self, key, parent, into):
        self.hold_up("read", key)
        return super().read(key, parent, into)

    def save(self, key, parent, content):
        self.hold_up("save", key)
        return super().save(key, parent, content)


class OneByOne:
    """An executor whose calls are made when the test says so."""

    def __init__(self):
        self.calls = deque()

    def submit(self, call):
        self.calls.append(call)
        return self

    def result(self):
        while self.calls:
            self.calls.popleft()()

    def shutdown(self):
        assert not self.calls


def with_turns(directory, budget):
    """A store whose worker does one job when the test says so."""
    store = TieredStore(HostStore(budget, PoisonedMemory()), directory)
    store._worker = OneByOne()
    return store


def save(store, key, parent=None, num_bytes=SIZE):
    """Save an entry with its rows; whether there was room."""
    handle = store.begin_save(key, parent, num_bytes)
    if handle is None:
        return False
    handle.buffer[:] = rows(key, num_bytes)
    store.commit(handle)
    return True


def found(fetch):
    """Whether a fetch that is ready has its entry; never other bytes."""
    assert fetch.ready
    if fetch.handle is None:
        return False
    assert fetch.handle.buffer.tobytes() == rows(fetch.key, len(fetch.handle.buffer)).tobytes()
    return True


def fetched(store, key, parent=None):
    """Whether an entry can be loaded, and nothing is left behind."""
    fetch = store.open(key, parent)
    store.drain()
    outcome = found(fetch)
    fetch.close()
    store.check_integrity()
    return outcome
