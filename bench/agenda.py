"""Who is still to come in a round, and when: phases, arrivals within them, turns that come back.

Knows requests and the time it is told; neither clock nor engine. Times are seconds since the round
began. Invariant: requests come by phase and then by arrival, and a phase begins only when its
caller has nothing of an earlier one left to run.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench.arrivals import RequestSpec, order_of


class Agenda:
    """The requests of a round that have not come yet; false when there are none.

    Args:
        requests: sorted by phase and arrival, which counts from when the phase begins.
    """

    def __init__(self, requests: Sequence[RequestSpec]) -> None:
        self._pending = deque(requests)
        self._phase, self._start_s = 0, 0.0

    def __bool__(self) -> bool:
        return bool(self._pending)

    def due(self, now_s: float, *, idle: bool) -> Iterator[RequestSpec]:
        """Those who have come by `now_s`, their arrival counted from when the round began.

        Args:
            idle: whether nothing that came before is left to run: then the next phase begins, if
                there is one and nobody is left in this one.
        """
        if idle and self._pending and self._pending[0].phase > self._phase:
            # The first one begins with the round, however late its first look is.
            self._start_s = now_s if self._phase else 0.0
            self._phase = self._pending[0].phase
        while (wait_s := self.wait_s(now_s)) is not None and wait_s <= 0:
            spec = self._pending.popleft()
            yield replace(spec, arrival_s=self._start_s + spec.arrival_s)

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until the next one of this phase comes, 0 or less if it should have; None if all
        have."""
        if not self._pending or self._pending[0].phase != self._phase:
            return None
        return self._start_s + self._pending[0].arrival_s - now_s

    def come_back(self, turn: RequestSpec, end_s: float) -> None:
        """Add the next turn of a conversation whose last answer was complete at `end_s`."""
        arrival_s = end_s - self._start_s + turn.arrival_s
        insort(self._pending, replace(turn, arrival_s=arrival_s), key=order_of)
