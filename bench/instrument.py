"""Are the verdicts right? A/A, and a slowdown of known size, many times over.

    A/A      a cell against itself: FASTER or SLOWER is a false alarm
    planted  a cell that is 5 % slower than its twin: all but SLOWER is a miss

Both on a fake target, which is told how long its rounds take, and on the CPU engine. The fake's
rounds go through the loop, the metrics and the verdict of a real comparison; only their times are
drawn, from `NOISE`. Invariant: everything of the fake is a function of the seed.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.matrix import Cell, Matrix
from bench.metrics import compute_metrics
from bench.rounds import DEFAULT_ROUNDS, Auto, play_rounds
from bench.runner import Round
from bench.samples import CellRecord, RoundRecord, RunRecord, Samples, SampleWriter, read_samples
from bench.spec import Resolved
from bench.stats import Estimate, Judgement, Verdict
from bench.verdicts import judge_cells
from deepinfer.outputs import StepOutput

SLOWDOWN = 0.05
FALSE_ALARMS = 0.05  # at most, of A/A
POWER = 0.90  # at least, of what is planted
COVERAGE = 0.93  # at least, of the intervals
ENGINE_MAX_TIME_S = 5.0  # of one comparison on the engine, whose rounds are short
_SLOWED_CELL = 1


@dataclass(frozen=True, slots=True)
class Noise:
    """How a round's time varies though the work does not.

    Attributes:
        deviation: of the log of the time, round by round.
        drift: of the machine's speed from one round to the next, a random walk of its log, which
            pairing within a round takes out only in part.
        spike_share: of rounds hit by something else.
        spike_low, spike_high: how much longer those take, as a share.
        round_s: a round of cpu-small.
    """

    deviation: float = 0.02
    drift: float = 0.005
    spike_share: float = 0.04
    spike_low: float = 0.05
    spike_high: float = 1.6
    round_s: float = 1.2


# docs/statistics.md says from which rounds these figures are.
NOISE = Noise()


@dataclass(frozen=True, slots=True)
class Bound:
    """A share that must not be above (or below) `limit`."""

    what: str
    share: float
    limit: float
    is_most: bool

    @property
    def is_met(self) -> bool:
        """Whether the share is on the right side."""
        return self.share <= self.limit if self.is_most else self.share >= self.limit


@dataclass(frozen=True, slots=True)
class Trials:
    """Comparisons of one kind.

    Attributes:
        true_ratio: what each of them should have found.
        mean_rounds: that were needed.
        bounds: what is asked of the kind; empty for what is only shown.
    """

    name: str
    num_trials: int
    true_ratio: float
    verdicts: dict[str, int]
    coverage: float
    mean_ratio: float
    mean_rounds: float
    bounds: tuple[Bound, ...]

    @property
    def passed(self) -> bool:
        """Whether every bound is met."""
        return all(bound.is_met for bound in self.bounds)


def check_fake(num_trials: int, seed: int, noise: Noise = NOISE) -> list[Trials]:
    """A/A and the planted slowdown on the fake target, at the settings `compare` has by default."""
    found = []
    for kind, slowdown in enumerate((0.0, SLOWDOWN)):
        judged = [
            fake_comparison((seed, kind, trial), slowdown, noise) for trial in range(num_trials)
        ]
        found.append(_trials("fake", judged, slowdown, bounded=True))
    return found


def check_engine(
    resolved: Resolved, num_trials: int, progress: Callable[[str], None]
) -> list[Trials]:
    """A/A on the engine, and the planted slowdown once, which is shown and has no bound."""
    aa = []
    for trial in range(num_trials):
        aa.append(engine_comparison(resolved, 0.0))
        progress(f"engine: {trial + 1} of {num_trials}: {_word(aa[-1])}")
    planted = engine_comparison(resolved, SLOWDOWN)
    return [
        _trials("engine", aa, 0.0, bounded=True),
        _trials("engine", [planted], SLOWDOWN, bounded=False),
    ]


def fake_comparison(seed: Sequence[int], slowdown: float, noise: Noise = NOISE) -> Judgement:
    """The verdict on a cell that takes `1 + slowdown` times as long as the baseline."""
    rng = np.random.default_rng(seed)
    rounds: list[RoundRecord] = []
    speeds: list[dict[int, float]] = [{}, {}]
    now_s = level = 0.0

    def play(cell: int, index: int) -> None:
        nonlocal now_s, level
        level += rng.normal(0, noise.drift)
        wall_s = noise.round_s * float(np.exp(level + rng.normal(0, noise.deviation)))
        if rng.random() < noise.spike_share:
            wall_s *= 1 + rng.uniform(noise.spike_low, noise.spike_high)
        wall_s *= 1 + slowdown * (cell == _SLOWED_CELL)
        now_s += wall_s
        speeds[cell][index] = 1 / wall_s
        rounds.append(_fake_round(cell, index, wall_s))

    order_seed = int(rng.integers(2**31))
    play_rounds(
        play, speeds, seed=order_seed, rounds=DEFAULT_ROUNDS, auto=Auto(), clock=lambda: now_s
    )
    cells = [CellRecord(0, {"copy": 0}, baseline=True), CellRecord(1, {"copy": 1})]
    samples = Samples(Path("fake"), _fake_run(order_seed), cells, rounds)
    return judge_cells(compute_metrics(samples))[_SLOWED_CELL]


def engine_comparison(resolved: Resolved, slowdown: float) -> Judgement:
    """The verdict on a cell that runs what the baseline runs, every step longer by `slowdown`."""
    cells = [Cell(index, {"copy": index}, resolved) for index in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        with (
            Matrix(
                cells,
                rounds=DEFAULT_ROUNDS,
                axes={},
                progress=lambda text: None,
                auto=Auto(max_time_s=ENGINE_MAX_TIME_S),
                make_round=partial(SlowedRound, slowdown=slowdown),
            ) as matrix,
            SampleWriter(Path(folder) / "run") as writer,
        ):
            matrix.run(writer)
        samples = read_samples(Path(folder) / "run")
    return judge_cells(compute_metrics(samples))[_SLOWED_CELL]


class SlowedRound(Round):
    """A round whose steps last longer by `slowdown`, in the second cell alone."""

    def __init__(self, *args: Any, slowdown: float, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self._slowdown = slowdown if keys["cell"] == _SLOWED_CELL else 0.0
        self._before_ns = 0

    def _take(self, output: StepOutput) -> None:
        super()._take(output)
        now = time.perf_counter_ns()
        begun = max(self._before_ns, self._start_ns)
        until = now + self._slowdown * (now - begun)
        while now < until:  # a sleep would overshoot by more than it is to last
            now = time.perf_counter_ns()
        self._before_ns = now


def _trials(where: str, judged: Sequence[Judgement], slowdown: float, *, bounded: bool) -> Trials:
    true_ratio = 1 / (1 + slowdown)
    counts = Counter(_word(judgement) for judgement in judged)
    verdicts = {verdict.value: counts[verdict.value] for verdict in Verdict}
    ratios = [judgement.ratio for judgement in judged if judgement.ratio is not None]
    bounds: tuple[Bound, ...]
    coverage = sum(_covers(ratio, true_ratio) for ratio in ratios) / len(judged)
    if slowdown:
        bounds = (
            Bound("SLOWER", counts["SLOWER"] / len(judged), POWER, is_most=False),
            Bound("interval covers the truth", coverage, COVERAGE, is_most=False),
        )
        name = f"planted {100 * slowdown:g} %, {where}"
    else:
        alarms = counts["FASTER"] + counts["SLOWER"]
        alarm = Bound("FASTER or SLOWER", alarms / len(judged), FALSE_ALARMS, is_most=True)
        bounds, name = (alarm,), f"A/A, {where}"
    return Trials(
        name=name,
        num_trials=len(judged),
        true_ratio=true_ratio,
        verdicts=verdicts,
        coverage=coverage,
        mean_ratio=float(np.mean([ratio.center for ratio in ratios])),
        mean_rounds=float(np.mean([ratio.num_values for ratio in ratios])),
        bounds=bounds if bounded else (),
    )


def _covers(ratio: Estimate, value: float) -> bool:
    return ratio.interval is not None and ratio.interval.covers(value)


def _word(judgement: Judgement) -> str:
    assert judgement.verdict is not None, "the second cell is not the baseline"
    return judgement.verdict.value


def _fake_round(cell: int, index: int, wall_s: float) -> RoundRecord:
    return RoundRecord(cell, index, False, wall_s, 1000, 0, {}, {})


def _fake_run(seed: int) -> RunRecord:
    return RunRecord("fake", "fake", (), "", {}, {}, "", {}, seed, DEFAULT_ROUNDS)
