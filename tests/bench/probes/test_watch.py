"""A watched device does what the device does, and knows when."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest

from bench.probes.watch import WAIT, WatchedDevice
from deepinfer.device import open_device


@pytest.fixture(params=["cpu", "cpu-stepped"])
def device(request):
    """An open device, closed at the end."""
    opened = open_device(request.param)
    yield opened
    opened.close()


def work(device, order):
    """A copy, and a computation behind it that has two parts and an upload."""

    def compute():
        order.append(device.upload(np.arange(3)).tolist())
        time.sleep(0.002)
        device.part("sampling")
        time.sleep(0.001)

    copied, done = device.event(), device.event(timing=True)
    device.stream("copy").submit(lambda: order.append("copy"), label="copy")
    device.stream("copy").record(copied)
    device.stream("compute").wait(copied)
    device.stream("compute").submit(compute, label="forward")
    device.stream("compute").record(done)
    done.synchronize()
    device.recycle(copied)
    device.recycle(done)


def test_the_same_work_runs_in_the_same_order(device):
    """Streams, events and uploads are those of the device inside."""
    plain, watched = [], []
    work(device, plain)
    work(WatchedDevice(device), watched)
    assert plain == watched == ["copy", [0, 1, 2]]


def test_operations_parts_and_waits_have_their_times(device):
    """Parts follow one another inside the host's times, in the order in which the work ran."""
    watch = WatchedDevice(device)
    before_ns = time.perf_counter_ns()
    work(watch, [])
    after_ns = time.perf_counter_ns()
    watch.stop()
    notes = watch.take_notes()
    spans = {op.label: watch.place(op) for op in notes.operations}
    assert [op.stream for op in notes.operations] == ["copy", "compute", "compute"]
    assert [span.name for span in spans["forward"]] == ["forward", "sampling"]
    forward, sampling = spans["forward"]
    assert before_ns <= spans["copy"][0].end_ns <= forward.end_ns == sampling.start_ns
    assert sampling.end_ns <= after_ns
    assert forward.end_ns - forward.start_ns >= 2_000_000
    assert sampling.end_ns - sampling.start_ns >= 1_000_000
    assert spans[WAIT][0].end_ns >= spans["copy"][0].end_ns
    assert watch.clock_error_ns == 0
    (upload,) = notes.operations[2].uploads
    assert upload.num_bytes == 24
    assert upload.by_device == (device.name == "cpu")
    (wait,) = notes.host_waits
    assert before_ns <= wait.start_ns < wait.end_ns <= after_ns


def test_notes_are_taken_once_and_events_given_back(device):
    """A second look has nothing; a second run makes no new events."""
    made = []
    new_event = device._events._make
    device._events._make = lambda timing: made.append(timing) or new_event(timing)
    for _ in range(2):
        watch = WatchedDevice(device)
        made.clear()
        work(watch, [])
        watch.stop()
        for operation in watch.take_notes().operations:
            watch.place(operation)
        assert watch.take_notes().operations == []
    assert len(made) == 2  # its anchors: each watch keeps its own


def test_ranges_are_told_what_is_submitted(device):
    """Who annotates gets stream and label, around the submit."""
    names = []

    @contextlib.contextmanager
    def annotate(name):
        names.append(name)
        yield

    work(WatchedDevice(device, annotate), [])
    assert names == ["copy: copy", "compute: forward"]
