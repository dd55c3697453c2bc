"""Stamps inside an operation, and the point where device and host clock meet."""

from __future__ import annotations

import time

import pytest

from deepinfer.device import open_device
from deepinfer.errors import DeviceError


@pytest.fixture(
    params=["cpu", "cpu-stepped", pytest.param("cuda", marks=pytest.mark.cuda)],
)
def device(request):
    """An open device, closed at the end."""
    opened = open_device(request.param)
    yield opened
    opened.close()


def test_an_anchor_is_now_on_both_clocks(device):
    """Its host time lies between two looks at the clock, to the error it states."""
    before_ns = time.perf_counter_ns()
    anchor = device.anchor()
    after_ns = time.perf_counter_ns()
    assert before_ns - anchor.error_ns <= anchor.host_ns <= after_ns + anchor.error_ns
    assert anchor.event.query()
    assert (anchor.error_ns == 0) == device.name.startswith("cpu")


def test_anchors_agree_about_the_time_between_them(device):
    """A pause of the host is as long on the device's clock."""
    first = device.anchor()
    time.sleep(0.02)
    second = device.anchor()
    between_ns = second.event.elapsed_ms(first.event) * 1e6
    error_ns = first.error_ns + second.error_ns + 1000
    assert between_ns == pytest.approx(second.host_ns - first.host_ns, abs=error_ns)


def test_an_anchor_waits_for_what_is_queued(device):
    """So that it stands behind all work submitted before it."""
    ran = []
    device.stream("copy").submit(lambda: ran.append("copy"))
    device.anchor()
    assert ran == ["copy"]


def test_a_stamp_lies_inside_its_operation(device):
    """Between the events recorded around it, and telling a part does nothing."""
    start, middle, end = (device.event(timing=True) for _ in range(3))
    stream = device.stream("compute")

    def operation():
        device.part("sampling")
        device.stamp(middle)

    stream.record(start)
    stream.submit(operation)
    stream.record(end)
    end.synchronize()
    assert middle.query()
    assert 0 <= middle.elapsed_ms(start) <= end.elapsed_ms(start)


def test_an_event_that_was_not_stamped_has_no_time(device):
    """As one that was never recorded."""
    anchor = device.anchor()
    with pytest.raises(DeviceError, match="never recorded"):
        device.event(timing=True).elapsed_ms(anchor.event)
