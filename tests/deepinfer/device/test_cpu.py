"""What sets the two CPU devices apart: one runs behind the host, the other when asked."""

import gc
import random
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from deepinfer.device.cpu import SWITCH_INTERVAL_S, SteppedCpuDevice, ThreadedCpuDevice
from deepinfer.errors import DeviceError


@pytest.fixture
def threaded():
    device = ThreadedCpuDevice()
    yield device
    device.close()


@pytest.fixture
def stepped():
    device = SteppedCpuDevice()
    yield device
    device.close()


class Gate:
    """An operation that runs until the test opens it."""

    def __init__(self):
        self.entered, self._open = threading.Event(), threading.Event()

    def __call__(self):
        self.entered.set()
        assert self._open.wait(timeout=20)

    def open(self):
        self._open.set()


def test_the_host_runs_ahead_of_the_device(threaded):
    """submit, record and wait return while an operation queued before is still running."""
    ran, gate, event = [], Gate(), threaded.event()
    compute, load = threaded.stream("compute"), threaded.stream("load")
    compute.submit(gate)
    compute.submit(lambda: ran.append("compute"))
    compute.record(event)
    load.wait(event)
    load.submit(lambda: ran.append("load"))
    assert gate.entered.wait(timeout=20)
    assert ran == []
    assert not event.query()
    gate.open()
    threaded.synchronize()
    assert event.query()
    assert ran == ["compute", "load"]


def test_streams_run_side_by_side(threaded):
    """A stream goes on while another is held."""
    gate, event = Gate(), threaded.event()
    threaded.stream("compute").submit(gate)
    threaded.stream("load").submit(lambda: None)
    threaded.stream("load").record(event)
    event.synchronize()
    assert event.query()
    gate.open()


def test_synchronize_sleeps_until_a_running_operation_ends(threaded):
    """A host that waits for a running operation wakes when it has ended, and does not spin."""
    gate, event = Gate(), threaded.event()
    threaded.stream("compute").submit(gate)
    threaded.stream("compute").record(event)
    assert gate.entered.wait(timeout=20)
    timer = threading.Timer(0.1, gate.open)
    timer.start()
    cpu_before_s = time.thread_time()
    event.synchronize()
    assert time.thread_time() - cpu_before_s < 0.05
    assert event.query()
    timer.join()


def test_synchronize_does_not_wait_for_what_was_queued_behind_the_event(threaded):
    """An event is a point in the queue, not its end."""
    gate, event = Gate(), threaded.event()
    threaded.stream("compute").submit(lambda: time.sleep(0.01))
    threaded.stream("compute").record(event)
    threaded.stream("compute").submit(gate)
    event.synchronize()
    gate.open()


def test_recording_again_moves_the_event(threaded):
    """An event that had passed waits again for the newer point."""
    gate, event = Gate(), threaded.event()
    compute = threaded.stream("compute")
    compute.submit(lambda: None)
    compute.record(event)
    event.synchronize()
    compute.submit(gate)
    compute.record(event)
    assert not event.query()
    gate.open()
    event.synchronize()
    assert event.query()


def test_a_wait_holds_for_the_event_as_recorded_at_the_call(threaded):
    """Recording the event again later, behind a held operation, does not prolong the wait."""
    ran, gate = [], Gate()
    event, done = threaded.event(), threaded.event()
    compute, load = threaded.stream("compute"), threaded.stream("load")
    load.submit(lambda: (time.sleep(0.01), ran.append("load")))
    load.record(event)
    compute.wait(event)
    load.submit(gate)
    load.record(event)
    compute.submit(lambda: ran.append("compute"))
    compute.record(done)
    done.synchronize()
    assert ran == ["load", "compute"]
    assert not event.query()
    gate.open()


def test_a_recycled_event_leaves_waits_taken_on_it_alone(threaded):
    """A wait has its point; what becomes of the event afterwards does not matter."""
    ran, gate, event = [], Gate(), threaded.event()
    threaded.stream("load").submit(gate)
    threaded.stream("load").record(event)
    threaded.stream("compute").wait(event)
    threaded.recycle(event)
    threaded.stream("compute").submit(lambda: ran.append(1))
    time.sleep(0.01)
    assert ran == []
    gate.open()
    threaded.synchronize()
    assert ran == [1]


def test_many_threads_may_wait_for_one_event(threaded):
    """Every waiter wakes, also those that come as the event passes."""
    gate, event = Gate(), threaded.event()
    threaded.stream("compute").submit(gate)
    threaded.stream("compute").record(event)
    waiters = [threading.Thread(target=event.synchronize) for _ in range(8)]
    for waiter in waiters:
        waiter.start()
    gate.open()
    for waiter in waiters:
        waiter.join(timeout=20)
    assert not any(waiter.is_alive() for waiter in waiters)


