"""The order of rounds, and when it is enough of them: settled warm-ups, narrow intervals.

Knows speeds by round and step times; what a round is, it is told. Invariant: rounds are added
for the width of the intervals alone, never for where they lie: stopping as soon as a difference
shows would find one in any noise.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.samples import StepRecord
from bench.stats import Estimate, estimate, median, paired_ratio

# The fewest with an interval of the confidence asked for: the range of 7 ratios is one of 98.4 %.
DEFAULT_ROUNDS = 7
WARMUP_ROUND = -1  # the first; the next are -2, -3, ...
MAX_WARMUPS = 4
SETTLED = 0.10  # two successive warm-ups' median step times differ by no more
THROTTLED_ROUND = -1001  # minus the number of the round that was run again in its place


@dataclass(frozen=True, slots=True)
class Auto:
    """Rounds as they are needed, `DEFAULT_ROUNDS` at least.

    Attributes:
        half_width: that no interval's half may exceed, as a share: 0.02 is 2 %.
        max_time_s: no round begins that would likely end later; the first always does.
    """

    half_width: float = 0.02
    max_time_s: float = 75.0

    def reason_to_stop(
        self,
        speeds: Sequence[Mapping[int, float]],
        num_rounds: int,
        elapsed_s: float,
        round_s: float,
    ) -> str:
        """Why no round is added, or nothing if one is.

        Args:
            speeds: of each cell by round, the baseline first.
            num_rounds: that have ended.
            elapsed_s: since the run began.
            round_s: what the last round of all cells took.
        """
        if elapsed_s + round_s > self.max_time_s:
            return f"--max-time of {self.max_time_s:g} s"
        if num_rounds < DEFAULT_ROUNDS:
            return ""
        halves = [self._half_width(cell, speeds) for cell in range(len(speeds))]
        # A cell without an interval has failed: more rounds give it none.
        if all(half is None or half <= self.half_width for half in halves):
            return f"every interval within {100 * self.half_width:g} %"
        return ""

    def _half_width(self, cell: int, speeds: Sequence[Mapping[int, float]]) -> float | None:
        """Of the cell's ratio to the baseline; of its own speed if it is alone."""
        found: Estimate | None
        if len(speeds) == 1:
            found = estimate(list(speeds[0].values()))
        else:
            found = paired_ratio(speeds[cell], speeds[0])
        return None if found is None else found.half_width


def play_rounds(
    play: Callable[[int, int], object],
    speeds: Sequence[Mapping[int, float]],
    *,
    seed: int,
    rounds: int,
    auto: Auto | None,
    is_over: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Call `play(cell, round)`, round by round, the cells of each in an order drawn from the seed.

    Args:
        speeds: of each cell by round; `play` fills them in.
        rounds: how many, unless `auto` decides.
        is_over: asked after each round; True ends it.
        clock: seconds, ascending.

    Returns why `auto` added no more rounds, else nothing.
    """
    start = before = clock()
    for index in itertools.count():
        for cell in round_order(len(speeds), seed, index):
            play(cell, index)
        now = clock()
        if auto is not None:
            reason = auto.reason_to_stop(speeds, index + 1, now - start, now - before)
            if reason:
                return reason
        if is_over() or (auto is None and index + 1 == rounds):
            break
        before = now
    return ""


def round_order(num_cells: int, seed: int, index: int) -> list[int]:
    """The cells in the order of one round."""
    drawn = np.random.SeedSequence(seed, spawn_key=(index,))
    return [int(cell) for cell in np.random.default_rng(drawn).permutation(num_cells)]


def median_step_us(steps: Sequence[StepRecord]) -> float | None:
    """Of host time plus waits; None without a step."""
    return median([sum(s.host_us.values()) + s.wait_us + s.result_wait_us for s in steps])


def is_settled(step_us: Sequence[float | None]) -> bool:
    """Whether the last two warm-ups' median step times are alike. One alone has not settled."""
    if len(step_us) < 2:
        return False
    before, after = step_us[-2:]
    if not before or not after:
        return True  # no step to wait for
    return max(before, after) / min(before, after) <= 1 + SETTLED


def slowdowns(memory: Mapping[str, Any]) -> tuple[str, ...]:
    """What throttled the GPU in a round, by the round's `memory`; nothing if it used no GPU."""
    if memory.get("torch_peak_allocated_bytes") is None:
        return ()
    gpu = memory.get("gpu") or {}
    return tuple(gpu.get("slowdowns") or ())
