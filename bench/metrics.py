"""Records -> metrics: latencies of a request, figures of a cell.

Knows the records and what each figure means; does not know how a table looks. Invariant: a pure
function of the samples, over measured (not warm-up) rounds that ended; a metric that is undefined
is None with its reason, never 0, and a request that failed is counted, never dropped in silence.

    TTFT = first token - arrival (queueing included)      E2E = last token - arrival
    TPOT = (E2E - TTFT) / (n - 1), n >= 2 output tokens   ITL = each gap between two tokens

All count tokens, not the chunks in which tokens reach the host: of tokens that one step brings, all
but the first have a gap of 0. Beside them stand the gaps between deliveries (a delivery: what one
step brings a request).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from bench import stats
from bench.rounds import THROTTLED_ROUND, is_settled, median_step_us, slowdowns
from bench.samples import (
    FINDING_COUNTERS,
    FORKED,
    CellRecord,
    FailureRecord,
    RequestRecord,
    RoundRecord,
    Samples,
    StepRecord,
    VerificationRecord,
)
from bench.step_metrics import Metric, largest, step_metrics

COMPLETED = ("length", "stop")


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Latencies of one request in seconds; None where undefined."""

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    itl_s: tuple[float, ...]

    @property
    def delivery_gaps_s(self) -> tuple[float, ...]:
        """Gaps between deliveries: no two steps end at one time, so a gap of 0 is within one."""
        return tuple(gap for gap in self.itl_s if gap > 0)


def request_times(request: RequestRecord) -> RequestTimes:
    """TTFT, TPOT, E2E and the ITL gaps of one request; TPOT needs two tokens, the rest one."""
    times = request.token_times_s
    if not times:
        return RequestTimes(None, None, None, ())
    ttft_s = times[0] - request.arrival_s
    e2e_s = times[-1] - request.arrival_s
    tpot_s = (e2e_s - ttft_s) / (len(times) - 1) if len(times) >= 2 else None
    return RequestTimes(ttft_s, tpot_s, e2e_s, tuple(b - a for a, b in pairwise(times)))


@dataclass(frozen=True, slots=True)
class CellMetrics:
    """Figures of one cell.

    Latencies pool the completed requests of all measured rounds; step figures pool their steps;
    figures counted per round (`withheld_block_ms`, `block_copies`, `later`, `preemptions`, memory)
    are the median over rounds, peaks the largest. `wrong_requests`, `near_ties` and
    `max_logprob_diff` cover every verified round, warm-up too: a wrong answer is wrong. So do
    `wrong_rows`, `hazards` and `contradictions`, what the checkers found, where they were on;
    `findings` are the first of them in words.
    """

    cell: CellRecord
    num_rounds: int
    num_unverified_rounds: int
    num_requests: int
    num_never: int
    num_aborted: int
    tok_per_s_by_round: dict[int, float]
    tok_per_s: Metric
    ttft_ms_p50: Metric
    ttft_ms_p99: Metric
    tpot_ms: Metric
    itl_ms_p99: Metric
    itl_delivery_ms_p99: Metric
    step_ms_p50: Metric
    host_us_per_step: Metric
    wait_us_per_step: Metric
    withheld_blocks_peak: Metric
    withheld_block_ms: Metric
    block_copies: Metric
    later: Metric
    later_blocks: Metric
    later_slots: Metric
    held_blocks_peak: Metric
    held_slots_peak: Metric
    withheld_slots_peak: Metric
    preemptions: Metric
    gap_us: Metric
    gap_percent: Metric
    ahead_blocks_peak: Metric
    ahead_blocks_mean: Metric
    draft_blocks_peak: Metric
    blocks_shrunk: Metric
    hit_blocks: Metric
    evicted_blocks: Metric
    loads: Metric
    loaded_token_percent: Metric
    saved_mib: Metric
    loaded_mib: Metric
    transfer_ms: Metric
    transfer_overlap_percent: Metric
    stateless_forks: Metric
    drafts_proposed: Metric
    drafts_accepted: Metric
    draft_rows_rejected: Metric
    acceptance_length: Metric
    acceptance_1: Metric
    acceptance_2: Metric
    acceptance_3: Metric
    acceptance_4: Metric
    acceptance_5: Metric
    wrong_requests: Metric
    near_ties: Metric
    max_logprob_diff: Metric
    wrong_rows: Metric
    hazards: Metric
    contradictions: Metric
    nvml_used_mib: Metric
    torch_peak_mib: Metric
    process_rss_mib: Metric
    outlier_rounds: tuple[int, ...] = ()  # whose tok/s is far from the others'
    slowed_rounds: tuple[int, ...] = ()  # with the GPU throttled, though they were run twice
    num_repeated_rounds: int = 0  # throttled, then run again
    is_settled: bool = True  # the last two warm-ups, where there were two
    findings: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()  # that were on in measured rounds

    @property
    def num_failed(self) -> int:
        """Requests that gave no complete answer: NEVER, aborted."""
        return self.num_never + self.num_aborted

    @property
    def num_findings(self) -> int:
        """Of all checkers."""
        found = (self.wrong_rows, self.hazards, self.contradictions)
        return sum(int(metric.value or 0) for metric in found)

    @property
    def all_failed(self) -> bool:
        """Whether not one request was completed: the run has no result, whatever its times say."""
        return 0 < self.num_requests == self.num_failed


