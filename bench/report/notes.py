"""What must be said beside a table: how much was run, what failed, what cannot be trusted.

Knows the samples and the metrics; knows no columns and no output format. Invariant: whatever makes
a row say less than it seems to (a missing round, a failed request, an unverified answer) is a note.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.metrics import CellMetrics
from bench.rounds import MAX_WARMUPS
from bench.samples import Samples, label_of_axes
from bench.stats import CONFIDENCE, Judgement, Verdict, Why

# Policies that keep blocks back until a fence has passed, or wait for it.
HOLDING = {"blocking", "deferred", "polled", "step"}
NUM_SHOWN = 3  # findings of a cell
# Axes that change something only where something happens: the metric that counts it, and what to
# say if it never did.
HAPPENING = {
    "drafter": ("drafts_proposed", "no draft was proposed"),
    "acceptance": ("drafts_proposed", "no draft was proposed"),
    "fork_copy": ("block_copies", "no block was copied"),
    "load_stream": ("loads", "nothing was loaded from a store"),
    "num_state_slots": ("held_slots_peak", "no request has state"),
}


def build_notes(
    samples: Samples, metrics: Sequence[CellMetrics], judgements: Sequence[Judgement]
) -> tuple[str, ...]:
    """The notes of a run, the gravest first."""
    return (
        *_state_of_file(samples),
        *_per_cell(metrics, _found),
        *_per_cell(metrics, _unsafe),
        *_per_cell(metrics, _unverified),
        *_per_cell(metrics, lambda m: _not_run(m, samples.run.rounds)),
        *_per_cell(metrics, _failed),
        *samples.run.notes,
        _rounds(samples, metrics),
        *_nothing_in_flight(metrics),
        *_nothing_happened(metrics),
        *_unclear(metrics, judgements),
        *_detectable(metrics, judgements),
        *_per_cell(metrics, _outliers),
        *_per_cell(metrics, _throttled),
        *_per_cell(metrics, _unsettled),
        *_per_cell(metrics, _near_ties),
        *_per_cell(metrics, _checked),
    )


def cell_label(metrics: CellMetrics) -> str:
    """The cell's settings in one word, such as `deferred/reverse`."""
    return label_of_axes(metrics.cell.axes)


def _state_of_file(samples: Samples) -> list[str]:
    notes = []
    if samples.truncated:
        notes.append("TRUNCATED: the last line of the results file was cut off and is left out")
    if samples.end is None:
        notes.append("UNFINISHED: the results file has no end; the run was killed or still goes on")
    elif samples.end.status == "complete":
        if samples.end.reason:
            notes.append(f"rounds were added until: {samples.end.reason}")
    else:
        reason = f" ({samples.end.reason})" if samples.end.reason else ""
        notes.append(f"{samples.end.status.upper()}{reason}: the table shows what was measured")
    return notes


def _found(m: CellMetrics) -> str:
    """What the checkers found, and the first of it."""
    counts = [
        _num(int(metric.value), noun)
        for metric, noun in (
            (m.wrong_rows, "wrong row"),
            (m.hazards, "hazard"),
            (m.contradictions, "contradiction"),
        )
        if metric.value
    ]
    found = list(dict.fromkeys(m.findings))[:NUM_SHOWN]
    return f"UNSAFE, {', '.join(counts)}: {'; '.join(found)}" if counts else ""


def _checked(m: CellMetrics) -> str:
    if not m.checks:
        return ""
    return f"{', '.join(m.checks)} checked in measured rounds too, whose times include it"


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
    if not any(m.num_rounds for m in metrics):
        return "no measured round has ended: there is no figure to show"
    count = max([samples.run.rounds, *(m.num_rounds for m in metrics)])  # `-r auto` adds some
    rounds = f"{_num(count, 'measured round')} per cell"
    if baseline is None or len(metrics) < 2:
        return rounds
    return f"{rounds}; baseline: {baseline}"


