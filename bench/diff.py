"""Two saved results compared, cell by cell.

Knows the samples and their metrics; reads no file and prints nothing. Invariant: cells are matched
by their axes alone; what one result has and the other has not is named, never left out in silence.

The two runs share no rounds, so ratio and interval are those of unpaired samples, a value a round
(`bench.stats.unpaired_ratio`). What differs between the machines is not in that interval: it is in
`Difference.warnings`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as count_from
from pathlib import Path
from typing import Any

from bench.metrics import CellMetrics, compute_metrics
from bench.provenance import environment_changes
from bench.samples import FINDING_COUNTERS, SAMPLES_FILE, CellRecord, Samples, label_of_axes
from bench.stats import (
    CONFIDENCE,
    MARGIN,
    Estimate,
    Interval,
    Verdict,
    Why,
    judge,
    median,
    rank_sum_cut,
    unpaired_ratio,
)
from deepinfer.errors import UserError

HIGHER_IS_BETTER = {
    "tok_per_s": True,
    "ttft_ms_p50": False,
    "ttft_ms_p99": False,
    "tpot_ms": False,
    "itl_ms_p99": False,
}
# The fewest rounds of two alike runs with an interval of that confidence.
_ENOUGH = next(count for count in count_from(2) if rank_sum_cut(count, count)[1] >= CONFIDENCE)
_REASONS = {
    Why.NO_COMMON_ROUND: "no measured round",
    Why.ONE_ROUND: "one round on each side has no interval",
    Why.TOO_FEW_ROUNDS: f"so few rounds can lie apart by chance; {_ENOUGH} on each side are enough",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of one cell in both results: `base` and `new` are medians over their rounds.

    `ratio` is new by base, whatever is better; `verdict` says which. They are None and UNCLEAR
    where a figure is undefined; `reason` says why, and why an interval is not enough.
    """

    metric: str
    base: float | None
    new: float | None
    ratio: float | None
    interval: Interval | None
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CellDifference:
    """A cell both results have. `problems` are sentences: failures and wrong answers of the new."""

    axes: dict[str, Any]
    changes: tuple[Change, ...]
    problems: tuple[str, ...]

    @property
    def label(self) -> str:
        """`deferred/reverse`."""
        return label_of_axes(self.axes)


@dataclass(frozen=True, slots=True)
class Difference:
    """What two results say of one another.

    Attributes:
        only_base, only_new: labels of cells that the other result does not have.
        warnings: what differs besides what is under study: machine, configuration, commit.
    """

    base: Samples
    new: Samples
    threshold: float
    cells: tuple[CellDifference, ...]
    only_base: tuple[str, ...]
    only_new: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def slower(self) -> tuple[str, ...]:
        """`deferred/reverse tok_per_s` for each figure that got worse."""
        return tuple(
            f"{cell.label} {change.metric}"
            for cell in self.cells
            for change in cell.changes
            if change.verdict is Verdict.SLOWER
        )

    @property
    def is_worse(self) -> bool:
        """Whether a check must fail: something slower, wrong, failed or no longer there."""
        return bool(self.slower or self.only_base or any(cell.problems for cell in self.cells))


def compare_results(base: Samples, new: Samples, threshold: float = MARGIN) -> Difference:
    """Compare `new` with `base`; a change of less than `threshold` (0.03 is 3 %) is none.

    Raises UserError if the workloads differ or no cell is in both.
    """
    if base.run.workload != new.run.workload:
        raise UserError(
            f"{new.path}: workload {new.run.workload}, but {base.path} has {base.run.workload}; "
            "expected two results of one workload"
        )
    cells, olds = _by_axes(new), _by_axes(base)
    common = [key for key in olds if key in cells]
    if not common:
        raise UserError(
            f"{new.path}: no cell of it ({_labels(cells)}) is in {base.path} ({_labels(olds)})",
            hint="cells are matched by their axes: compare runs over the same axes",
        )
    return Difference(
        base=base,
        new=new,
        threshold=threshold,
        cells=tuple(_compare_cell(base, olds[key], new, cells[key], threshold) for key in common),
        only_base=tuple(label_of_axes(olds[key].axes) for key in olds if key not in cells),
        only_new=tuple(label_of_axes(cells[key].axes) for key in cells if key not in olds),
        warnings=tuple(_warnings(base, new)),
    )


def source_of(samples: Samples) -> Path:
    """The run's folder; the file itself if it has a name of its own."""
    path = samples.path
    return path.parent if path.name == SAMPLES_FILE else path


def _by_axes(samples: Samples) -> dict[str, CellRecord]:
    """Cells by their axes, in whatever order those were given."""
    return {json.dumps(cell.axes, sort_keys=True): cell for cell in samples.cells}


