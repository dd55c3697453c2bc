"""Where one step's time goes, on the host and on the device, under each release policy.

Each round runs three times, in alternating order: watched and not, which gives the parts and says
what watching costs, and once with the next step planned ahead. The two that nobody watches say how
long the device waits for the host with and without. Parts are those of a step by itself, so only
that one round runs with `overlap`.

Knows the phases of a step; knows no output format. Invariant: a step's host parts add up to its
time from planning to commit, to the nanosecond; its device parts add up to no more than that, and
`idle` is the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from bench.probes.watch import WAIT, Operation, Span, Upload
from bench.probes.watched_engine import (
    Watched,
    WatchedStep,
    draw_requests,
    nothing_ran,
    num_wrong,
    run_plain,
    run_watched,
)
from bench.runner import RoundResult, Target
from bench.samples import StepRecord
from bench.spec import Resolved
from bench.stats import Estimate, median, paired_ratio, percentile
from bench.step_metrics import host_gap
from deepinfer.device.base import COMPUTE

HOST, DEVICE = "host", "device"
HOST_PARTS = (
    *("schedule", "staging", "launch", "wait", "release", "caller", "result_wait", "collect"),
    "commit",
)
DEVICE_PARTS = ("copies", "staging", "forward", "sampling", "idle")
NS_PER_US = 1e3

StepTimes = dict[tuple[str, str], float]  # (host or device, part) -> microseconds


@dataclass(frozen=True, slots=True)
class StepRow:
    """One part of the steps of one policy, in microseconds per step.

    Attributes:
        where: `host` or `device`.
        share: of the step's time, mean by mean.
    """

    release: str
    where: str
    part: str
    mean_us: float
    median_us: float
    p99_us: float
    share: float


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """What stands beside the rows of one policy.

    Attributes:
        num_steps: watched.
        step_us: mean time of a watched step, planning to commit.
        observer: period of watched steps over that of others; None where a round has one step only.
        num_wrong: requests with wrong tokens, of one watched round and one planned ahead.
        clock_error_us, drift_us: of device times against the host's clock, the largest.
    """

    release: str
    unsafe: bool
    num_steps: int
    step_us: float
    observer: Estimate | None
    num_wrong: int
    clock_error_us: float
    drift_us: float


@dataclass(frozen=True, slots=True)
class GapRow:
    """How long the device waits for the host between two steps, under one policy.

    Attributes:
        overlap: `off` or `on`.
        median_us: None, like the others, where no step follows another.
        percent: of the time of all steps and gaps, so what once held the device up counts in full.
        median_percent: of the time of one step and its gap.
    """

    release: str
    overlap: str
    median_us: float | None
    percent: float | None
    median_percent: float | None


@dataclass(frozen=True, slots=True)
class StepProfile:
    """All figures of one run; `notes` say what was done to its input."""

    rows: tuple[StepRow, ...]
    gaps: tuple[GapRow, ...]
    policies: tuple[PolicyFacts, ...]
    device: str
    num_rounds: int
    notes: tuple[str, ...]


def profile_steps(
    resolved: Resolved,
    releases: Sequence[str],
    *,
    num_rounds: int,
    on_probe: Callable[[str], None] = lambda name: None,
) -> StepProfile:
    """Run the workload `num_rounds` times in each of the three ways, under each policy in turn.

    One round of each policy warms up. `on_probe` is told what runs next.
    """
    target = Target(resolved)
    try:
        alone = resolved.with_engine(overlap="off")
        contests = [_Contest(alone.with_engine(release=name), target) for name in releases]
        for contest in contests:
            on_probe(f"{contest.release}: warm-up")
            contest.warm_up()
        for index in range(num_rounds):
            for contest in contests:
                on_probe(f"{contest.release}: round {index + 1} of {num_rounds}")
                contest.run(index)
        facts = tuple(contest.facts() for contest in contests)
    finally:
        target.close()
    return StepProfile(
        rows=tuple(row for contest in contests for row in contest.rows()),
        gaps=tuple(row for contest in contests for row in contest.gaps()),
        policies=facts,
        device=resolved.device,
        num_rounds=num_rounds,
        notes=resolved.notes,
    )


class _Contest:
    """One policy's rounds: watched, not watched, and planned ahead."""

    def __init__(self, resolved: Resolved, target: Target) -> None:
        self.release = resolved.engine.release
        self._resolved = resolved
        self._target = target
        self._requests = draw_requests(resolved)
        self._steps: list[StepTimes] = []
        self._periods: tuple[dict[int, float], dict[int, float]] = ({}, {})  # not, and watched
        self._plain: dict[str, list[StepRecord]] = {"off": [], "on": []}  # by overlap
        self._num_wrong = 0
        self._clock_error_us = self._drift_us = 0.0

    def warm_up(self) -> None:
        """Run once, on the requests of another round."""
        run_plain(self._resolved, self._target, draw_requests(self._resolved, -1))

    def run(self, index: int) -> None:
        """Run a round of each kind; which goes first alternates."""
        ways: list[Callable[[int], None]] = [self._run_watched, self._run_alone, self._run_ahead]
        for run in reversed(ways) if index % 2 else ways:
            run(index)

    def _run_alone(self, index: int) -> None:
        result = run_plain(self._resolved, self._target, self._requests)
        self._plain["off"] += result.steps
        self._note_period(result, index, watched=False)

    def _run_ahead(self, index: int) -> None:
        ahead = self._resolved.with_engine(overlap="on")
        result = run_plain(ahead, self._target, self._requests)
        self._plain["on"] += result.steps
        if index == 0:
            self._num_wrong += num_wrong(ahead, self._target, result)

    def _note_period(self, result: RoundResult, index: int, *, watched: bool) -> None:
        period = step_period_s(result)
        if period is not None:
            self._periods[watched][index] = period

    def _run_watched(self, index: int) -> None:
        watched = run_watched(self._resolved, self._target, self._requests)
        if not watched.steps:
            raise nothing_ran(self._resolved)
        if index == 0:
            self._num_wrong += num_wrong(self._resolved, self._target, watched.result)
        device = watched.device
        self._clock_error_us = max(self._clock_error_us, device.clock_error_ns / NS_PER_US)
        self._drift_us = max(self._drift_us, abs(device.drift_ns) / NS_PER_US)
        self._steps += step_times(watched)
        self._note_period(watched.result, index, watched=True)

    def facts(self) -> PolicyFacts:
        """What the rounds say besides the parts."""
        plain, watched = self._periods
        return PolicyFacts(
            release=self.release,
            unsafe=self._resolved.unsafe,
            num_steps=len(self._steps),
            step_us=self._step_us(),
            observer=paired_ratio(watched, plain),
            num_wrong=self._num_wrong,
            clock_error_us=self._clock_error_us,
            drift_us=self._drift_us,
        )

    def _step_us(self) -> float:
        return fmean(sum(times[HOST, part] for part in HOST_PARTS) for times in self._steps)

    def gaps(self) -> list[GapRow]:
        """The device's waits for the host, without overlap and with it."""
        rows = []
        for overlap, steps in self._plain.items():
            gap_us, percent = (metric.value for metric in host_gap(steps))
            rows.append(GapRow(self.release, overlap, gap_us, percent, gap_share(steps)))
        return rows

    def rows(self) -> list[StepRow]:
        """A row for each part."""
        rows, step_us = [], self._step_us()
        for where, parts in ((HOST, HOST_PARTS), (DEVICE, DEVICE_PARTS)):
            for part in parts:
                values = [times[where, part] for times in self._steps]
                middle, p99 = median(values), percentile(values, 99)
                assert middle is not None, "a round has steps"
                assert p99 is not None, "a round has steps"
                mean = fmean(values)
                rows.append(
                    StepRow(self.release, where, part, mean, middle, p99, share=mean / step_us)
                )
        return rows


