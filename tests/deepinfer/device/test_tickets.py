"""What both CPU devices promise alike: order, events, failures, copies, the pool of events."""

import random
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
import torch

from deepinfer.device import open_device
from deepinfer.errors import DeviceError, OwnershipError


@pytest.fixture(params=["cpu", "cpu-stepped"])
def device(request):
    device = open_device(request.param)
    yield device
    device.close()


def boom():
    raise ValueError("bad block")


def nothing():
    pass


class Gate:
    """An operation that runs `then` once the test has opened it (before a stepped device runs)."""

    def __init__(self, then=nothing):
        self._then, self._opened = then, threading.Event()

    def __call__(self):
        assert self._opened.wait(timeout=20)
        self._then()

    def open(self):
        self._opened.set()


def test_operations_of_a_stream_run_in_the_order_submitted(device):
    """A stream is first in, first out."""
    ran = []
    for i in range(50):
        device.stream("compute").submit(lambda i=i: ran.append(i))
    device.synchronize()
    assert ran == list(range(50))


def test_a_stream_is_made_once_per_name(device):
    """Asking again for a name gives the same stream."""
    assert device.stream("load") is device.stream("load")
    assert device.stream("load") is not device.stream("copy")
    assert device.stream("load").name == "load"


def test_a_wait_orders_two_streams(device):
    """What follows a wait runs after everything before the event on the other stream."""
    ran = []
    compute, load, event = device.stream("compute"), device.stream("load"), device.event()
    load.submit(lambda: (time.sleep(0.01), ran.append("load")))
    load.record(event)
    compute.wait(event)
    compute.submit(lambda: ran.append("compute"))
    device.synchronize()
    assert ran == ["load", "compute"]


def test_synchronize_returns_after_the_point_of_the_event(device):
    """Everything before the event has run when synchronize returns, and query agrees."""
    ran, event = [], device.event()
    device.stream("compute").submit(lambda: (time.sleep(0.01), ran.append(1)))
    device.stream("compute").record(event)
    event.synchronize()
    assert ran == [1]
    assert event.query()


def test_query_is_false_until_the_point_has_passed(device):
    """query answers at once, before and after."""
    gate, event = Gate(), device.event()
    device.stream("compute").submit(gate)
    device.stream("compute").record(event)
    assert not event.query()
    gate.open()
    device.synchronize()
    assert event.query()


def test_an_event_never_recorded_has_passed(device):
    """An unrecorded event holds up neither the host nor a stream."""
    ran, event = [], device.event()
    assert event.query()
    event.synchronize()
    device.stream("compute").wait(event)
    device.stream("compute").submit(lambda: ran.append(1))
    device.synchronize()
    assert ran == [1]


def test_an_event_on_an_empty_stream_has_passed(device):
    """Recording where nothing is pending gives a passed event."""
    event = device.event()
    device.stream("compute").record(event)
    assert event.query()


def test_recycled_events_are_used_again_and_count_as_unrecorded(device):
    """The pool hands out what it was given, kinds apart, with the old recording forgotten."""
    plain, timed = device.event(), device.event(timing=True)
    device.stream("compute").submit(nothing)
    device.stream("compute").record(plain)
    device.recycle(plain)
    device.recycle(timed)
    assert device.event(timing=True) is timed
    again = device.event()
    assert again is plain
    assert again.query()
    assert device.event() is not plain
    device.synchronize()


def test_a_recycled_event_forgets_the_failure_of_its_stream(device):
    """The next user of an event does not inherit the trouble of the last."""
    gate, event = Gate(then=boom), device.event()
    device.stream("load").submit(gate)
    device.stream("load").record(event)
    gate.open()
    with pytest.raises(DeviceError, match="bad block"):
        event.synchronize()
    device.recycle(event)
    device.event().synchronize()
    assert event.query()


def test_recycling_an_event_twice_is_refused(device):
    """An event cannot enter the pool twice, since two users would then get it."""
    event = device.event()
    device.recycle(event)
    with pytest.raises(OwnershipError, match="twice"):
        device.recycle(event)


def test_an_event_of_another_kind_of_device_is_refused(device):
    """A foreign object in the place of an event is a DeviceError that names its type."""
    with pytest.raises(DeviceError, match="str belongs to another kind of device"):
        device.stream("compute").record("event")


