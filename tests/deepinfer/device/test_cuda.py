"""The staging pool everywhere; streams, events and copies where there is a GPU."""

import numpy as np
import pytest
import torch

from deepinfer.device import open_device
from deepinfer.device.cuda import MIN_STAGING_BYTES, StagingPool, size_class
from deepinfer.errors import DeviceError, OwnershipError

SPIN_CYCLES = 200_000_000  # about 0.1 s on a GPU clocked at 2 GHz


class ManualEvent:
    """An event the test lets pass by hand."""

    def __init__(self):
        self.passed = False

    def query(self):
        return self.passed


@pytest.fixture
def recycled():
    return []


@pytest.fixture
def pool(recycled):
    return StagingPool(pin_memory=False, recycle=recycled.append)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(1, 512), (512, 512), (513, 1024), (1024, 1024), (1025, 2048), (2**20 + 1, 2**21)],
)
def test_a_size_class_is_the_next_power_of_two(num_bytes, expected):
    """Sizes round up to a power of two, the smallest class being MIN_STAGING_BYTES."""
    assert size_class(num_bytes) == expected >= MIN_STAGING_BYTES


def test_a_staging_buffer_is_not_reused_before_its_copy_is_done(pool, recycled):
    """The buffer comes back only after the event behind its copy has passed."""
    buffer, event = pool.take(100), ManualEvent()
    pool.give_back(buffer, event)
    assert pool.take(100) is not buffer
    assert recycled == []
    event.passed = True
    assert pool.take(100) is buffer
    assert recycled == [event]


def test_a_reused_buffer_is_of_the_size_class_asked_for(pool):
    """Buffers of different classes do not stand in for each other."""
    small, large = pool.take(512), pool.take(5000)
    assert small.numel() == 512
    assert large.numel() == 8192
    for buffer in (small, large):
        event = ManualEvent()
        event.passed = True
        pool.give_back(buffer, event)
    assert pool.take(4097) is large
    assert pool.take(1) is small


def test_buffers_come_back_oldest_first(pool, recycled):
    """The pool stops looking at the first copy that is not done, whatever lies behind it."""
    buffers, events = [pool.take(1) for _ in range(3)], [ManualEvent() for _ in range(3)]
    for buffer, event in zip(buffers, events, strict=True):
        pool.give_back(buffer, event)
    events[2].passed = True
    assert id(pool.take(1)) not in {id(buffer) for buffer in buffers}
    events[0].passed = True
    assert pool.take(1) is buffers[0]
    events[1].passed = True
    assert {id(pool.take(1)), id(pool.take(1))} == {id(buffers[1]), id(buffers[2])}
    assert recycled == events


def test_the_pool_stays_as_large_as_what_was_in_flight(pool):
    """A thousand copies with two in flight make three buffers at most."""
    seen, in_flight = set(), []
    for _ in range(1000):
        buffer, event = pool.take(300), ManualEvent()
        seen.add(buffer.data_ptr())
        pool.give_back(buffer, event)
        in_flight.append(event)
        if len(in_flight) > 2:
            in_flight.pop(0).passed = True
    assert len(seen) <= 3


@pytest.fixture(params=[False, True], ids=["spinning", "blocking"])
def device(request):
    device = open_device("cuda", blocking_wait=request.param)
    torch.zeros(1, device=device.torch_device)  # the first call loads CUDA, which takes seconds
    device.synchronize()
    yield device
    device.close()


def spin():
    torch.cuda._sleep(SPIN_CYCLES)


@pytest.mark.cuda
def test_the_host_runs_ahead_of_the_gpu(device):
    """submit returns while the GPU works; query is false, then true after synchronize."""
    event, stream = device.event(), device.stream("compute")
    assert event.query()
    stream.submit(spin)
    stream.record(event)
    assert not event.query()
    event.synchronize()
    assert event.query()


@pytest.mark.cuda
def test_a_wait_orders_two_cuda_streams(device):
    """A reader behind a wait sees what the other stream wrote, however late."""
    event, read = device.event(), []
    value = torch.zeros(1, device=device.torch_device)
    device.synchronize()
    load, compute = device.stream("load"), device.stream("compute")
    load.submit(lambda: (spin(), value.fill_(7)))
    load.record(event)
    compute.wait(event)
    compute.submit(lambda: read.append(device.download(value)))
    device.synchronize()
    assert read[0].numpy().tolist() == [7]


@pytest.mark.cuda
def test_streams_without_a_wait_run_side_by_side(device):
    """An event on one stream passes while another is still busy."""
    busy, idle = device.event(), device.event()
    device.stream("load").submit(spin)
    device.stream("load").record(busy)
    device.stream("compute").record(idle)
    idle.synchronize()
    assert not busy.query()
    busy.synchronize()


