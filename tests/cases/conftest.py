"""Fixtures of the cases."""

from __future__ import annotations

import pytest

from deepinfer.store import keys
from tests.cases.stores import SEGMENT


@pytest.fixture
def short_segments(monkeypatch):
    """Entries of a store end every 8 tokens, so that short prompts have some."""
    monkeypatch.setattr(keys, "SEGMENT_TOKENS", SEGMENT)
