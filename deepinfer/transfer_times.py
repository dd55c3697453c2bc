"""How long transfers take, and how much of that time steps ran beside them.

Times are device times in milliseconds since one event. Knows no bytes and no requests. Invariant:
each pair of a step and a transfer is compared once, whichever of the two ends first.
"""

from __future__ import annotations

from collections import deque

from deepinfer.device.base import COMPUTE, Device, Event

NUM_STEPS = 256  # remembered; a transfer that ends later than so many steps counts as not beside

Interval = tuple[float, float]


class TransferTimes:
    """The account of one engine.

    Attributes:
        busy_ms: of all transfers together.
        beside_steps_ms: of that, while a step ran.
    """

    def __init__(self, device: Device) -> None:
        self.busy_ms = 0.0
        self.beside_steps_ms = 0.0
        self._origin = device.event(timing=True)
        device.stream(COMPUTE).record(self._origin)
        self._steps: deque[Interval] = deque(maxlen=NUM_STEPS)
        self._transfers: list[Interval] = []  # that steps to come may still run beside

    def ran(self, start: Event, end: Event) -> None:
        """A step, between two events that have passed."""
        step = self._interval(start, end)
        self.beside_steps_ms += sum(_common(step, transfer) for transfer in self._transfers)
        self._transfers = [transfer for transfer in self._transfers if transfer[1] > step[1]]
        self._steps.append(step)

    def moved(self, start: Event, end: Event) -> None:
        """A transfer, likewise."""
        transfer = self._interval(start, end)
        self.busy_ms += transfer[1] - transfer[0]
        for step in reversed(self._steps):
            if step[1] <= transfer[0]:
                break  # and so are all before it
            self.beside_steps_ms += _common(step, transfer)
        self._transfers.append(transfer)

    def _interval(self, start: Event, end: Event) -> Interval:
        return start.elapsed_ms(self._origin), end.elapsed_ms(self._origin)


def _common(one: Interval, other: Interval) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
