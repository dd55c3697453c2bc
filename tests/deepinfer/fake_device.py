"""A device of two queues whose operations run when they are advanced or waited for.

Nothing orders `step` (copies and forwards) against `load` (transfers that read a request's blocks),
except what an operation says it comes after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Operation:
    """Device work, and the event behind it."""

    device: FakeDevice
    queue: str
    index: int
    touched: frozenset[int]
    run: Callable[[], None]
    after: list[Operation] = field(default_factory=list)
    done: bool = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        while not self.done:
            self.device.run_next(self.queue)


class FakeDevice:
    """Two queues of operations, each in order."""

    def __init__(self) -> None:
        self.queues: dict[str, deque[Operation]] = {"step": deque(), "load": deque()}
        self.log: list[str] = []
        self._submitted = 0

    def submit(
        self,
        queue: str,
        touched: Iterable[int],
        run: Callable[[], None],
        after: Iterable[Operation] = (),
    ) -> Operation:
        self._submitted += 1
        ids = frozenset(map(int, touched))
        operation = Operation(self, queue, self._submitted, ids, run, list(after))
        self.queues[queue].append(operation)
        return operation

    def run_next(self, queue: str) -> None:
        if self.queues[queue]:
            operation = self.queues[queue].popleft()
            for other in operation.after:
                other.synchronize()
            operation.run()
            operation.done = True

    def touching(self, ids: Iterable[int]) -> list[Operation]:
        """Open operations that touch one of these blocks."""
        wanted = set(map(int, ids))
        return [op for queue in self.queues.values() for op in queue if op.touched & wanted]
