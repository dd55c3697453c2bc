"""Vector clocks: which queued operations are certainly over before another one begins.

An operation is (stream, index), the index counted from 1 on each stream. A clock says of each
stream up to which index everything comes before. Streams, events and the host each have one:

    submit           the stream learns what the host knows: the host launched it knowing that
    record(event)    the event knows what the stream knows now
    wait(event)      the stream learns what the event knows now
    host wait, look  the host learns what the event knows

Knows no blocks. Invariant: an index in a clock is there because of a chain of these, never because
this run happened to be in time.
"""

from __future__ import annotations

Clock = dict[str, int]  # stream -> index; a stream left out: 0


def join(clock: Clock, other: Clock) -> None:
    """Make `clock` know all that `other` knows."""
    for stream, index in other.items():
        if index > clock.get(stream, 0):
            clock[stream] = index


class Clocks:
    """The clocks of a device's streams and events, and of the one host thread that drives it.

    Attributes:
        host: what the host knows to be over; shared, not to be written.
    """

    def __init__(self) -> None:
        self.host: Clock = {}
        self._streams: dict[str, Clock] = {}
        self._events: dict[int, Clock] = {}

    def submit(self, stream: str) -> Clock:
        """Queue the stream's next operation. Gives its clock, its own index included; shared."""
        clock = self._stream(stream)
        join(clock, self.host)
        clock[stream] += 1
        return clock

    def record(self, stream: str, event: int) -> None:
        """Mark this point of the stream; what the event marked before is forgotten."""
        self._events[event] = self._stream(stream).copy()

    def wait(self, stream: str, event: int) -> None:
        """What follows on the stream comes after what the event marks now."""
        join(self._stream(stream), self._events.get(event, {}))

    def synchronize(self, event: int | None) -> None:
        """What the event marks (None: all that is queued) is over, and the host knows."""
        for clock in [self._events.get(event, {})] if event is not None else self._streams.values():
            join(self.host, clock)

    def recycle(self, event: int) -> None:
        """The event counts as never recorded."""
        self._events.pop(event, None)

    def _stream(self, name: str) -> Clock:
        return self._streams.setdefault(name, {name: 0})
