"""A device in front of another one: forwards everything, for those who watch to override parts.

Knows nothing of why. Invariant: what it wraps sees the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from deepinfer.device.base import ClockAnchor, Device, DeviceMemory, Event, Readback, Stream
from deepinfer.observer import Access

T = TypeVar("T")


class EventWrapper:
    """An event in front of another one. Implements `base.Event`."""

    __slots__ = ("inner",)

    def __init__(self, inner: Event) -> None:
        self.inner = inner

    def query(self) -> bool:
        """As the inner event's."""
        return self.inner.query()

    def synchronize(self, timeout_s: float | None = None) -> None:
        """As the inner event's."""
        self.inner.synchronize(timeout_s)

    def elapsed_ms(self, since: Event) -> float:
        """As the inner event's."""
        return self.inner.elapsed_ms(inner_event(since))


def inner_event(event: Event) -> Event:
    """The event behind a wrapper; any other one as it is."""
    return event.inner if isinstance(event, EventWrapper) else event


class StreamWrapper:
    """A stream in front of another one. Implements `base.Stream`."""

    def __init__(self, inner: Stream) -> None:
        self.name = inner.name
        self.inner = inner

    def submit(
        self,
        fn: Callable[[], None],
        *,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        cost: float | None = None,
        label: str = "",
    ) -> None:
        """As the inner stream's."""
        self.inner.submit(fn, reads=reads, writes=writes, cost=cost, label=label)

    def record(self, event: Event) -> None:
        """As the inner stream's."""
        self.inner.record(inner_event(event))

    def wait(self, event: Event) -> None:
        """As the inner stream's."""
        self.inner.wait(inner_event(event))


class DeviceWrapper:
    """A device in front of another one. Implements `base.Device`."""

    def __init__(self, inner: Device) -> None:
        self.inner = inner
        self.name = inner.name
        self._streams: dict[str, Stream] = {}

    @property
    def torch_device(self) -> Any:
        """As the inner device's."""
        return self.inner.torch_device

    def stream(self, name: str) -> Stream:
        """The inner device's stream, wrapped once."""
        if name not in self._streams:
            self._streams[name] = self.wrap_stream(self.inner.stream(name))
        return self._streams[name]

    def wrap_stream(self, stream: Stream) -> Stream:
        """What stands in front of a stream."""
        return StreamWrapper(stream)

    def event(self, *, timing: bool = False) -> Event:
        """The inner device's event, wrapped."""
        return EventWrapper(self.inner.event(timing=timing))

    def recycle(self, event: Event) -> None:
        """As the inner device's."""
        self.inner.recycle(inner_event(event))

    def upload(self, array: np.ndarray) -> Any:
        """As the inner device's."""
        return self.inner.upload(array)

    def linear(self, weight: Any) -> Callable[[Any], Any]:
        """As the inner device's."""
        return self.inner.linear(weight)

    def grouped_linear(self, weights: Any) -> Callable[[Any, Any], Any]:
        """As the inner device's."""
        return self.inner.grouped_linear(weights)

    def rms_norm(self, weight: Any, eps: float) -> Callable[[Any], Any]:
        """As the inner device's."""
        return self.inner.rms_norm(weight, eps)

    def sinkhorn(self, size: int, rounds: int, eps: float, dtype: Any) -> Callable[[Any], Any]:
        """As the inner device's."""
        return self.inner.sinkhorn(size, rounds, eps, dtype)

    def host_buffer(self, num_bytes: int) -> np.ndarray:
        """As the inner device's."""
        return self.inner.host_buffer(num_bytes)

    def download(self, tensor: Any) -> Readback:
        """As the inner device's."""
        return self.inner.download(tensor)

    def read(self, readback: Readback) -> np.ndarray:
        """As the inner device's."""
        return self.inner.read(readback)

    def part(self, name: str) -> None:
        """As the inner device's."""
        self.inner.part(name)

    def stamp(self, event: Event) -> None:
        """As the inner device's."""
        self.inner.stamp(inner_event(event))

    def on_host(
        self, label: str, *, reads: Sequence[Access] = (), writes: Sequence[Access] = ()
    ) -> None:
        """As the inner device's."""
        self.inner.on_host(label, reads=reads, writes=writes)

    def anchor(self) -> ClockAnchor:
        """As the inner device's."""
        return self.inner.anchor()

    def synchronize(self) -> None:
        """As the inner device's."""
        self.inner.synchronize()

    def run(self, fn: Callable[[], T], *, label: str = "") -> T:
        """As the inner device's."""
        return self.inner.run(fn, label=label)

    def memory(self) -> DeviceMemory:
        """As the inner device's."""
        return self.inner.memory()

    def close(self) -> None:
        """As the inner device's."""
        self.inner.close()
