"""Times single calls, one by one and on several threads, and knows what the timing itself costs.

Every loop of calls is run beside the same loop around nothing, in alternating order; what that
empty loop reports is the harness's own cost, subtracted from each figure and shown beside it.

Knows nothing of what it times. Invariant: the statement stands written out between two readings of
the clock, so no function call of the harness is inside what is measured; the garbage collector is
off meanwhile.
"""

from __future__ import annotations

import gc
import statistics
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.stats import percentile

NS_PER_US = 1e3

# How long a thread may keep Python's interpreter while others want it. Python's own 5 ms would let
# each loop end before the next one starts; an open CPU device sets the same.
SWITCH_INTERVAL_S = 1e-4


@contextmanager
def gc_off() -> Iterator[None]:
    """Collect now, then not again until the context ends; afterwards as it was before."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Call:
    """A statement to be timed, and what stands around it in each turn of the loop, untimed."""

    statement: str
    before: str = ""
    after: str = ""


EMPTY = "pass"


class Loop:
    """One call in a loop, on one thread, as often as asked.

    Attributes:
        calls_ns: wall nanoseconds of each call since `clear`, the harness's own included.
        wall_ns: of the loops as a whole.
    """

    def __init__(self, call: Call, names: dict[str, Any]) -> None:
        """`names` are the objects that the statements speak of."""
        self.calls_ns: list[int] = []
        self.wall_ns = 0.0
        timed = f"began = clock()\n{call.statement}\nadd(clock() - began)"
        own = {"clock": time.perf_counter_ns, "add": self.calls_ns.append}
        self._timer = timeit.Timer(
            "\n".join(filter(None, (call.before, timed, call.after))),
            timer=time.perf_counter_ns,
            globals={**names, **own},
        )

    def run(self, num_calls: int) -> None:
        """Make the call so many times."""
        self.wall_ns += self._timer.timeit(num_calls)

    def clear(self) -> None:
        """Forget what was measured (the statement's loop stays warm)."""
        self.calls_ns.clear()
        self.wall_ns = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What a call costs without the harness, in microseconds.

    A figure can come out slightly below 0 where a call costs less than the harness's own scatter.

    Attributes:
        median_us, p99_us: of the calls, by nearest rank, less the harness's median.
        mean_us: of the calls, less the harness's mean. Where nothing untimed stands between two
            calls it comes from the wall time of the loops: on several threads a thread waits for
            the interpreter also between two calls.
        harness_us: the harness's median, already subtracted.
        num_calls: made, over all threads and rounds.
    """

    median_us: float
    p99_us: float
    mean_us: float
    harness_us: float
    num_calls: int


@dataclass(slots=True)
class Contest:
    """A call against the empty loop, on as many threads as there are `names`.

    Attributes:
        names: for each thread, the objects its statement speaks of.
        settle: called after each loop, untimed, so that one leaves no work to the next.
        correct: taken off each call (in order, one thread only), in nanoseconds; for what the
            device itself took.
        empty: the loop around nothing; by default with what stands before the call, so that it
            leaves the caches as the call finds them.
    """

    call: Call
    names: Sequence[dict[str, Any]]
    settle: Callable[[], None] = lambda: None
    correct: list[float] | None = None
    empty: Call | None = None
    _loops: list[Loop] = field(init=False)
    _empty: list[Loop] = field(init=False)

    def __post_init__(self) -> None:
        self._loops = [Loop(self.call, names) for names in self.names]
        empty = self.empty or Call(EMPTY, before=self.call.before)
        self._empty = [Loop(empty, names) for names in self.names]

    def measure(self, num_rounds: int, num_calls: int) -> Cost:
        """`num_rounds` rounds of `num_calls` calls on each thread, after one that warms up."""
        for number in range(1 + num_rounds):
            sides = (self._empty, self._loops) if number % 2 else (self._loops, self._empty)
            for loops in sides:
                _run_together(loops, num_calls)
                self.settle()
            if number == 0:
                for loop in (*self._loops, *self._empty):
                    loop.clear()
                if self.correct is not None:
                    self.correct.clear()
        return self._cost()

    def _cost(self) -> Cost:
        calls: list[float] = [ns for loop in self._loops for ns in loop.calls_ns]
        if self.correct is not None:
            calls = [ns - less for ns, less in zip(calls, self.correct, strict=True)]
        empty = [ns for loop in self._empty for ns in loop.calls_ns]
        harness = statistics.median(empty)
        mean: float
        if self.call.before or self.call.after:
            mean = statistics.fmean(calls) - statistics.fmean(empty)
        else:
            ours, theirs = (sum(x.wall_ns for x in side) for side in (self._loops, self._empty))
            mean = (ours - theirs) / len(calls)
        p99 = percentile(calls, 99)
        assert p99 is not None, "at least one call was made"
        return Cost(
            median_us=(statistics.median(calls) - harness) / NS_PER_US,
            p99_us=(p99 - harness) / NS_PER_US,
            mean_us=mean / NS_PER_US,
            harness_us=harness / NS_PER_US,
            num_calls=len(calls),
        )


def _run_together(loops: Sequence[Loop], num_calls: int) -> None:
    """Run all loops at once, each on a thread of its own; a single one on the caller's.

    Raises what a loop raised, after all threads have ended.
    """
    if len(loops) == 1:
        loops[0].run(num_calls)
        return
    errors: list[BaseException] = []
    together = threading.Barrier(len(loops))

    def work(loop: Loop) -> None:
        try:
            together.wait()
            loop.run(num_calls)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(loop,), daemon=True) for loop in loops]
    interval_before_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_before_s)
    if errors:
        raise errors[0]