def _nothing_in_flight(metrics: Sequence[CellMetrics]) -> list[str]:
    """That the release policies were compared on a run in which they had nothing to do."""
    policies = {m.cell.axes.get("release") for m in metrics}
    idle = all(m.withheld_blocks_peak.value == m.wait_us_per_step.value == 0 for m in metrics)
    if len(policies) < 2 or not policies & HOLDING or not idle:
        return []
    return [
        "nothing was given up while device work was in flight: the release policies cannot differ "
        "here (forks and aborts in mid-step are what they differ in)"
    ]


def _nothing_happened(metrics: Sequence[CellMetrics]) -> list[str]:
    """Axes whose values were compared on a run in which they had nothing to do."""
    notes: list[str] = []
    if not any(m.num_rounds for m in metrics):
        return notes
    for axis, (key, what) in HAPPENING.items():
        values = {str(m.cell.axes.get(axis)) for m in metrics}
        if len(values) > 1 and not any(getattr(m, key).value for m in metrics):
            notes.append(f"{what}: {axis} cannot make a difference here")
    return notes


_WHY_UNCLEAR = {
    Why.TOO_WIDE: "the interval is too wide to tell; more rounds (-r, or -r auto) narrow it",
    Why.ONE_ROUND: "one round says nothing of the noise; use -r 7 or more",
    Why.TOO_FEW_ROUNDS: f"under seven rounds give no {100 * CONFIDENCE:g} % interval",
    Why.NO_COMMON_ROUND: "no round in common with the baseline",
    Why.UNSAFE: "unsafe, whatever its speed",
    Why.WRONG_ANSWERS: "wrong answers here or in the baseline",
    Why.FINDINGS: "what the checkers found here or in the baseline",
    Why.FAILED_REQUESTS: "not as many failed requests as in the baseline: not the same work",
    Why.THROTTLED: "the GPU was throttled here or in the baseline, in a repeated round too",
}


def _unclear(metrics: Sequence[CellMetrics], judgements: Sequence[Judgement]) -> list[str]:
    """Why cells are UNCLEAR; those for the same reason in one line."""
    if len(metrics) < 2 or not any(m.cell.baseline for m in metrics):
        return []
    cells: dict[Why, list[str]] = {}
    for m, judged in zip(metrics, judgements, strict=True):
        if judged.verdict is Verdict.UNCLEAR:
            cells.setdefault(judged.why, []).append(cell_label(m))
    return [f"UNCLEAR, {', '.join(labels)}: {_WHY_UNCLEAR[why]}" for why, labels in cells.items()]


def _detectable(metrics: Sequence[CellMetrics], judgements: Sequence[Judgement]) -> list[str]:
    """The smallest difference the run could have seen, over cells whose interval is a real one."""
    sizes = {
        cell_label(m): 100 * judged.detectable
        for m, judged in zip(metrics, judgements, strict=True)
        if judged.ratio is not None
        and judged.ratio.confidence >= CONFIDENCE
        and judged.detectable is not None
        and not m.cell.baseline
    }
    if not sizes:
        return []
    best, worst = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    text = f"smallest difference this run could see: {sizes[best]:.2g} %"
    if f"{sizes[best]:.2g}" == f"{sizes[worst]:.2g}":
        return [text]
    return [f"{text} ({best}) to {sizes[worst]:.2g} % ({worst})"]


def _outliers(m: CellMetrics) -> str:
    if not m.outlier_rounds or m.tok_per_s.value is None:
        return ""
    speeds = m.tok_per_s_by_round
    rounds = ", ".join(f"round {r + 1} at {speeds[r]:.4g} tok/s" for r in m.outlier_rounds)
    return f"outliers, counted like the others: {rounds}"


def _throttled(m: CellMetrics) -> str:
    if not m.num_repeated_rounds:
        return ""
    repeated = f"{_num(m.num_repeated_rounds, 'round')} run again because the GPU was throttled"
    if not m.slowed_rounds:
        return repeated
    return f"{repeated}; THROTTLED again in {len(m.slowed_rounds)} of them"


def _unsettled(m: CellMetrics) -> str:
    if m.is_settled:
        return ""
    return f"never settled: step times still changed after {MAX_WARMUPS} warm-ups"


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
