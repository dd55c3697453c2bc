"""A device whose streams and events tell an observer what happens on them.

Knows nothing of blocks or requests. Invariant: the observer hears of an operation, a record or a
wait once it is queued, and of a host wait once it is over, from the thread that drives the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepinfer.device.base import COMPUTE, ClockAnchor, Device, Event, Stream
from deepinfer.device.wrapper import (
    DeviceWrapper,
    EventWrapper,
    StreamWrapper,
    T,
    inner_event,
)
from deepinfer.observer import Access, Observer


class _ObservedEvent(EventWrapper):
    """Known to the observer by the identity of the event it stands for, which the pool reuses."""

    __slots__ = ("_observer",)

    def __init__(self, inner: Event, observer: Observer) -> None:
        super().__init__(inner)
        self._observer = observer

    def query(self) -> bool:
        passed = self.inner.query()
        self._observer.queried(id(self.inner), passed)
        return passed

    def synchronize(self, timeout_s: float | None = None) -> None:
        self.inner.synchronize(timeout_s)
        self._observer.synchronized(id(self.inner))


class _ObservedStream(StreamWrapper):
    def __init__(self, inner: Stream, observer: Observer) -> None:
        super().__init__(inner)
        self._observer = observer

    def submit(
        self,
        fn: Callable[[], None],
        *,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        cost: float | None = None,
        label: str = "",
    ) -> None:
        self.inner.submit(fn, reads=reads, writes=writes, cost=cost, label=label)
        self._observer.submitted(self.name, label, reads, writes)

    def record(self, event: Event) -> None:
        super().record(event)
        self._observer.recorded(self.name, id(inner_event(event)))

    def wait(self, event: Event) -> None:
        super().wait(event)
        self._observer.waited(self.name, id(inner_event(event)))


class ObservedDevice(DeviceWrapper):
    """`inner`, with an observer told of all that happens on it."""

    def __init__(self, inner: Device, observer: Observer) -> None:
        super().__init__(inner)
        self._observer = observer

    def wrap_stream(self, stream: Stream) -> Stream:
        """A stream that tells the observer."""
        return _ObservedStream(stream, self._observer)

    def event(self, *, timing: bool = False) -> Event:
        """An event whose host waits and looks the observer hears of."""
        return _ObservedEvent(self.inner.event(timing=timing), self._observer)

    def recycle(self, event: Event) -> None:
        """As the inner device's."""
        super().recycle(event)
        self._observer.recycled(id(inner_event(event)))

    def on_host(
        self, label: str, *, reads: Sequence[Access] = (), writes: Sequence[Access] = ()
    ) -> None:
        """Tell the observer what the host does."""
        super().on_host(label, reads=reads, writes=writes)
        self._observer.on_host(label, reads, writes)

    def anchor(self) -> ClockAnchor:
        """As the inner device's, which waits for everything."""
        anchor = super().anchor()
        self._observer.synchronized(None)
        return anchor

    def synchronize(self) -> None:
        """As the inner device's."""
        super().synchronize()
        self._observer.synchronized(None)

    def run(self, fn: Callable[[], T], *, label: str = "") -> T:
        """As the inner device's, which waits for everything."""
        result = super().run(fn, label=label)
        self._observer.submitted(COMPUTE, label, (), ())
        self._observer.synchronized(None)
        return result
