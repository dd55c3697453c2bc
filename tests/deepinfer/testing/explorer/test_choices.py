"""A device whose order of events somebody decides."""

from __future__ import annotations

import numpy as np

from deepinfer.observer import KV, Access
from deepinfer.testing.explorer.choices import NOT_YET, ChoiceDevice
from deepinfer.testing.explorer.search import Recorded


def blocks(*ids):
    return (Access(KV, np.array(ids)),)


def device_with(answers):
    chooser = Recorded()
    chooser.answers = answers
    return ChoiceDevice(2, chooser)


def test_nothing_runs_until_the_host_waits():
    """A look is answered as things are; a wait runs what it needs and no more."""
    device, ran = device_with([]), []
    for name in ("compute", "load"):
        device.stream(name).submit(lambda name=name: ran.append(name), writes=blocks(1))
    event = device.event()
    device.stream("compute").record(event)
    assert not event.query()
    assert ran == []
    event.synchronize()
    assert ran == ["compute"]


def test_answers_decide_what_runs_first():
    """A stream that is named goes on before the one that is waited for."""
    device, ran = device_with([NOT_YET, "load"]), []
    for name in ("compute", "load"):
        device.stream(name).submit(lambda name=name: ran.append(name), writes=blocks(1))
    event = device.event()
    device.stream("compute").record(event)
    assert not event.query()
    event.synchronize()
    assert ran == ["load", "compute"]
    assert device.answers == [NOT_YET, "load", "compute"]


def test_only_what_conflicts_has_to_come_first():
    """Other blocks, or reads of the same one, do not matter; a write and a read do."""
    device = device_with([])
    device.stream("compute").submit(lambda: None, reads=blocks(1), label="reader")
    device.stream("load").submit(lambda: None, reads=blocks(1), label="reader too")
    device.stream("copy").submit(lambda: None, writes=blocks(2), label="elsewhere")
    needed = device.next_op("compute")
    assert [op.stream for op in device.rivals(needed)] == ["compute"]
    device.stream("load").submit(lambda: None, writes=blocks(1), label="writer")
    assert [op.stream for op in device.rivals(needed)] == ["compute", "load"]


def test_what_leads_to_a_conflict_counts_through_waits():
    """A conflicting operation behind a wait stands for what that waits for."""
    device = device_with([])
    device.stream("copy").submit(lambda: None)
    copied = device.event()
    device.stream("copy").record(copied)
    device.stream("load").wait(copied)
    device.stream("load").submit(lambda: None, writes=blocks(1))
    device.stream("compute").submit(lambda: None, reads=blocks(1))
    rivals = device.rivals(device.next_op("compute"))
    assert [op.stream for op in rivals] == ["compute", "copy"]


def test_rows_count_not_blocks():
    """Two rows of one block do not conflict."""
    device = device_with([])
    first = (Access(KV, np.array([1]), np.array([0]), np.array([1])),)
    second = (Access(KV, np.array([1]), np.array([1]), np.array([2])),)
    device.stream("compute").submit(lambda: None, writes=first)
    device.stream("load").submit(lambda: None, writes=second)
    assert not device.next_op("compute").conflicts(device.next_op("load"))