@pytest.mark.cuda
def test_a_wait_on_cuda_captures_the_event_as_recorded_at_the_call(device):
    """Recording again behind more work does not prolong a wait taken before."""
    event, done = device.event(), device.event()
    load, compute = device.stream("load"), device.stream("compute")
    load.record(event)
    compute.wait(event)
    load.submit(spin)
    load.record(event)
    compute.record(done)
    done.synchronize()
    assert not event.query()
    event.synchronize()


@pytest.mark.cuda
def test_elapsed_ms_on_cuda_is_the_time_of_the_work_between(device):
    """Two timing events around a spin of about 0.1 s, and refusals where there is no time."""
    stream = device.stream("compute")
    start, end, plain = device.event(timing=True), device.event(timing=True), device.event()
    with pytest.raises(DeviceError, match="never recorded"):
        end.elapsed_ms(start)
    stream.record(start)
    stream.submit(spin)
    stream.record(end)
    with pytest.raises(DeviceError, match="not run up to"):
        end.elapsed_ms(start)
    end.synchronize()
    assert 10 < end.elapsed_ms(start) < 2000
    with pytest.raises(DeviceError, match="without timing=True"):
        plain.elapsed_ms(start)


@pytest.mark.cuda
def test_cuda_events_are_pooled_and_count_as_unrecorded(device):
    """A recycled event is used again, even while its old recording has not passed."""
    event, stream = device.event(), device.stream("compute")
    stream.submit(spin)
    stream.record(event)
    device.recycle(event)
    with pytest.raises(OwnershipError, match="twice"):
        device.recycle(event)
    assert device.event(timing=True) is not event
    assert device.event() is event
    assert event.query()
    device.synchronize()


@pytest.mark.cuda
@pytest.mark.parametrize(
    "array",
    [
        np.arange(7, dtype=np.int64),
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.linspace(0, 1, 5, dtype=np.float32)[::-1],
        np.array([True, False]),
        np.float32(3).reshape(()),
        np.zeros((0, 4), dtype=np.int32),
    ],
    ids=["int64", "transposed", "reversed", "bool", "scalar", "empty"],
)
def test_what_is_uploaded_comes_down_again(device, array):
    """Shape, dtype and values survive the way to the GPU and back."""
    readbacks = []
    device.stream("compute").submit(lambda: readbacks.append(device.download(device.upload(array))))
    device.synchronize()
    back = readbacks[0].numpy()
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)


@pytest.mark.cuda
def test_uploads_behind_a_busy_gpu_do_not_overwrite_each_other(device):
    """Many uploads pending at once each arrive with their own values."""
    arrays = [np.full(1000, i, dtype=np.int32) for i in range(64)]
    readbacks = []
    device.stream("load").submit(spin)
    for array in arrays:
        device.stream("load").submit(
            lambda array=array: readbacks.append(device.download(device.upload(array)))
        )
    device.synchronize()
    for array, readback in zip(arrays, readbacks, strict=True):
        np.testing.assert_array_equal(readback.numpy(), array)


@pytest.mark.cuda
def test_memory_on_cuda_counts_what_torch_allocates(device):
    """The allocator's figures grow with a tensor; free is below total."""
    before = device.memory()
    tensor = torch.zeros(64 * 2**20, dtype=torch.uint8, device=device.torch_device)
    after = device.memory()
    assert after.allocated_bytes - before.allocated_bytes >= tensor.nbytes
    assert after.peak_allocated_bytes >= after.allocated_bytes
    assert after.reserved_bytes >= after.allocated_bytes
    assert 0 < after.free_bytes < after.total_bytes


@pytest.mark.cuda
def test_an_operation_that_raises_on_cuda_fails_its_stream(device):
    """submit names operation, stream and cause, at once and ever after."""

    def boom():
        raise ValueError("bad block")

    stream = device.stream("compute")
    message = "operation 'forward 7' on stream 'compute' failed: ValueError: bad block"
    with pytest.raises(DeviceError, match=message) as caught:
        stream.submit(boom, label="forward 7")
    assert isinstance(caught.value.__cause__, ValueError)
    for call in (lambda: stream.submit(spin), device.synchronize):
        with pytest.raises(DeviceError, match=message):
            call()
    device.stream("load").submit(lambda: None)


@pytest.mark.cuda
def test_a_closed_cuda_device_refuses_work(device):
    """close waits for queued work, may be called twice, and nothing works afterwards."""
    event, stream = device.event(), device.stream("compute")
    stream.submit(spin)
    stream.record(event)
    device.close()
    device.close()
    assert event.query()
    for call in (lambda: stream.submit(spin), lambda: device.stream("x"), device.synchronize):
        with pytest.raises(DeviceError, match="device 'cuda' is closed"):
            call()