def gap_share(steps: Sequence[StepRecord]) -> float | None:
    """Median over the steps of the gap before a step, in percent of both together."""
    return median(
        [
            100 * s.gap_us / (s.gap_us + s.device_ms * 1e3)
            for s in steps
            if s.gap_us is not None and s.device_ms
        ]
    )


def step_period_s(result: RoundResult) -> float | None:
    """Median time from one step's end to the next one's; None for fewer than two steps."""
    ends = [step.end_s for step in result.steps]
    return median([after - before for before, after in pairwise(ends)])


# -- one step ------------------------------------------------------------------------------------


def step_times(watched: Watched) -> list[StepTimes]:
    """The parts of every step of a round. Places its operations: call it once."""
    return [_times_of(step, watched) for step in watched.steps]


def _times_of(step: WatchedStep, watched: Watched) -> StepTimes:
    stats, moments = step.stats, step.stats.moments
    staged = [upload for op in step.operations for upload in op.uploads]
    by_host = [upload for upload in staged if _is_host_staging(upload, step)]
    host_staging = sum(map(_duration, (upload.span for upload in by_host)))
    host = {
        "schedule": stats.schedule_ns,
        "staging": host_staging,
        "launch": stats.submit_ns - host_staging,
        "wait": stats.wait_ns,
        "release": stats.release_ns,
        "caller": moments.collecting - moments.released,
        "result_wait": stats.result_wait_ns,
        "collect": stats.collect_ns,
        "commit": stats.commit_ns,
    }
    device, spans = dict.fromkeys(DEVICE_PARTS, 0), []
    inside = {id(upload) for upload in staged} - {id(upload) for upload in by_host}
    for operation in step.operations:
        for part, span in _placed(operation, watched):
            uploads = [
                upload.span
                for upload in operation.uploads
                if id(upload) in inside and span.start_ns <= upload.span.start_ns < span.end_ns
            ]
            staging = sum(map(_duration, uploads))
            device["staging"] += staging
            device[part] += _duration(span) - staging
            spans.append(span)
    wall_ns = moments.committed - moments.started
    device["idle"] = wall_ns - busy_ns(spans, moments.started, moments.committed)
    return {
        **{(HOST, part): host[part] / NS_PER_US for part in HOST_PARTS},
        **{(DEVICE, part): device[part] / NS_PER_US for part in DEVICE_PARTS},
    }


