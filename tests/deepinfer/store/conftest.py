"""What tests of a directory begin with."""

from __future__ import annotations

import pytest

from tests.deepinfer.store.entries import KEY, PARENT, opened, rows


@pytest.fixture
def good(tmp_path):
    """A directory with one good entry, KEY behind PARENT."""
    assert opened(tmp_path).save(KEY, PARENT, rows(KEY))
    return tmp_path
