"""A device with planted delays: every operation of a named stream comes so much later.

    copy=2ms     load  | op | op |            | op |
                 copy  | 2 ms | op | 2 ms | op |          nobody but stream `copy` waits

Which of two streams is first is luck as long as nothing orders them; a delay settles it, so that
what goes wrong once in a thousand steps goes wrong in every step, on any machine. The delay is part
of the operation and passes in the stream's own queue: a thread's sleep on the CPU, a kernel that
counts clock cycles on CUDA. The host runs ahead as always. On `cpu-stepped`, whose operations the
host runs one after the other, a delay costs its time and changes no order.

Knows nothing of what is delayed. Invariant: the streams see the same operations, records and waits
in the same order as without delays. What `Device.run` computes is on no stream of a step and is not
delayed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from deepinfer.device.base import Device, Stream
from deepinfer.device.busy import Operation, busy_operation
from deepinfer.device.wrapper import DeviceWrapper, StreamWrapper
from deepinfer.errors import UserError
from deepinfer.observer import Access

STREAMS = ("copy", "compute", "load")  # those an engine has
NO_DELAY = "none"
MAX_DELAY_S = 10.0
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
PATTERN = rf"({'|'.join(STREAMS)})=([0-9]+(?:\.[0-9]+)?)({'|'.join(_UNITS)})"
"""One stream's delay, as `copy=2ms`."""


def parse_delays(text: str, what: str = "delay") -> dict[str, float]:
    """Seconds by stream, of `copy=2ms`, `copy=2ms+load=500us` or `none`.

    Args:
        what: what errors call the value.

    Raises:
        UserError: names the value and what is valid.
    """
    delays: dict[str, float] = {}
    for part in () if text == NO_DELAY else text.split("+"):
        stream, equals, _ = part.partition("=")
        if equals and stream not in STREAMS:
            raise UserError(
                f"{what}: unknown stream {stream!r}; expected one of {', '.join(STREAMS)}"
            )
        found = re.fullmatch(PATTERN, part)
        if found is None:
            raise UserError(
                f"{what}: {part!r}; expected STREAM=TIME in {', '.join(_UNITS)}, several joined by "
                f"+, as copy=2ms+load=500us, or {NO_DELAY}"
            )
        if stream in delays:
            raise UserError(f"{what}: {stream} is given twice (got {text!r}); expected one time")
        delays[stream] = float(found[2]) * _UNITS[found[3]]
        if not 0 < delays[stream] <= MAX_DELAY_S:
            raise UserError(f"{what}: {part!r}; expected more than 0 and at most {MAX_DELAY_S:g}s")
    return delays


class _DelayedStream(StreamWrapper):
    def __init__(self, inner: Stream, pause: Operation) -> None:
        super().__init__(inner)
        self._pause = pause

    def submit(
        self,
        fn: Callable[[], None],
        *,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        cost: float | None = None,
        label: str = "",
    ) -> None:
        def delayed() -> None:
            self._pause()
            fn()

        self.inner.submit(delayed, reads=reads, writes=writes, cost=cost, label=label)


class DelayedDevice(DeviceWrapper):
    """`inner`, on which every operation submitted to one of some streams begins with a delay.

    Args:
        delays: seconds by stream name; other streams are as they are.
    """

    def __init__(self, inner: Device, delays: Mapping[str, float]) -> None:
        super().__init__(inner)
        self._delays = dict(delays)

    def wrap_stream(self, stream: Stream) -> Stream:
        """A stream that is late, if it is to be."""
        seconds = self._delays.get(stream.name)
        if seconds is None:
            return super().wrap_stream(stream)
        return _DelayedStream(stream, busy_operation(self.inner, stream.name)(seconds))