def test_elapsed_ms_measures_what_ran_between_two_events(device):
    """The time between two timing events is that of the work between them."""
    stream = device.stream("compute")
    start, end = device.event(timing=True), device.event(timing=True)
    stream.record(start)
    stream.submit(lambda: time.sleep(0.02))
    stream.record(end)
    end.synchronize()
    assert 20 <= end.elapsed_ms(start) < 2000


def test_a_timing_event_recorded_again_measures_the_newer_point(device):
    """A stamp still queued for the older recording does not overwrite the newer one."""
    compute, load = device.stream("compute"), device.stream("load")
    start, end, other = (device.event(timing=True) for _ in range(3))
    compute.submit(lambda: time.sleep(0.02))
    compute.record(end)
    load.record(start)
    load.record(end)
    load.record(other)
    device.synchronize()
    assert start.elapsed_ms(start) == 0
    assert 0 <= end.elapsed_ms(start) <= other.elapsed_ms(start)


def test_elapsed_ms_refuses_events_without_a_time(device):
    """No timing, never recorded, not run up to: each is a DeviceError that says which."""
    stream, timed, gate = device.stream("compute"), device.event(timing=True), Gate()
    stream.submit(gate)
    plain = device.event()
    stream.record(plain)
    with pytest.raises(DeviceError, match="without timing=True"):
        plain.elapsed_ms(timed)
    with pytest.raises(DeviceError, match="never recorded"):
        timed.elapsed_ms(timed)
    stream.record(timed)
    with pytest.raises(DeviceError, match="not run up to"):
        timed.elapsed_ms(timed)
    gate.open()


def test_an_operation_that_raises_fails_its_stream(device):
    """The next wait and the next submit name operation, stream and cause; later work is skipped."""
    ran, gate = [], Gate(then=boom)
    stream, event = device.stream("compute"), device.event()
    stream.submit(gate, label="forward 7")
    stream.submit(lambda: ran.append("later"))
    stream.record(event)
    gate.open()
    message = "operation 'forward 7' on stream 'compute' failed: ValueError: bad block"
    with pytest.raises(DeviceError, match=message) as caught:
        event.synchronize()
    assert isinstance(caught.value.__cause__, ValueError)
    for call in (lambda: stream.submit(nothing), lambda: stream.record(event), device.synchronize):
        with pytest.raises(DeviceError, match=message):
            call()
    assert event.query(), "a skipped point is passed: nothing before it will run any more"
    assert ran == []


def test_a_stream_that_waits_for_a_failed_one_fails_too(device):
    """A failure travels along waits with its origin, and the waiting stream's work is skipped."""
    ran, event, last, gate = [], device.event(), device.event(), Gate(then=boom)
    device.stream("load").submit(gate, label="fetch")
    device.stream("load").record(event)
    device.stream("copy").wait(event)
    device.stream("copy").submit(lambda: ran.append("copy"))
    device.stream("copy").record(last)
    device.stream("compute").wait(last)
    device.stream("compute").submit(lambda: ran.append("compute"))
    gate.open()
    with pytest.raises(DeviceError, match="'fetch' on stream 'load'"):
        device.synchronize()
    with pytest.raises(DeviceError, match="'fetch' on stream 'load'"):
        device.stream("compute").submit(nothing)
    assert ran == []


def test_a_wait_for_a_point_before_the_failure_succeeds(device):
    """Only what stands behind the failed operation fails with it."""
    ran, before = [], device.event()
    load, compute = device.stream("load"), device.stream("compute")
    load.submit(nothing)
    load.record(before)
    load.submit(boom)
    compute.submit(lambda: time.sleep(0.02))
    compute.wait(before)
    compute.submit(lambda: ran.append(1))
    with pytest.raises(DeviceError, match="without a label on stream 'load'"):
        device.synchronize()
    assert ran == [1]
    compute.submit(nothing)


def test_a_failure_leaves_other_streams_working(device):
    """A stream that does not depend on the failed one goes on."""
    ran, event = [], device.event()
    device.stream("load").submit(boom)
    device.stream("compute").submit(lambda: ran.append(1))
    device.stream("compute").record(event)
    event.synchronize()
    assert ran == [1]


def test_an_operation_that_waits_for_its_device_is_refused(device):
    """An operation would wait for itself: it fails, and nothing hangs."""
    stream, event = device.stream("compute"), device.event()
    gate = Gate(then=event.synchronize)
    stream.submit(gate, label="self")
    stream.submit(nothing)
    stream.record(event)
    gate.open()
    with pytest.raises(DeviceError, match="deadlock: an operation waits for stream 'compute'"):
        device.synchronize()


