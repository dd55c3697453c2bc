"""Entries with known rows, for tests of a directory."""

from __future__ import annotations

import logging

import numpy as np

from deepinfer.store.directory import TEMPORARY_NAME, DirectoryStore, file_name
from deepinfer.store.segment import HEADER_BYTES, Identity

MODEL, OTHER_MODEL = b"m" * 16, b"o" * 16
BUDGET = 1 << 20
KEY, PARENT = 0xABC, 0x123
ONE = HEADER_BYTES + 200  # bytes of a file


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