def test_waiting_at_the_moment_an_operation_ends_never_hangs(threaded):
    """Neither side of the race between a waiter and the worker loses the wake-up."""
    rng, event, stream = random.Random(0), threaded.event(), threaded.stream("compute")
    for _ in range(2000):
        for _ in range(rng.randrange(3)):
            stream.submit(lambda: None)
        stream.record(event)
        event.synchronize()
        assert event.query()


def test_a_waiter_that_comes_just_too_late_does_not_sleep(threaded):
    """The worker passes between a waiter's first look and its entry in the list: it looks again."""
    gate, event, stream = Gate(), threaded.event(), threaded.stream("compute")

    class SlowList(list):
        def append(self, waiter):
            gate.open()
            while not event.query():
                time.sleep(0.001)
            time.sleep(0.01)  # the worker has looked for waiters by now, and sleeps
            super().append(waiter)

    stream._waiters = SlowList()
    stream.submit(gate)
    stream.record(event)
    waiter = threading.Thread(target=event.synchronize, daemon=True)
    waiter.start()
    waiter.join(timeout=5)
    assert not waiter.is_alive()


def test_a_stream_asleep_keeps_nothing_of_its_last_operation(threaded):
    """Tensors an operation closed over are free once the stream is idle."""
    array, event = np.zeros(3), threaded.event()
    gone = weakref.ref(array)
    threaded.stream("compute").submit(lambda array=array: array.sum())
    threaded.stream("compute").record(event)
    event.synchronize()
    del array
    deadline = time.monotonic() + 20
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
        gc.collect()
    assert gone() is None


def test_an_operation_that_exits_its_thread_hangs_nobody(threaded):
    """Even SystemExit, which would end a thread in silence, is a failure of the stream."""
    threaded.stream("compute").submit(sys.exit, label="quit")
    with pytest.raises(DeviceError, match="'quit' on stream 'compute' failed: SystemExit"):
        threaded.synchronize()


def test_close_ends_the_threads():
    """No thread of a closed device is left."""
    before = threading.active_count()
    device = ThreadedCpuDevice()
    device.stream("compute").submit(lambda: None)
    device.stream("load")
    assert threading.active_count() == before + 2
    device.close()
    assert threading.active_count() == before


def test_the_switch_interval_is_short_while_a_device_is_open():
    """The interval changes with the first device and comes back with the last."""
    before = sys.getswitchinterval()
    first, second = ThreadedCpuDevice(), ThreadedCpuDevice()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    first.close()
    first.close()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    second.close()
    assert sys.getswitchinterval() == pytest.approx(before)


def queue_two_streams(device):
    """compute: a, b; load: x, then y behind b."""
    compute, load, event = device.stream("compute"), device.stream("load"), device.event()
    compute.submit(lambda: None, label="a")
    load.submit(lambda: None, label="x")
    compute.submit(lambda: None, label="b")
    compute.record(event)
    load.wait(event)
    load.submit(lambda: None, label="y")
    return event


def test_nothing_runs_before_it_is_asked_for(stepped):
    """submit and query run nothing, on a stepped device."""
    event = queue_two_streams(stepped)
    assert not event.query()
    assert stepped.log == []


def test_synchronize_of_an_event_runs_just_what_it_needs(stepped):
    """Its own stream up to the event, and no other stream."""
    queue_two_streams(stepped).synchronize()
    assert stepped.log == [("compute", "a"), ("compute", "b")]


def test_synchronize_of_an_event_runs_the_streams_it_waits_for(stepped):
    """A stream behind a wait pulls the other stream up to the event, through several waits."""
    queue_two_streams(stepped)
    behind_y, behind_c = stepped.event(), stepped.event()
    stepped.stream("load").record(behind_y)
    stepped.stream("copy").wait(behind_y)
    stepped.stream("copy").submit(lambda: None, label="c")
    stepped.stream("copy").record(behind_c)
    stepped.stream("copy").submit(lambda: None, label="d")
    behind_c.synchronize()
    assert [label for _, label in stepped.log] == ["x", "a", "b", "y", "c"]


def test_advance_stops_at_a_wait_whose_event_has_not_passed(stepped):
    """advance gives how many ran, and runnable leaves out a stream that is held."""
    queue_two_streams(stepped)
    assert stepped.advance("load", 5) == 1
    assert stepped.runnable() == ["compute"]
    assert stepped.advance("load") == 0
    assert stepped.advance("compute", 5) == 2
    assert stepped.runnable() == ["load"]
    assert stepped.advance("load", 5) == 1
    assert stepped.runnable() == []
    assert [label for _, label in stepped.log] == ["x", "a", "b", "y"]


