"""What must be said beside a table: how much was run, what failed, what cannot be trusted.

Knows the samples and the metrics; knows no columns and no output format. Invariant: whatever makes
a row say less than it seems to (a missing round, a failed request, an unverified answer) is a note.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.metrics import CellMetrics
from bench.samples import Samples
from bench.stats import PairedRatio

LEGEND = (
    "TTFT: arrival to first token, queueing included. "
    "TPOT = (E2E - TTFT) / (n - 1), the median of requests with n >= 2 output tokens. "
    "ITL: each gap between two tokens. Percentiles are nearest-rank, over completed requests.",
    "step: host time plus waits of one step. host: median without waits. "
    "wait: mean time the host was blocked by the release policy.",
    "withheld block-ms, copies, LATER, preemptions: median of the rounds. "
    "Withheld peak and memory: largest. wrong requests: sum of all verified rounds.",
    "vs baseline: median over rounds of tok/s divided by the baseline's of the same round, "
    "[95 % bootstrap interval].",
)


def build_notes(
    samples: Samples, metrics: Sequence[CellMetrics], ratios: Sequence[PairedRatio | None]
) -> tuple[str, ...]:
    """The notes of a run, the gravest first."""
    return (
        *_state_of_file(samples),
        *_per_cell(metrics, _unsafe),
        *_per_cell(metrics, _unverified),
        *_per_cell(metrics, lambda m: _not_run(m, samples.run.rounds)),
        *_per_cell(metrics, _failed),
        *samples.run.notes,
        _rounds(samples, metrics),
        *_within_noise(metrics, ratios),
        *_per_cell(metrics, _near_ties),
    )


def cell_label(metrics: CellMetrics) -> str:
    """The cell's settings in one word, such as `deferred/reverse`."""
    return "/".join(str(value) for value in metrics.cell.axes.values()) or "the run"


def _state_of_file(samples: Samples) -> list[str]:
    notes = []
    if samples.truncated:
        notes.append("TRUNCATED: the last line of the results file was cut off and is left out")
    if samples.end is None:
        notes.append("UNFINISHED: the results file has no end; the run was killed or still goes on")
    elif samples.end.status != "complete":
        reason = f" ({samples.end.reason})" if samples.end.reason else ""
        notes.append(f"{samples.end.status.upper()}{reason}: the table shows what was measured")
    return notes


def _unsafe(m: CellMetrics) -> str:
    return "UNSAFE, may hand out blocks still in use, whatever this run shows" * m.cell.unsafe


def _unverified(m: CellMetrics) -> str:
    if not m.num_unverified_rounds:
        return ""
    return f"UNVERIFIED, the answers of {m.num_unverified_rounds} of {_num(m.num_rounds, 'round')}"


def _not_run(m: CellMetrics, num_asked: int) -> str:
    missing = num_asked - m.num_rounds
    return f"not run: {missing} of {_num(num_asked, 'round')}" if missing > 0 else ""


def _failed(m: CellMetrics) -> str:
    parts = [
        f"{count} {what}"
        for count, what in (
            (m.num_never, "NEVER (cannot fit the pool)"),
            (m.num_aborted, "aborted"),
        )
        if count
    ]
    if not parts:
        return ""
    share = 100 * m.num_failed / m.num_requests
    return f"{' and '.join(parts)} of {_num(m.num_requests, 'request')} ({share:.3g} % failed)"


def _near_ties(m: CellMetrics) -> str:
    count = m.near_ties.value
    return f"{_num(int(count), 'near-tie')}, not counted as wrong" if count else ""


def _rounds(samples: Samples, metrics: Sequence[CellMetrics]) -> str:
    baseline = next((cell_label(m) for m in metrics if m.cell.baseline), None)
    rounds = f"{_num(samples.run.rounds, 'measured round')} per cell"
    if baseline is None or len(metrics) < 2:
        return rounds
    return f"{rounds}; baseline: {baseline}"


def _within_noise(
    metrics: Sequence[CellMetrics], ratios: Sequence[PairedRatio | None]
) -> list[str]:
    same = [
        cell_label(m)
        for m, ratio in zip(metrics, ratios, strict=True)
        if ratio is not None and ratio.is_noise and not m.cell.baseline
    ]
    if not same:
        return []
    return [f"same as the baseline within noise (the interval covers 1): {', '.join(same)}"]


def _per_cell(metrics: Sequence[CellMetrics], say: Callable[[CellMetrics], str]) -> list[str]:
    """What `say` says of each cell, cells of which it says the same in one line."""
    cells: dict[str, list[str]] = {}
    for m in metrics:
        if text := say(m):
            cells.setdefault(text, []).append(cell_label(m))
    return [
        text if len(metrics) == 1 else f"{_which(labels, metrics)}: {text}"
        for text, labels in cells.items()
    ]


def _which(labels: Sequence[str], metrics: Sequence[CellMetrics]) -> str:
    return "every cell" if len(labels) == len(metrics) else ", ".join(labels)


def _num(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