def compute_metrics(samples: Samples) -> list[CellMetrics]:
    """The figures of every cell, in the order of the file."""
    return [_cell_metrics(samples, cell) for cell in samples.cells]


def _cell_metrics(samples: Samples, cell: CellRecord) -> CellMetrics:
    rounds = [r for r in samples.rounds if r.cell == cell.cell and not r.warmup]
    measured = {r.round for r in rounds}
    # A forked parent is no request of a user: its answer is its children's.
    requests = [
        r
        for r in samples.requests
        if r.cell == cell.cell and r.round in measured and r.finish_reason != FORKED
    ]
    steps = [s for s in samples.steps if s.cell == cell.cell and s.round in measured]
    verdicts = [v for v in samples.verifications if v.cell == cell.cell]
    by_round, no_speed = _speed_by_round(rounds, requests)
    metrics = CellMetrics(
        cell=cell,
        num_rounds=len(rounds),
        num_unverified_rounds=len(measured - {v.round for v in verdicts}),
        num_requests=len(requests),
        num_never=sum(r.finish_reason == "never" for r in requests),
        num_aborted=sum(r.finish_reason not in (*COMPLETED, "never") for r in requests),
        tok_per_s_by_round=by_round,
        tok_per_s=Metric.of(stats.median(list(by_round.values())), no_speed),
        **_latency_metrics(requests),
        **step_metrics(steps),
        **_counter_metrics(rounds),
        **_verification_metrics(verdicts),
        **_finding_metrics([r for r in samples.rounds if r.cell == cell.cell]),
        **_memory_metrics(rounds),
        outlier_rounds=stats.outliers(by_round),
        slowed_rounds=tuple(r.round for r in rounds if slowdowns(r.memory)),
        num_repeated_rounds=sum(
            r.cell == cell.cell and r.round <= THROTTLED_ROUND for r in samples.rounds
        ),
        is_settled=_is_settled(samples, cell),
        findings=tuple(text for r in samples.rounds if r.cell == cell.cell for text in r.findings),
        checks=tuple(
            name
            for name, counter in FINDING_COUNTERS.items()
            if any(counter in r.counters for r in rounds)
        ),
    )
    failure = samples.failure_of(cell.cell)
    return metrics if failure is None else _without_figures(metrics, failure)


def _is_settled(samples: Samples, cell: CellRecord) -> bool:
    """Whether the warm-up ended because it had settled; older files have one, which says nothing.

    A run that was resumed warmed up again, which the file does not tell.
    """
    steps: dict[int, list[StepRecord]] = {
        r.round: []
        for r in samples.rounds
        if r.cell == cell.cell and r.warmup and r.round > THROTTLED_ROUND
    }
    for step in samples.steps:
        if step.cell == cell.cell and step.round in steps:
            steps[step.round].append(step)
    step_us = [median_step_us(steps[number]) for number in sorted(steps, reverse=True)]
    return len(step_us) < 2 or is_settled(step_us)


