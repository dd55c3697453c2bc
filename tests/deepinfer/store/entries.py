"""Entries with known rows, and memory that shows who uses what is not theirs any more."""

from __future__ import annotations

import logging

import numpy as np

from deepinfer.store.directory import TEMPORARY_NAME, DirectoryStore, file_name
from deepinfer.store.segment import HEADER_BYTES, Identity

MODEL, OTHER_MODEL = b"m" * 16, b"o" * 16
BUDGET = 1 << 20
KEY, PARENT = 0xABC, 0x123
ONE = HEADER_BYTES + 200  # bytes of a file
FREED = 0xEE


class PoisonedMemory:
    """Memory that overwrites what it takes back, and has `num_bytes` at most."""

    def __init__(self, num_bytes=1 << 20):
        self.left = num_bytes
        self.out = []

    def allocate(self, num_bytes):
        if num_bytes > self.left:
            raise MemoryError
        self.left -= num_bytes
        self.out.append(np.full(num_bytes, 0xAA, np.uint8))
        return self.out[-1]

    def free(self, buffer):
        (index,) = [i for i, own in enumerate(self.out) if own is buffer]  # once, and ours
        self.left += len(self.out.pop(index))
        buffer[:] = FREED


def rows(key, num_bytes=200):
    """What the entry of a key holds."""
    return np.random.default_rng(key).integers(0, 256, num_bytes, np.uint8)


def opened(path, model=MODEL, budget=BUDGET):
    return DirectoryStore(path, model, budget)


def loaded(store, key, parent=None):
    """The entry's rows, or None: what a user of the store gets."""
    num_bytes = store.find(key, parent)
    if num_bytes is None:
        return None
    into = np.full(num_bytes, 0xAA, np.uint8)
    return into if store.read(key, parent, into) else None


def holds(store, key, parent=None):
    """Whether the store gives the right rows; never other ones."""
    found = loaded(store, key, parent)
    assert found is None or found.tobytes() == rows(key, len(found)).tobytes()
    return found is not None


def file_of(path, key, parent=None, model=MODEL):
    return path / file_name(Identity(model, key, parent))


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def leftovers(path):
    return [file.name for file in path.iterdir() if TEMPORARY_NAME.fullmatch(file.name)]
