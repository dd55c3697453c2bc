"""Live requests by their ids."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.errors import UnknownRequestError, UserError
from deepinfer.live import LiveRequests
from deepinfer.sequence import SamplingParams

PROMPT = np.array([1, 2], np.int32)


def test_arrivals_are_counted_when_they_are_accepted():
    """A request that was only made leaves no trace."""
    live = LiveRequests()
    live.make("refused", PROMPT, SamplingParams())
    first, second = (_accepted(live, name) for name in "ab")
    assert (first.arrival, second.arrival) == (0, 1)
    assert live.find("b") is second
    with pytest.raises(UnknownRequestError, match="'refused'"):
        live.find("refused")


def test_an_id_is_free_again_once_its_request_has_ended():
    """Until then nobody else may have it."""
    live = LiveRequests()
    seq = _accepted(live, "a")
    with pytest.raises(UserError, match="'a' is already in use"):
        live.make("a", PROMPT, SamplingParams())
    live.forget(seq)
    assert live.make("a", PROMPT, SamplingParams()).arrival == 1


def _accepted(live, name):
    seq = live.make(name, PROMPT, SamplingParams())
    live.accept(seq)
    return seq
