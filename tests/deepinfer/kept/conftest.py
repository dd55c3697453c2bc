"""Entries that end every 8 tokens, so that short prompts have some."""

from __future__ import annotations

import pytest

from deepinfer.store import keys

SEGMENT = 8


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """As the module says."""
    monkeypatch.setattr(keys, "SEGMENT_TOKENS", SEGMENT)
