"""A watched device does what it does, and tells."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.device import open_device
from deepinfer.device.observed import ObservedDevice
from deepinfer.errors import DeviceError
from deepinfer.observer import CALLS, KV, Access, Observer


class Log(Observer):
    """Every call, with events numbered in the order in which they first appear."""

    def __init__(self) -> None:
        self.calls = []
        self._numbers = {}
        for name in CALLS:
            setattr(self, name, lambda *args, name=name: self._note(name, args))

    def _note(self, name, args):
        numbered = [
            self._numbers.setdefault(arg, len(self._numbers) + 1)
            if isinstance(arg, int) and not isinstance(arg, bool)
            else arg
            for arg in args
        ]
        self.calls.append((name, *numbered))


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def device(log):
    device = ObservedDevice(open_device("cpu-stepped"), log)
    yield device
    device.close()


def test_operations_waits_and_host_waits_are_told_in_order(device, log):
    """An event is known by its number on every stream and to the host."""
    reads, writes = (Access(KV, np.array([1])),), (Access(KV, np.array([2])),)
    copy, compute, event = device.stream("copy"), device.stream("compute"), device.event()
    copy.submit(lambda: None, reads=reads, writes=writes, label="copy 1")
    copy.record(event)
    compute.wait(event)
    event.query()
    event.synchronize()
    event.query()
    device.recycle(event)
    device.synchronize()
    assert log.calls == [
        ("submitted", "copy", "copy 1", reads, writes),
        ("recorded", "copy", 1),
        ("waited", "compute", 1),
        ("queried", 1, False),
        ("synchronized", 1),
        ("queried", 1, True),
        ("recycled", 1),
        ("synchronized", None),
    ]


def test_an_event_keeps_its_number_for_its_next_user(device, log):
    """A fence that still refers to it is seen to refer to something else."""
    first = device.event()
    device.stream("a").record(first)
    device.recycle(first)
    second = device.event()
    device.stream("b").record(second)
    assert log.calls == [("recorded", "a", 1), ("recycled", 1), ("recorded", "b", 1)]


@pytest.mark.parametrize("wait", ["run", "anchor", "synchronize"])
def test_whatever_waits_for_everything_says_so(device, log, wait):
    """`run` and `anchor` do."""
    if wait == "run":
        assert device.run(lambda: 3, label="three") == 3
        assert log.calls[0] == ("submitted", "compute", "three", (), ())
    else:
        getattr(device, wait)()
    assert log.calls[-1] == ("synchronized", None)


def test_what_the_host_does_is_told(device, log):
    """As operations are."""
    reads = (Access(KV, np.array([1])),)
    device.on_host("collect", reads=reads)
    assert log.calls == [("on_host", "collect", reads, ())]


def test_a_wait_that_fails_is_not_told(device, log):
    """The host knows nothing to be over then."""
    stream, event = device.stream("compute"), device.event()
    stream.submit(lambda: 1 / 0, label="bad")
    stream.record(event)
    with pytest.raises(DeviceError, match="'bad'"):
        event.synchronize()
    with pytest.raises(DeviceError, match="'bad'"):
        stream.submit(lambda: None, label="later")
    assert [call[0] for call in log.calls] == ["submitted", "recorded"]
