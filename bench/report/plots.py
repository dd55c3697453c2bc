"""What the plots of a run show, as numbers: for our SVG and for matplotlib alike.

Knows the table and the samples; knows no pixel and no colour. Invariant: every row of the table is
in every plot or in a sentence that says why not, under the same label.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.display import format_number, interval_decimals
from bench.report.legend import interval_name
from bench.report.table import Row, Table
from bench.samples import StepRecord, label_of_axes
from bench.stats import percentile

NUM_POINTS = 400  # of a series over time: more than its panel has pixels
NUM_BINS = 40
# Nested layers of device or process memory, the widest first: key of a round's memory, label.
MEMORY_LAYERS = (
    ("nvml_used_bytes", "device, all processes (NVML)"),
    ("nvml_process_bytes", "this process (NVML)"),
    ("torch_reserved_bytes", "torch reserved"),
    ("torch_allocated_bytes", "torch allocated"),
)


@dataclass(frozen=True, slots=True)
class Dot:
    """A figure of one row; `low` and `high` are None without an interval.

    Neighbours of the same `group` belong together: orders of one policy.
    """

    label: str
    text: str
    value: float
    low: float | None = None
    high: float | None = None
    group: str = ""


@dataclass(frozen=True, slots=True)
class Dots:
    """Figures side by side on one axis; `reference` is the value that means no difference."""

    key: str
    title: str
    caption: str
    x_label: str
    dots: tuple[Dot, ...]
    reference: float | None = None
    from_zero: bool = False


@dataclass(frozen=True, slots=True)
class Strip:
    """A step function of one row: `heights[i]` holds from `edges[i]` to `edges[i + 1]`.

    `marks` are x positions with their names, the first drawn solid, the others dashed.
    """

    label: str
    edges: tuple[float, ...]
    heights: tuple[float, ...]
    marks: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Strips:
    """Small multiples: strips that share both axes."""

    key: str
    title: str
    caption: str
    x_label: str
    y_label: str
    strips: tuple[Strip, ...]
    log_x: bool = False


Plot = Dots | Strips


def build_plots(table: Table) -> tuple[list[Plot], list[str]]:
    """The plots of the table's rows, in its order, and a sentence for each that has no data."""
    plots: list[Plot] = []
    missing: list[str] = []
    for made in (_speed(table), _withheld(table), _step_times(table), _memory(table)):
        if isinstance(made, str):
            missing.append(made)
        else:
            plots.append(made)
    return plots, missing


def row_label(table: Table, row: Row) -> str:
    """The row's settings, such as `early/reverse UNSAFE`; the ones all rows share are left out."""
    cells = {cell.cell: cell.axes for cell in table.samples.cells}
    axes = cells[row.cell]
    varying = [name for name in axes if len({str(a.get(name)) for a in cells.values()}) > 1]
    label = label_of_axes({name: axes[name] for name in varying or axes})
    return f"{label} UNSAFE" if row.unsafe else label


def _speed(table: Table) -> Plot | str:
    """Speed against the baseline with its interval; tokens a second where nothing is compared."""
    is_compared = len(table.rows) > 1
    key = "vs_baseline" if is_compared else "tok_per_s"
    dots, missing = [], []
    for row in table.rows:
        label = row_label(table, row)
        value = row.values[key]
        if value is None:
            missing.append(f"{label} ({row.undefined[key]})")
            continue
        low, high = row.values.get(f"{key}_low"), row.values.get(f"{key}_high")
        name = f"{label} (baseline)" if row.baseline and is_compared else label
        group = label.split("/")[0]
        dots.append(Dot(name, _interval_text(value, low, high), value, low, high, group))
    if not dots:
        return f"no plot of the speed: {'; '.join(missing) or 'no row'}"
    caption = (
        f"Centre over rounds of tok/s divided by the baseline's, {_ends(table)}"
        "A dot without an interval has one round."
        if is_compared
        else "Median of the rounds."
    )
    return Dots(
        "speed",
        "Speed against the baseline" if is_compared else "Speed",
        caption + (f" Not shown: {'; '.join(missing)}." if missing else ""),
        "tok/s, baseline = 1" if is_compared else "tok/s",
        tuple(dots),
        reference=1.0 if is_compared else None,
        from_zero=not is_compared,
    )