def _without_figures(metrics: CellMetrics, failure: FailureRecord) -> CellMetrics:
    """A cell that failed has no figures, since it did not do its work; wrong answers stay wrong."""
    where = "its warm-up" if failure.round < 0 else f"round {failure.round + 1}"
    undefined = Metric(None, f"failed in {where}: {failure.reason}")
    kept = ("wrong_requests", "near_ties", "max_logprob_diff", *FINDING_COUNTERS.values())
    figures = {f.name: getattr(metrics, f.name) for f in fields(metrics)}
    emptied: dict[str, Any] = {
        name: undefined
        for name, figure in figures.items()
        if isinstance(figure, Metric) and (name not in kept or figure.value is None)
    }
    return replace(metrics, tok_per_s_by_round={}, **emptied)


def _speed_by_round(
    rounds: Sequence[RoundRecord], requests: Sequence[RequestRecord]
) -> tuple[dict[int, float], str]:
    """Output tokens a second of each round that has a speed, and why there may be none."""
    if not rounds:
        return {}, "no measured round"
    if requests and not any(r.finish_reason in COMPLETED for r in requests):
        return {}, "no request was completed"
    speeds = {
        r.round: r.num_output_tokens / r.wall_s
        for r in rounds
        if r.wall_s > 0 and r.num_output_tokens > 0
    }
    return speeds, "no round had an output token and took time"


def _latency_metrics(requests: Sequence[RequestRecord]) -> dict[str, Metric]:
    completed = [r for r in requests if r.finish_reason in COMPLETED]
    times = [request_times(r) for r in completed]
    ttft_ms = [t.ttft_s * 1e3 for t in times if t.ttft_s is not None]
    tpot_ms = [t.tpot_s * 1e3 for t in times if t.tpot_s is not None]
    itl_ms = [gap * 1e3 for t in times for gap in t.itl_s]
    delivery_ms = [gap * 1e3 for t in times for gap in t.delivery_gaps_s]
    if not requests:
        no_token = no_second = "no request in a measured round"
    elif not completed:
        no_token = no_second = "no request was completed"
    else:
        no_token, no_second = "no request had an output token", "no request had two output tokens"
    return {
        "ttft_ms_p50": Metric.of(stats.percentile(ttft_ms, 50), no_token),
        "ttft_ms_p99": Metric.of(stats.percentile(ttft_ms, 99), no_token),
        "tpot_ms": Metric.of(stats.percentile(tpot_ms, 50), no_second),
        "itl_ms_p99": Metric.of(stats.percentile(itl_ms, 99), no_second),
        "itl_delivery_ms_p99": Metric.of(stats.percentile(delivery_ms, 99), no_second),
    }


def _counter_metrics(rounds: Sequence[RoundRecord]) -> dict[str, Metric]:
    def median_of(name: str) -> Metric:
        return _over_rounds(stats.median, (r.counters.get(name) for r in rounds), name)

    def largest_of(name: str) -> Metric:
        return _over_rounds(largest, (r.counters.get(name) for r in rounds), name)

    return {
        "withheld_blocks_peak": largest_of("withheld_peak"),
        "withheld_slots_peak": largest_of("slots_withheld_peak"),
        "withheld_block_ms": median_of("withheld_block_ms"),
        "block_copies": median_of("num_block_copies"),
        "later": median_of("num_later"),
        "later_blocks": median_of("num_later_blocks"),
        "later_slots": median_of("num_later_slots"),
        "preemptions": median_of("num_preemptions"),
        "blocks_shrunk": median_of("num_blocks_shrunk"),
        "hit_blocks": median_of("num_hit_blocks"),
        "evicted_blocks": median_of("num_evicted_blocks"),
        **_store_metrics(rounds),
        "stateless_forks": median_of("num_stateless_forks"),
        "drafts_proposed": median_of("num_drafts_proposed"),
        "drafts_accepted": median_of("num_drafts_accepted"),
        "draft_rows_rejected": _over_rounds(
            stats.median, map(_num_rejected, rounds), "num_draft_rows"
        ),
    }


