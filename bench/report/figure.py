"""The plots of a run as a PNG or SVG file, drawn by matplotlib (the extra `plots`).

Knows matplotlib; computes nothing: `bench.report.plots` says what is shown. Invariant: one file,
with the same figures as the HTML report, and no window is ever opened.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report.files import write_file
from bench.report.plots import Dots, Plot, Strip, Strips, build_plots
from bench.report.scales import log_ticks
from bench.report.table import Table
from deepinfer.errors import UserError

SUFFIXES = (".png", ".svg")
WIDTH, ROW, STRIP, FRAME = 9.0, 0.28, 1.15, 1.1  # inches
DPI = 150
NUM_TICKS = 4


def write_figure(table: Table, path: Path) -> None:
    """Draw every plot that has data, one below the other.

    Raises UserError without matplotlib, for a name that is neither PNG nor SVG, for a run without
    anything to plot, and if the file cannot be written.
    """
    check_figure(path)
    plots, missing = build_plots(table)
    if not plots:
        raise UserError(f"{table.samples.path}: nothing to plot ({'; '.join(missing)})")
    figure = draw_figure(plots)
    content = io.BytesIO()
    # Neither a date nor random ids: the same run gives the same file. Text stays text.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    settings = {"svg.hashsalt": "deepinfer-bench", "svg.fonttype": "none"}
    with importlib.import_module("matplotlib").rc_context(settings):
        figure.savefig(content, format=path.suffix[1:], metadata=metadata)
    write_file(path, content.getvalue())


def draw_figure(plots: Sequence[Plot]) -> Any:
    """A matplotlib Figure of the plots, one below the other; needs matplotlib."""
    heights = [_height(plot) for plot in plots]
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(WIDTH, sum(heights)), dpi=DPI, layout="constrained"
    )
    parts = figure.subfigures(len(plots), 1, height_ratios=heights, squeeze=False)
    for part, plot in zip(parts[:, 0], plots, strict=True):
        part.suptitle(plot.title, x=0.02, ha="left", fontsize=11, fontweight="bold")
        if isinstance(plot, Dots):
            _draw_dots(part.subplots(), plot)
        else:
            _draw_strips(part, plot)
    return figure


def check_figure(path: Path) -> None:
    """Raise UserError unless a figure can be drawn and `path` says in which format."""
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"{path}: no format for a plot; expected a name that ends in {' or '.join(SUFFIXES)}"
        )
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise UserError(
            f"{path}: plots need matplotlib, which is not installed",
            hint="pip install 'deepinfer-bench[plots]'; --format html has the plots without it",
        ) from error


def _height(plot: Plot) -> float:
    if isinstance(plot, Dots):
        return FRAME + ROW * len(plot.dots)
    return FRAME + STRIP * _num_lines(plot)


def _num_lines(plot: Strips) -> int:
    return -(-len(plot.strips) // 2)


def _draw_dots(axes: Any, plot: Dots) -> None:
    rows = range(len(plot.dots))
    for y, dot in zip(rows, plot.dots, strict=True):
        if plot.from_zero:
            axes.barh(y, dot.value, height=0.6, color="C0")
            continue
        has_interval = dot.low is not None and dot.high is not None
        if has_interval:
            axes.plot([dot.low, dot.high], [y, y], "|-", color="C0")
        face = "C0" if has_interval else "white"
        axes.plot(dot.value, y, "o", color="C0", markerfacecolor=face, markersize=5)
    if plot.reference is not None:
        axes.axvline(plot.reference, color="black", linestyle="--", linewidth=0.8)
    axes.set_yticks(rows, [dot.label for dot in plot.dots], fontsize=8)
    axes.set_ylim(len(plot.dots) - 0.5, -0.5)
    axes.set_xlabel(plot.x_label, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", color="0.85", linewidth=0.6)
    axes.set_axisbelow(True)
    figures = axes.secondary_yaxis("right")
    figures.set_yticks(rows, [dot.text for dot in plot.dots], fontsize=8)
    figures.tick_params(length=0)


def _draw_strips(part: Any, plot: Strips) -> None:
    num_columns = 1 if len(plot.strips) == 1 else 2
    num_lines = len(plot.strips) if num_columns == 1 else _num_lines(plot)
    grid = part.subplots(num_lines, num_columns, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for axes, strip in zip(panels, plot.strips, strict=False):
        _draw_strip(axes, strip)
    # Once, for all of them: a limit set on one panel before the next is drawn would cut that.
    peak = max(max(strip.heights, default=0.0) for strip in plot.strips)
    panels[0].set_ylim(0, 1.05 * peak)
    if plot.log_x:
        low, high = plot.strips[0].edges[0], plot.strips[0].edges[-1]
        panels[0].set_xscale("log")
        panels[0].minorticks_off()
        at = log_ticks(low, high, NUM_TICKS)
        panels[0].set_xticks(at, [f"{value:g}" for value in at])
    for axes in panels[len(plot.strips) :]:
        axes.set_axis_off()
    part.supxlabel(plot.x_label, fontsize=8)
    part.supylabel(plot.y_label, fontsize=8)


def _draw_strip(axes: Any, strip: Strip) -> None:
    said = ", ".join(name for name, _ in strip.marks)
    axes.set_title(f"{strip.label}  {said}", fontsize=8, loc="left")
    if strip.heights:
        axes.stairs(strip.heights, strip.edges, fill=True, color="C0", alpha=0.3)
        axes.stairs(strip.heights, strip.edges, color="C0", linewidth=0.8)
    for i, (_, at) in enumerate(strip.marks):
        axes.axvline(at, color="black", linestyle="--" if i else "-", linewidth=0.9)
    axes.tick_params(labelsize=7)