def _withheld(table: Table) -> Plot | str:
    strips = []
    for row in table.rows:
        steps = _steps(table, row)
        first = [step for step in steps if step.round == steps[0].round]
        edges, heights = _over_time(first)
        strips.append(Strip(row_label(table, row), edges, heights))
    if not any(strip.heights for strip in strips):
        return "no plot of withheld blocks: no step in a measured round"
    if not any(any(strip.heights) for strip in strips):
        return "no plot of withheld blocks: none was withheld at the end of a step"
    return Strips(
        "withheld",
        "Withheld blocks over time",
        "Height: blocks without owner that a fence keeps from the free list, at the end of each "
        "step of the first measured round; of many steps in one pixel, the most.",
        "s since the start of the round",
        "blocks",
        tuple(strips),
    )


def _step_times(table: Table) -> Plot | str:
    by_row = [(row, [_step_ms(step) for step in _steps(table, row)]) for row in table.rows]
    positive = [ms for _, times in by_row for ms in times if ms > 0]
    if not positive:
        return "no plot of step times: no step in a measured round"
    edges = _log_edges(min(positive), max(positive))
    strips = []
    for row, times in by_row:
        p50, p99 = percentile(times, 50), percentile(times, 99)
        marks = (
            ()
            if p50 is None or p99 is None
            else (
                (f"p50 {format_number(p50)} ms", max(p50, edges[0])),
                (f"p99 {format_number(p99)} ms", max(p99, edges[0])),
            )
        )
        strips.append(Strip(row_label(table, row), edges, _shares(times, edges), marks))
    return Strips(
        "steps",
        "Distribution of step times",
        "Host time plus waits of each step of all measured rounds, on a logarithmic axis. Height: "
        "share of the steps in %. "
        "Solid line: median. Dashed line: 99th percentile.",
        "ms",
        "% of steps",
        tuple(strips),
        log_x=True,
    )


def _memory(table: Table) -> Plot | str:
    """Nested layers of memory at the end of the last measured round of the first row's cell."""
    for row in table.rows[:1]:
        rounds = [r for r in table.samples.rounds if r.cell == row.cell and not r.warmup]
        memory = rounds[-1].memory if rounds else {}
        sizes = [
            (label, size / 2**20)
            for key, label in MEMORY_LAYERS
            if isinstance(size := memory.get(key), (int, float))
        ]
        if len(sizes) >= 2:
            return Dots(
                "memory",
                "Memory, from the device to what is in use",
                f"At the end of the last round of {row_label(table, row)}; each layer is part of "
                "the one above it.",
                "MiB",
                tuple(Dot(label, f"{format_number(mib)} MiB", mib) for label, mib in sizes),
                from_zero=True,
            )
    return "no plot of device memory: the file has fewer than two layers of it"


def _steps(table: Table, row: Row) -> list[StepRecord]:
    """Steps of the row's measured rounds that ended, as the metrics count them."""
    samples = table.samples
    measured = {r.round for r in samples.rounds if r.cell == row.cell and not r.warmup}
    return [s for s in samples.steps if s.cell == row.cell and s.round in measured]


def _step_ms(step: StepRecord) -> float:
    return (sum(step.host_us.values()) + step.wait_us + step.result_wait_us) / 1e3


def _over_time(steps: Sequence[StepRecord]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Withheld blocks as a step function of at most `NUM_POINTS` pieces, peaks kept."""
    size = max(1, math.ceil(len(steps) / NUM_POINTS))
    chunks = [steps[i : i + size] for i in range(0, len(steps), size)]
    if not chunks:
        return (), ()
    edges = (*(chunk[0].end_s for chunk in chunks), steps[-1].end_s)
    return edges, tuple(float(max(s.blocks_withheld for s in chunk)) for chunk in chunks)


def _log_edges(low: float, high: float) -> tuple[float, ...]:
    """`NUM_BINS` bins of equal ratio from `low` to `high`; a single value gets a bin around it."""
    if high / low < 1.01:
        low, high = low / 1.1, high * 1.1
    ratio = math.log(high / low) / NUM_BINS
    return tuple(low * math.exp(ratio * i) for i in range(NUM_BINS + 1))


def _shares(times: Sequence[float], edges: Sequence[float]) -> tuple[float, ...]:
    """Per cent of `times` in each bin; what lies beyond an end counts in the bin there."""
    counts = [0] * (len(edges) - 1)
    for time in times:
        counts[min(max(bisect_right(edges, time) - 1, 0), len(counts) - 1)] += 1
    return tuple(100 * count / len(times) for count in counts) if times else ()


def _ends(table: Table) -> str:
    name = interval_name(table.rows)
    if not name:
        return "without an interval. "
    shows_nothing = " An interval that covers 1 shows no difference." * ("interval" in name)
    return f"with the {name}.{shows_nothing} "


def _interval_text(value: float, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return format_number(value)
    decimals = interval_decimals(low, high)
    return f"{value:.{decimals}f} [{low:.{decimals}f}, {high:.{decimals}f}]"