def test_every_order_that_events_allow_can_be_driven_and_no_other():
    """Following runnable in all ways gives exactly the interleavings with b before y."""

    def orders(choices):
        device = SteppedCpuDevice()
        queue_two_streams(device)
        for choice in choices:
            device.advance(choice)
        runnable, log = device.runnable(), [label for _, label in device.log]
        device.close()
        if not runnable:
            return {"".join(log)}
        return set().union(*(orders([*choices, name]) for name in runnable))

    assert orders([]) == {"abxy", "axby", "xaby"}


def test_recording_again_moves_an_event_but_not_a_wait_on_it(stepped):
    """The wait is over at the old point; the event itself waits for the new one."""
    event = queue_two_streams(stepped)
    stepped.advance("compute", 2)
    stepped.stream("compute").submit(lambda: None, label="c")
    stepped.stream("compute").record(event)
    assert not event.query()
    assert stepped.advance("load", 2) == 2
    assert [label for _, label in stepped.log] == ["a", "b", "x", "y"]
    event.synchronize()
    assert stepped.log[-1] == ("compute", "c")


def test_a_timing_event_passes_with_the_operation_before_it(stepped):
    """No operation is needed to pass a stamp, nor a wait that is over."""
    before, after = stepped.event(timing=True), stepped.event(timing=True)
    queue_two_streams(stepped)
    stepped.stream("compute").record(before)
    stepped.stream("load").record(after)
    stepped.advance("compute", 2)
    assert before.query()
    stepped.advance("load", 2)
    assert after.query()
    assert after.elapsed_ms(before) > 0


def test_advance_reports_a_failure_at_the_next_call_that_waits(stepped):
    """The failed operation counts as run; what its stream had queued is skipped at once."""
    event = stepped.event()
    stepped.stream("load").submit(lambda: 1 // 0, label="fetch")
    stepped.stream("load").submit(lambda: None, label="later")
    stepped.stream("load").record(event)
    stepped.stream("compute").wait(event)
    stepped.stream("compute").submit(lambda: None, label="reader")
    assert stepped.advance("load", 5) == 1
    assert stepped.runnable() == []
    assert event.query()
    for wait in (event.synchronize, stepped.synchronize):
        with pytest.raises(DeviceError, match="'fetch' on stream 'load' failed: ZeroDivision"):
            wait()
    assert stepped.log == [("load", "fetch")]


def test_advance_of_an_unknown_stream_names_those_there_are(stepped):
    """A misspelt stream is an error, not a stream with nothing to run."""
    stepped.stream("load")
    with pytest.raises(DeviceError, match="no stream 'lod' on this device; there are: 'load'"):
        stepped.advance("lod")


def test_an_interrupt_inside_an_operation_reaches_the_program(stepped):
    """Ctrl-C while the host runs an operation is not swallowed, and the device can be closed."""

    def interrupted():
        raise KeyboardInterrupt

    stepped.stream("compute").submit(interrupted)
    stepped.stream("compute").submit(lambda: None)
    with pytest.raises(KeyboardInterrupt):
        stepped.synchronize()
    with pytest.raises(DeviceError, match="KeyboardInterrupt"):
        stepped.synchronize()


@pytest.mark.parametrize("seed", range(5))
def test_a_random_walk_runs_everything_in_an_allowed_order(stepped, seed):
    """Each wait is honoured in an order picked at random, and nothing is left behind."""
    rng = random.Random(seed)
    names, place, needs = ["compute", "copy", "load"], {}, []
    events, newest = [stepped.event() for _ in range(4)], [None] * 4
    for i in range(300):
        stream = stepped.stream(rng.choice(names))
        k = rng.randrange(4)
        if newest[k] is not None:
            stream.wait(events[k])
            needs.append((newest[k], str(i)))
        stream.submit(lambda: None, label=str(i))
        k = rng.randrange(4)
        stream.record(events[k])
        newest[k] = str(i)
    while runnable := stepped.runnable():
        stepped.advance(rng.choice(runnable), rng.randint(1, 3))
    place = {label: at for at, (_, label) in enumerate(stepped.log)}
    assert len(place) == len(stepped.log) == 300
    assert all(place[first] < place[then] for first, then in needs)
    assert [label for _, label in stepped.log] != [str(i) for i in range(300)]
    assert all(event.query() for event in events)