def test_close_runs_what_is_queued_and_can_be_called_twice(device):
    """Closing loses no work; afterwards everything is refused."""
    ran, stream, event = [], device.stream("compute"), device.event()
    stream.submit(lambda: (time.sleep(0.01), ran.append(1)))
    device.close()
    device.close()
    assert ran == [1]
    calls = [
        lambda: stream.submit(nothing),
        lambda: stream.record(event),
        lambda: device.stream("new"),
        device.synchronize,
    ]
    for call in calls:
        with pytest.raises(DeviceError, match=f"device '{device.name}' is closed"):
            call()


def test_close_after_a_failure_raises_nothing_and_keeps_the_cause(device):
    """Closing a failed device is quiet, and a later call still names the first failure."""
    stream = device.stream("compute")
    stream.submit(boom, label="forward")
    device.close()
    with pytest.raises(DeviceError, match="operation 'forward'"):
        stream.submit(nothing)


def test_upload_shares_the_memory_of_the_array(device):
    """The device's memory is the host's: no copy, same dtype and shape."""
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    tensor = device.upload(array)
    assert tensor.dtype == torch.int64
    assert tensor.shape == (2, 3)
    assert tensor.data_ptr() == array.ctypes.data


def test_a_download_gives_the_values_computed_on_the_stream(device):
    """A readback taken inside an operation holds the result once the event has passed."""
    readbacks, event = [], device.event()
    array = np.arange(4, dtype=np.float32)
    stream = device.stream("compute")
    stream.submit(lambda: readbacks.append(device.download(device.upload(array) * 2)))
    stream.record(event)
    event.synchronize()
    np.testing.assert_array_equal(readbacks[0].numpy(), [0, 2, 4, 6])


def test_memory_is_that_of_the_machine(device):
    """Total and free bytes are there; the allocator figures, which the CPU lacks, are None."""
    memory = device.memory()
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert memory.reserved_bytes is None
    assert memory.allocated_bytes is None


def queue_random_graph(device, rng, num_ops):
    """Queue operations with random waits; gives (outputs they will fill, outputs they should fill).

    Operation i writes output i from the output before it on its stream and from the newest one
    before each event it waited for: an operation that runs too early finds None there.
    """
    names = ["compute", "copy", "load"]
    found, expected = [None] * num_ops, [0] * num_ops
    newest = dict.fromkeys(names)  # stream -> its newest operation
    events = [(device.event(timing=i % 2 == 1), None) for i in range(6)]  # event, newest before it

    def operation(i, inputs, pause):
        def run():
            if pause:
                time.sleep(1e-4)
            assert found[i] is None, "run twice"
            found[i] = sum((k + 3) * found[j] for k, j in enumerate(inputs)) % 1_000_003 + i

        return run

    for i in range(num_ops):
        name = rng.choice(names)
        inputs = [] if newest[name] is None else [newest[name]]
        for k in rng.sample(range(6), rng.choice([0, 0, 1, 2])):
            event, before = events[k]
            device.stream(name).wait(event)
            inputs += [] if before is None else [before]
        device.stream(name).submit(operation(i, inputs, rng.random() < 0.05))
        expected[i] = sum((k + 3) * expected[j] for k, j in enumerate(inputs)) % 1_000_003 + i
        newest[name] = i
        if rng.random() < 0.5:
            k = rng.randrange(6)
            device.stream(name).record(events[k][0])
            events[k] = (events[k][0], i)
        if rng.random() < 0.02:
            event, before = rng.choice(events)
            event.synchronize()
            assert before is None or found[before] is not None
    return found, expected


@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_operations_with_random_waits_match_a_sequential_run(device, seed):
    """Whatever the interleaving, every operation reads what the waits before it promise."""
    found, expected = queue_random_graph(device, random.Random(seed), 1000)
    device.synchronize()
    assert found == expected


def test_timing_events_never_run_backwards_along_a_stream(device):
    """Stamps of one stream are taken in order."""
    events = [device.event(timing=True) for _ in range(20)]
    for event in events:
        device.stream("compute").submit(nothing)
        device.stream("compute").record(event)
    device.synchronize()
    assert all(later.elapsed_ms(earlier) >= 0 for earlier, later in pairwise(events))
