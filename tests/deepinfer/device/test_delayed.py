"""Planted delays: the named stream is late, others and the host are not, and no order changes."""

from __future__ import annotations

import time

import pytest

from deepinfer.device import open_device
from deepinfer.device.base import Device
from deepinfer.device.delayed import DelayedDevice, parse_delays
from deepinfer.errors import UserError

DELAY_S = 0.05


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", {}),
        ("copy=2ms", {"copy": 0.002}),
        ("copy=2ms+load=500us", {"copy": 0.002, "load": 0.0005}),
        ("compute=1.5s", {"compute": 1.5}),
    ],
)
def test_delays_are_read_in_seconds_by_stream(text, expected):
    """A number and its unit; several streams are joined by +."""
    assert parse_delays(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("copi=2ms", "unknown stream 'copi'; expected one of copy, compute, load"),
        ("=2ms", "unknown stream ''"),
        ("copy", "'copy'; expected STREAM=TIME in us, ms, s"),
        ("copy=2", "'copy=2'; expected STREAM=TIME"),
        ("copy=-2ms", "'copy=-2ms'; expected STREAM=TIME"),
        ("copy=2ms+", "''; expected STREAM=TIME"),
        ("", "''; expected STREAM=TIME"),
        ("none+copy=2ms", "'none'; expected STREAM=TIME"),
        ("copy=2ms+copy=3ms", "copy is given twice"),
        ("copy=0ms", "more than 0 and at most 10s"),
        ("copy=11s", "more than 0 and at most 10s"),
    ],
)
def test_anything_else_is_refused(text, part):
    """With the value, and what is valid."""
    with pytest.raises(UserError) as refused:
        parse_delays(text, "--delay")
    assert str(refused.value).startswith("--delay: ")
    assert part in str(refused.value)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    """A device of which stream `copy` is late."""
    delayed = DelayedDevice(open_device(request.param), {"copy": DELAY_S})
    delayed.stream("copy")  # on CUDA the clock is measured now
    yield delayed
    delayed.close()


def took_ms(device: Device, stream_name: str) -> float:
    """Device time of two empty operations on a stream."""
    stream, start, end = device.stream(stream_name), *(device.event(timing=True) for _ in "se")
    stream.record(start)
    stream.submit(lambda: None)
    stream.submit(lambda: None)
    stream.record(end)
    end.synchronize()
    return end.elapsed_ms(start)


def test_each_operation_of_that_stream_is_late_and_of_no_other(device):
    """Two operations come two delays later."""
    assert 2 * DELAY_S * 1e3 * 0.7 < took_ms(device, "copy") < 2 * DELAY_S * 1e3 * 3
    assert took_ms(device, "compute") < DELAY_S * 1e3
    assert took_ms(device, "load") < DELAY_S * 1e3


def test_the_host_runs_ahead(device):
    """The delay passes in the stream's queue: `submit` returns at once."""
    begun = time.perf_counter()
    event = device.event()
    device.stream("copy").submit(lambda: None)
    device.stream("copy").record(event)
    assert time.perf_counter() - begun < DELAY_S
    assert not event.query()
    event.synchronize()
    assert event.query()


def test_a_late_stream_is_overtaken_unless_an_event_says_otherwise():
    """What a delay is for: without an event `load` is first, with one it waits."""
    order: list[str] = []
    device = DelayedDevice(open_device("cpu"), {"copy": DELAY_S})
    copy, load, copied = device.stream("copy"), device.stream("load"), device.event()
    copy.submit(lambda: order.append("copy"))
    copy.record(copied)
    load.submit(lambda: order.append("load"))
    device.synchronize()
    assert order == ["load", "copy"]
    copy.submit(lambda: order.append("copy"))
    copy.record(copied)
    load.wait(copied)
    load.submit(lambda: order.append("load"))
    device.synchronize()
    assert order[2:] == ["copy", "load"]
    device.close()


def test_operations_are_as_many_and_in_the_order_they_had():
    """A delay is part of its operation, which keeps its label; what `run` computes is not late."""
    inner = open_device("cpu-stepped")
    device = DelayedDevice(inner, {"copy": 0.001, "compute": 0.001})
    copied = device.event()
    device.stream("copy").submit(lambda: None, label="copy 1")
    device.stream("copy").record(copied)
    device.stream("compute").wait(copied)
    device.stream("compute").submit(lambda: None, label="forward 1")
    device.synchronize()
    assert inner.log == [("copy", "copy 1"), ("compute", "forward 1")]
    assert device.run(lambda: 3, label="three") == 3
    device.close()
