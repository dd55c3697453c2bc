"""What does watching cost? Steps that are recorded beside steps that are not.

One batch decodes; of each two successive steps one is recorded, like all steps of a benchmark, and
of the other nothing is noted. Which of them comes first is drawn, so that growing contexts favour
neither. What cannot be left out for a step is measured by itself and added: the NVML thread, by
the wall time of its questions, and the engine's own clock reads. Invariant: both kinds of step
belong to one engine in one run, so nothing but the record tells them apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.arrivals import RequestSpec
from bench.runner import Round, RoundResult, Target
from bench.schema import Workload
from bench.spec import Resolved
from bench.stats import Interval, median, paired_ratio
from deepinfer.outputs import StepOutput

BATCH = 16
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 256
SKIPPED_STEPS = 6  # prompts, and steps until everything is warm
CLOCK_READS = 16  # of the engine in a step, at most
LIMIT = 0.01  # of a step's time, for all of it together


@dataclass(frozen=True, slots=True)
class ObserverCost:
    """Shares of a step's time, 0.01 for 1 %.

    Attributes:
        step_us: median of the steps that were not recorded.
        num_pairs: of steps.
        records: what recording adds, the centre over the pairs, with its interval.
        nvml: wall time of NVML's answers; 0 where there is no NVML.
        clock_reads: the engine's own.
    """

    step_us: float
    num_pairs: int
    records: float
    records_interval: Interval
    nvml: float
    clock_reads: float

    @property
    def total(self) -> float:
        """All of it; a negative share is noise, and counts as none."""
        return max(self.records, 0.0) + self.nvml + self.clock_reads


class AlternatingRound(Round):
    """A round that records one of each two steps, and times them all."""

    def __init__(self, *args: Any, rng: np.random.Generator, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self._rng = rng
        self.step_ns: tuple[dict[int, float], dict[int, float]] = ({}, {})  # by pair: plain, noted

    def _drive(self) -> None:
        self._start_ns = time.perf_counter_ns()
        self._admit_arrivals()
        number, first = -SKIPPED_STEPS, 0
        while self._engine.has_unfinished():
            pair, second = divmod(number, 2)
            if not second:
                first = int(self._rng.integers(2))
            noted = bool(first ^ second) or number < 0
            begun = time.perf_counter_ns()
            self._engine.submit_all()
            output = self._engine.collect()
            if noted:
                self._take(output)
            if number >= 0:
                self.step_ns[noted][pair] = float(time.perf_counter_ns() - begun)
            if not noted:
                self._keep_tokens(output)
            number += 1

    def _keep_tokens(self, output: StepOutput) -> None:
        """Behind the clock: what the account of the requests needs of a step without record."""
        for request_id, token_id in zip(output.request_ids, output.token_ids.tolist(), strict=True):
            self._tracked[request_id].token_ids.append(token_id)
        for ended in output.finished:
            self._end(ended)


def observer_workload() -> Workload:
    """One batch that decodes for a few seconds."""
    group = {
        "count": BATCH,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
    }
    described = {"name": "observer", "description": "One batch.", "requests": [group]}
    return Workload.model_validate(described)


def measure_observer(
    resolved: Resolved,
    target: Target,
    requests: Iterable[RequestSpec],
    num_rounds: int,
    progress: Callable[[str], None],
) -> ObserverCost:
    """Decode the batch `num_rounds` times and compare the steps, pair by pair."""
    rng = np.random.default_rng(resolved.seed)
    specs = list(requests)
    plain: dict[int, float] = {}
    noted: dict[int, float] = {}
    nvml_shares = []
    for number in range(num_rounds):
        played = AlternatingRound(
            resolved, target, specs, cell=0, index=number, warmup=False, rng=rng
        )
        nvml_shares.append(_nvml_share(played.run()))
        for times, found in zip((plain, noted), played.step_ns, strict=True):
            times.update({len(times) + pair: ns for pair, ns in found.items()})
        progress(f"observer: {number + 1} of {num_rounds}")
    ratio, step_ns = paired_ratio(noted, plain), median(list(plain.values()))
    assert ratio is not None, "every round has pairs of steps"
    assert ratio.interval is not None, "every round has more than one"
    assert step_ns is not None, "every round has steps"
    interval = Interval(ratio.interval.low - 1, ratio.interval.high - 1)
    return ObserverCost(
        step_us=step_ns / 1e3,
        num_pairs=ratio.num_values,
        records=ratio.center - 1,
        records_interval=interval,
        nvml=max(nvml_shares),
        clock_reads=CLOCK_READS * _clock_read_ns() / step_ns,
    )


def _nvml_share(result: RoundResult) -> float:
    gpu = result.round.memory.get("gpu") or {}
    return float((gpu.get("cost") or {}).get("wall_share") or 0.0)


def _clock_read_ns(count: int = 10_000) -> float:
    begun = time.perf_counter_ns()
    for _ in range(count):
        time.perf_counter_ns()
    return (time.perf_counter_ns() - begun) / count
