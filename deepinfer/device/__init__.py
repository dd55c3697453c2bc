"""Devices by name, and the interface they share.

Job: turn the name a user gave into an open device. Knows nothing of what runs on it.

Invariant: importing this package loads neither torch nor CUDA; `open_device` does.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from deepinfer.device.base import Device, DeviceMemory, Event, Readback, Stream
from deepinfer.errors import UserError
from deepinfer.names import DEVICES

__all__ = [
    "DEVICES",
    "Device",
    "DeviceMemory",
    "Event",
    "Readback",
    "Stream",
    "open_device",
]

# The options of the devices that take any.
_OPTIONS: dict[str, tuple[str, ...]] = {"cuda": ("blocking_wait",)}


def open_device(name: str, **options: Any) -> Device:
    """The device called `name` (one of `DEVICES`), open; the caller closes it.

    Options:
        blocking_wait (cuda, bool): the host sleeps in `Event.synchronize` instead of spinning.

    Raises UserError for an unknown name or option, and for `cuda` where torch finds no GPU.
    """
    if name not in DEVICES:
        raise UserError(
            f"device: unknown value {name!r}; valid: {', '.join(DEVICES)}",
            hint=_nearest(name, DEVICES),
        )
    valid = _OPTIONS.get(name, ())
    for option in options:
        if option not in valid:
            raise UserError(
                f"device {name!r}: unknown option {option!r}; valid: {', '.join(valid) or 'none'}",
                hint=_nearest(option, valid),
            )
    if name == "cuda":
        from deepinfer.device.cuda import CudaDevice

        return CudaDevice(**options)

    from deepinfer.device.cpu import SteppedCpuDevice, ThreadedCpuDevice

    return ThreadedCpuDevice() if name == "cpu" else SteppedCpuDevice()


def _nearest(name: str, valid: tuple[str, ...]) -> str | None:
    near = get_close_matches(name, valid, n=1)
    return f"did you mean {near[0]!r}?" if near else None
