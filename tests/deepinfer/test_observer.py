"""Observers: told of everything, in the order given."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from deepinfer.observer import CALLS, KV, Access, Observer, Observers


def test_an_observer_takes_every_call_and_does_nothing():
    """Whoever watches overrides only what it wants to know."""
    observer = Observer()
    for name in CALLS:
        count = len(inspect.signature(getattr(observer, name)).parameters)
        assert getattr(observer, name)(*[()] * count) is None


@pytest.mark.parametrize("name", CALLS)
def test_several_observers_are_told_in_order(name):
    """Each of every call, with the same arguments."""
    told = []

    def listener(number):
        def tell(*args):
            told.append((number, args))

        observer = Observer()
        setattr(observer, name, tell)
        return observer

    both = Observers([listener(1), listener(2)])
    count = len(inspect.signature(getattr(Observer(), name)).parameters)
    getattr(both, name)(*range(count))
    assert told == [(1, tuple(range(count))), (2, tuple(range(count)))]


def test_an_access_of_whole_blocks_names_no_rows():
    """Rows and holders are left out where they say nothing."""
    access = Access(KV, np.array([1, 2]))
    assert (access.start, access.end, access.holders) == (None, None, None)
