"""A wrapped device is the device: same calls, same order, same answers."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.device import open_device
from deepinfer.device.base import Device, Event, Stream
from deepinfer.device.wrapper import DeviceWrapper, EventWrapper, StreamWrapper
from deepinfer.errors import OwnershipError


@pytest.fixture
def stepped():
    device = open_device("cpu-stepped")
    yield device
    device.close()


def script(device):
    """Two streams, an event between them, results; what the host saw."""
    seen = []
    compute, copy = device.stream("compute"), device.stream("copy")
    event = device.event()
    seen.append(event.query())
    copy.submit(lambda: seen.append("copied"), label="copy 1")
    copy.record(event)
    compute.wait(event)
    compute.submit(lambda: seen.append("computed"), label="forward 1")
    seen.append(event.query())
    device.synchronize()
    seen.append(event.query())
    device.recycle(event)
    seen.append(device.run(lambda: 3, label="three"))
    return seen


def test_work_runs_as_on_the_device_itself(stepped):
    """Waits and events included, in the same order."""
    plain = open_device("cpu-stepped")
    assert script(DeviceWrapper(stepped)) == script(plain)
    assert stepped.log == plain.log
    plain.close()


@pytest.mark.parametrize(
    ("protocol", "wrapper"),
    [(Device, DeviceWrapper), (Stream, StreamWrapper), (Event, EventWrapper)],
)
def test_everything_a_device_offers_is_forwarded(protocol, wrapper):
    """A new member of the seam needs one in the wrapper."""
    offered = {name for name in vars(protocol) if not name.startswith("_")}
    assert offered <= set(dir(wrapper))


def test_a_stream_is_wrapped_once(stepped):
    """The same name is the same stream."""
    device = DeviceWrapper(stepped)
    assert device.stream("copy") is device.stream("copy")
    assert device.stream("copy").inner is stepped.stream("copy")


def test_memory_and_arrays_are_the_device_s(stepped):
    """Uploads, downloads, kernels and figures."""
    device = DeviceWrapper(stepped)
    array = np.arange(4, dtype=np.float32)
    tensor = device.upload(array)
    assert device.download(tensor).numpy().tolist() == array.tolist()
    assert device.linear(tensor.view(2, 2))(tensor.view(2, 2)).tolist() == [[1, 3], [3, 13]]
    weights, ends = tensor.view(1, 2, 2).expand(2, -1, -1), tensor.new_tensor([0, 2]).long()
    assert device.grouped_linear(weights)(tensor.view(2, 2), ends).tolist() == [[1, 3], [3, 13]]
    normed = device.rms_norm(None, 0.0)(tensor.new_full((2,), 3.0))
    assert normed.tolist() == pytest.approx([1, 1])
    balanced = device.sinkhorn(2, 1, 0.0, tensor.dtype)(tensor.new_full((1, 2, 2), 3.0))
    assert balanced.tolist() == [[[0.5, 0.5], [0.5, 0.5]]]
    assert device.torch_device == stepped.torch_device
    assert device.memory().total_bytes == stepped.memory().total_bytes
    assert device.name == stepped.name


def test_times_are_taken_between_wrapped_events(stepped):
    """And since an anchor of the device."""
    device = DeviceWrapper(stepped)
    anchor = device.anchor()
    start, end = device.event(timing=True), device.event(timing=True)
    stream = device.stream("compute")
    stream.record(start)
    stream.submit(lambda: None)
    stream.record(end)
    end.synchronize()
    assert 0 <= end.elapsed_ms(start) <= end.elapsed_ms(anchor.event)
    device.recycle(anchor.event)


def test_an_event_goes_back_to_the_device_s_pool(stepped):
    """Once, as on the device itself."""
    device = DeviceWrapper(stepped)
    event = device.event()
    device.recycle(event)
    with pytest.raises(OwnershipError):
        device.recycle(event)
    assert device.event().inner is event.inner


def test_closing_closes_the_device(stepped):
    """Its streams take no more work."""
    device = DeviceWrapper(stepped)
    stream = device.stream("compute")
    device.close()
    with pytest.raises(Exception, match="closed"):
        stream.submit(lambda: None)