def _labels(cells: Mapping[str, CellRecord]) -> str:
    return ", ".join(label_of_axes(cell.axes) for cell in cells.values()) or "none"


def _compare_cell(
    base: Samples, old_cell: CellRecord, new: Samples, cell: CellRecord, threshold: float
) -> CellDifference:
    olds, news = _by_round(base, old_cell), _by_round(new, cell)
    failures = [(s, s.failure_of(c.cell)) for s, c in ((base, old_cell), (new, cell))]
    reason = "; ".join(f"failed in {source_of(s)}: {f.reason}" for s, f in failures if f)
    changes = tuple(
        Change(metric, None, None, None, None, Verdict.UNCLEAR, reason)
        if reason
        else _change(metric, olds, news, threshold)
        for metric in HIGHER_IS_BETTER
    )
    failure = failures[1][1]
    problems = [f"failed: {failure.reason}"] if failure else []
    num_wrong = sum(v.wrong_requests for v in new.verifications if v.cell == cell.cell)
    problems += [f"{num_wrong} wrong requests"] if num_wrong else []
    for counter in FINDING_COUNTERS.values():
        found = sum(r.counters.get(counter) or 0 for r in new.rounds if r.cell == cell.cell)
        problems += [f"{found:g} {counter.replace('_', ' ')}"] if found else []
    return CellDifference(cell.axes, changes, tuple(problems))


def _change(
    metric: str, olds: Sequence[CellMetrics], news: Sequence[CellMetrics], threshold: float
) -> Change:
    before, why_not_before = _values(metric, olds)
    after, why_not_after = _values(metric, news)
    ratio = unpaired_ratio(after, before)
    speed = ratio if HIGHER_IS_BETTER[metric] else _inverse(ratio)
    judged = judge(speed, margin=threshold)
    return Change(
        metric,
        median(before),
        median(after),
        ratio.center if ratio else None,
        ratio.interval if ratio else None,
        judged.verdict or Verdict.UNCLEAR,
        why_not_before or why_not_after or _REASONS.get(judged.why, ""),
    )


def _inverse(ratio: Estimate | None) -> Estimate | None:
    """The ratio of speeds, for one of times."""
    if ratio is None:
        return None
    interval = ratio.interval
    turned = Interval(1 / interval.high, 1 / interval.low) if interval else None
    return Estimate(1 / ratio.center, turned, ratio.confidence, ratio.num_values)


def _by_round(samples: Samples, cell: CellRecord) -> list[CellMetrics]:
    """The figures of each measured round of a cell by itself."""
    requests = [record for record in samples.requests if record.cell == cell.cell]
    return [
        compute_metrics(
            Samples(
                samples.path,
                samples.run,
                cells=[cell],
                rounds=[record],
                requests=[r for r in requests if r.round == record.round],
            )
        )[0]
        for record in samples.rounds
        if record.cell == cell.cell and not record.warmup
    ]


def _values(metric: str, rounds: Sequence[CellMetrics]) -> tuple[list[float], str]:
    """A figure of each round that has it, and why there may be none."""
    figures = [getattr(metrics, metric) for metrics in rounds]
    values = [figure.value for figure in figures if figure.value is not None]
    reasons = (figure.reason for figure in figures if figure.value is None)
    return values, "" if values else next(reasons, "no measured round")


def _warnings(base: Samples, new: Samples) -> Iterator[str]:
    old, run = base.run, new.run
    if changed := environment_changes(old.environment, run.environment):
        yield f"different machine or code: {'; '.join(changed)}"
    for samples in (base, new):
        if (samples.run.environment.get("git") or {}).get("dirty"):
            yield f"{source_of(samples)}: measured with uncommitted changes"
        if samples.end is None or samples.end.status != "complete":
            status = samples.end.status if samples.end else "unfinished"
            yield f"{source_of(samples)}: the run is {status}"
    if old.profile != run.profile:
        yield f"different profile: {old.profile} -> {run.profile}"
    # The first cell's values of the axes are in `config`; cells are matched by them already.
    matched = {f"engine.{name}" for name in (*old.axes, *run.axes)} | {"device", "profile"}
    changes = _config_changes(old.config, run.config)
    if changed := [text for key, text in changes if key not in matched]:
        yield f"different configuration: {'; '.join(changed)}"


def _config_changes(old: Any, new: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key, and `key before -> after`, of each setting that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            dotted = f"{prefix}.{key}" if prefix else str(key)
            yield from _config_changes(old.get(key), new.get(key), dotted)
    elif old != new:
        yield prefix, f"{prefix} {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
