"""What tests of a directory begin with, alone or behind memory."""

from __future__ import annotations

import pytest

from deepinfer.store.memory import HostStore
from deepinfer.store.tiers import TieredStore
from tests.deepinfer.store.entries import KEY, PARENT, PoisonedMemory, opened, rows
from tests.deepinfer.store.tiered import SIZE, HeldDirectory


@pytest.fixture
def good(tmp_path):
    """A directory with one good entry, KEY behind PARENT."""
    assert opened(tmp_path).save(KEY, PARENT, rows(KEY))
    return tmp_path


@pytest.fixture
def filled(tmp_path):
    """A directory with files of a chain 1-2-3."""
    directory = opened(tmp_path)
    for key in (1, 2, 3):
        assert directory.save(key, key - 1 or None, rows(key))
    return tmp_path


@pytest.fixture
def held(filled):
    """A store, the files of 1-2-3 behind it, that moves no bytes until let go."""
    store = TieredStore(HostStore(16 * SIZE, PoisonedMemory()), HeldDirectory(filled))
    yield store
    store.directory.let_go()
    store.close()