def _store_metrics(rounds: Sequence[RoundRecord]) -> dict[str, Metric]:
    """Of rounds with a store; medians over them, and of the shares too."""
    kept = [r for r in rounds if "num_loads" in r.counters]

    def median_of(name: str, of_round: Callable[[RoundRecord], float | None]) -> Metric:
        if not kept:
            return Metric(None, "no store")
        return _over_rounds(stats.median, (of_round(r) for r in kept), name)

    def share(part: float | None, whole: float | None) -> float | None:
        return 100 * part / whole if part is not None and whole else None

    return {
        "loads": median_of("num_loads", lambda r: r.counters["num_loads"]),
        "loaded_token_percent": median_of(
            "num_prompt_tokens",
            lambda r: share(r.counters["num_loaded_tokens"], r.num_prompt_tokens),
        ),
        "saved_mib": median_of("bytes_saved", lambda r: _mib(r.counters["bytes_saved"])),
        "loaded_mib": median_of("bytes_loaded", lambda r: _mib(r.counters["bytes_loaded"])),
        "transfer_ms": median_of("transfer_ms", lambda r: r.counters["transfer_ms"]),
        "transfer_overlap_percent": median_of(
            "transfer_ms",
            lambda r: share(r.counters["transfer_beside_steps_ms"], r.counters["transfer_ms"]),
        ),
    }


def _mib(num_bytes: float | None) -> float | None:
    return None if num_bytes is None else num_bytes / 2**20


def _verification_metrics(verdicts: Sequence[VerificationRecord]) -> dict[str, Metric]:
    if not any(v.checked_requests for v in verdicts):
        unverified = Metric(None, "no request was verified")
        return dict.fromkeys(("wrong_requests", "near_ties", "max_logprob_diff"), unverified)
    diffs = [v.max_logprob_diff for v in verdicts if v.checked_requests]
    # One round without a finite difference must not hide behind the others' small ones.
    known = [diff for diff in diffs if diff is not None]
    worst = max(known) if len(known) == len(diffs) else None
    return {
        "wrong_requests": Metric(sum(v.wrong_requests for v in verdicts)),
        "near_ties": Metric(sum(v.near_ties for v in verdicts)),
        "max_logprob_diff": Metric.of(worst, "a round has no finite log-probability difference"),
    }


def _finding_metrics(rounds: Sequence[RoundRecord]) -> dict[str, Metric]:
    """The findings of each checker, over the rounds in which it was on."""
    counts = {
        counter: [found for r in rounds if (found := r.counters.get(counter)) is not None]
        for counter in FINDING_COUNTERS.values()
    }
    return {
        counter: Metric.of(sum(found) if found else None, f"checker {check} was off")
        for (check, counter), found in zip(FINDING_COUNTERS.items(), counts.values(), strict=True)
    }


def _memory_metrics(rounds: Sequence[RoundRecord]) -> dict[str, Metric]:
    def largest_mib(collector: str, key: str) -> Metric:
        sizes = [r.memory.get(key) for r in rounds]
        reasons = [(r.memory.get("reasons") or {}).get(collector) for r in rounds]
        reason = next((f"{collector}: {text}" for text in reasons if text), f"no {key} recorded")
        known = [size / 2**20 for size in sizes if isinstance(size, (int, float))]
        return Metric.of(max(known, default=None), reason)

    return {
        "nvml_used_mib": largest_mib("nvml", "nvml_used_bytes"),
        "torch_peak_mib": largest_mib("allocator", "torch_peak_allocated_bytes"),
        "process_rss_mib": largest_mib("process", "process_rss_bytes"),
    }


def _num_rejected(record: RoundRecord) -> float | None:
    computed = record.counters.get("num_draft_rows")
    accepted = record.counters.get("num_drafts_accepted")
    return None if computed is None or accepted is None else computed - accepted


def _over_rounds(
    combine: Callable[[Sequence[float]], float | None],
    values: Iterable[float | None],
    name: str,
) -> Metric:
    known = [value for value in values if value is not None]
    return Metric.of(combine(known), f"no round counted {name}")