def _is_host_staging(upload: Upload, step: WatchedStep) -> bool:
    """Whether the host made the copy while it submitted the step, not while it waited for it.

    A device without threads runs its operations on the host's thread, inside the waits.
    """
    start_ns, moments = upload.span.start_ns, step.stats.moments
    if upload.by_device or not moments.planned <= start_ns < moments.submitted:
        return False
    return not any(wait.start_ns <= start_ns < wait.end_ns for wait in step.host_waits)


def _placed(operation: Operation, watched: Watched) -> list[tuple[str, Span]]:
    """Where the time of an operation counts; waits of a stream count as idle."""
    spans = watched.device.place(operation)
    if operation.label == WAIT:
        return []
    first = "forward" if operation.stream == COMPUTE else "copies"
    return [(first if i == 0 else span.name, span) for i, span in enumerate(spans)]


def _duration(span: Span) -> int:
    return span.end_ns - span.start_ns


def busy_ns(spans: Sequence[Span], start_ns: int, end_ns: int) -> int:
    """Nanoseconds between the two moments in which at least one span was under way."""
    busy, reached = 0, start_ns
    for span in sorted(spans, key=lambda span: span.start_ns):
        first, last = max(span.start_ns, reached), min(span.end_ns, end_ns)
        if last > first:
            busy += last - first
            reached = last
    return busy
