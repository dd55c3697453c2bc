"""A wait that is given a time ends in that time, and says what it waited for."""

from __future__ import annotations

import threading
import time

import pytest

from deepinfer.device.cpu import SteppedCpuDevice, ThreadedCpuDevice
from deepinfer.device.cuda import CudaEvent
from deepinfer.errors import DeviceTimeoutError

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def device():
    """A threaded device, and a gate at which operations may be made to stand until the test ends.

    Closed while they still stand there, as a program that gives up does.
    """
    device, gate = ThreadedCpuDevice(), threading.Event()
    device.gate = gate
    yield device
    device.close()
    gate.set()
    for thread in device._threads:
        thread.join()


def stuck(device, stream="compute", label="forward"):
    """An event behind an operation that does not end."""
    event = device.event()
    device.stream(stream).submit(lambda: device.gate.wait(20), label=label)
    device.stream(stream).record(event)
    return event


def test_a_wait_ends_in_the_time_it_was_given(device):
    """No sooner, not much later; operation and stream are named."""
    event = stuck(device)
    start = time.monotonic()
    with pytest.raises(
        DeviceTimeoutError, match=r"^after 0\.2 s operation 'forward' on stream 'compute' still"
    ):
        event.synchronize(0.2)
    assert 0.2 <= time.monotonic() - start < 5
    assert not event.query()


def test_what_a_stream_waits_for_is_followed_to_the_operation(device):
    """The stuck operation is on the third stream; the one waited on only waits."""
    event = stuck(device, "load", "transfer")
    for name in ("copy", "compute"):
        device.stream(name).wait(event)
        event = device.event()
        device.stream(name).submit(lambda: None, label=f"behind on {name}")
        device.stream(name).record(event)
    with pytest.raises(DeviceTimeoutError) as error:
        event.synchronize(0.1)
    assert str(error.value) == (
        "after 0.1 s stream 'compute' still waits for another: stream 'copy' still waits for "
        "another: operation 'transfer' on stream 'load' still runs"
    )


def test_an_event_that_passes_in_time_is_waited_for_as_ever(device):
    """The limit changes nothing about a wait that ends."""
    event = device.event()
    device.stream("compute").submit(lambda: time.sleep(0.02))
    device.stream("compute").record(event)
    event.synchronize(10)
    assert event.query()


def test_what_ends_after_all_can_be_waited_for_again(device):
    """A time-out is the waiter's end of patience, not the operation's end."""
    event = stuck(device)
    with pytest.raises(DeviceTimeoutError):
        event.synchronize(0.05)
    device.gate.set()
    event.synchronize(10)
    device.synchronize()
    device.close()
    assert not any(thread.is_alive() for thread in device._threads), "then close waits for threads"


def test_close_does_not_wait_for_what_was_given_up(device):
    """What was queued behind it is dropped, once it does end."""
    ran = []
    event = stuck(device)
    device.stream("compute").submit(lambda: ran.append("behind"))
    with pytest.raises(DeviceTimeoutError):
        event.synchronize(0.05)
    start = time.monotonic()
    device.close()
    assert time.monotonic() - start < 5
    device.gate.set()
    for thread in device._threads:
        thread.join()
    assert ran == []


def test_a_stepped_device_runs_what_is_waited_for_whatever_it_takes():
    """Its operations run on the waiting thread: there is nobody to give up on."""
    device = SteppedCpuDevice()
    event = device.event()
    device.stream("compute").submit(lambda: time.sleep(0.05))
    device.stream("compute").record(event)
    event.synchronize(0.001)
    assert event.query()


class FakeTorchEvent:
    """Passes at the n-th look; `synchronize` must not be called."""

    def __init__(self, num_looks):
        self.num_looks = num_looks

    def query(self):
        self.num_looks -= 1
        return self.num_looks <= 0


def cuda_event(num_looks, spin_s, given_up):
    """A recorded event of the CUDA device, without CUDA."""
    event = CudaEvent.__new__(CudaEvent)
    event._torch_event, event._recorded = FakeTorchEvent(num_looks), True
    event._spin_s, event._given_up = spin_s, given_up
    return event


@pytest.mark.parametrize("spin_s", [0.0, 60.0])
def test_cuda_looks_until_the_event_has_passed_or_the_time_is_over(spin_s):
    """With pauses or without; CUDA's own wait, which cannot be ended, is never begun."""
    given_up = []
    cuda_event(50, spin_s, given_up).synchronize(20)
    assert given_up == []
    event = cuda_event(10**9, spin_s, given_up)
    start = time.monotonic()
    with pytest.raises(DeviceTimeoutError, match=r"after 0\.05 s work queued on device 'cuda'"):
        event.synchronize(0.05)
    assert 0.05 <= time.monotonic() - start < 5
    assert given_up == [event]
