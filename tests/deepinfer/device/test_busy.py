"""What keeps a stream busy: for the time asked, and at no cost to the host."""

from __future__ import annotations

import time

import pytest

from deepinfer.device import open_device
from deepinfer.device.busy import busy_operation


def occupied_ms(device, seconds):
    """Device time of a busy operation, from events, and CPU ms of the process meanwhile."""
    stream = device.stream("compute")
    start, end = device.event(timing=True), device.event(timing=True)
    operation = busy_operation(device, "compute")(seconds)
    stream.record(start)
    stream.submit(operation)
    stream.record(end)
    cpu_s = time.process_time()
    end.synchronize()
    return end.elapsed_ms(start), (time.process_time() - cpu_s) * 1e3


@pytest.mark.parametrize("name", ["cpu", "cpu-stepped"])
def test_a_stream_is_busy_for_the_time_asked_and_the_processor_is_not(name):
    """50 ms on the device, next to none of CPU time."""
    device = open_device(name)
    try:
        device_ms, cpu_ms = occupied_ms(device, 0.05)
    finally:
        device.close()
    assert 50 <= device_ms < 200
    assert cpu_ms < 25


@pytest.mark.cuda
def test_a_gpu_is_busy_for_about_the_time_asked():
    """The kernel's cycles are calibrated: within a third of 50 ms."""
    device = open_device("cuda", blocking_wait=True)
    try:
        device_ms, _ = occupied_ms(device, 0.05)
    finally:
        device.close()
    assert 35 < device_ms < 70
