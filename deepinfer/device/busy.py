"""Work that keeps a stream busy for a given time and the host free: something to wait for.

Knows how each kind of device can be kept busy, and not what for. Invariant: the work takes no CPU
time of this process, so CPU time spent beside it is the waiter's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from deepinfer.device.base import Device

Operation = Callable[[], None]

CALIBRATION_CYCLES = 20_000_000


def busy_operation(device: Device, stream_name: str) -> Callable[[float], Operation]:
    """A function from seconds to an operation to submit that takes about so long.

    How long it really took, two timing events around it say. On a stream whose operations the host
    runs (`cpu-stepped`) the host sleeps as long. On CUDA the clock is measured here, on that
    stream, which takes some 20 ms.
    """
    makers: dict[str, Callable[[], Callable[[float], Operation]]] = {
        "cpu": lambda: lambda seconds: partial(time.sleep, seconds),
        "cuda": lambda: _spinning_kernel(device, stream_name),
    }
    return makers[device.torch_device.type]()


def _spinning_kernel(device: Device, stream_name: str) -> Callable[[float], Operation]:
    """torch's own test kernel, which counts clock cycles of the GPU; their rate is measured."""
    import torch

    sleep: Callable[[int], Any] = torch.cuda._sleep
    stream = device.stream(stream_name)
    start, end = device.event(timing=True), device.event(timing=True)
    for _ in range(2):  # the first brings the clocks up
        stream.record(start)
        stream.submit(lambda: sleep(CALIBRATION_CYCLES))
        stream.record(end)
        end.synchronize()
    cycles_per_s = CALIBRATION_CYCLES / (end.elapsed_ms(start) / 1e3)
    return lambda seconds: partial(sleep, int(seconds * cycles_per_s))
