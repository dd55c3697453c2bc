"""Plots as inline SVG: no script, no font, no file but this one.

Knows SVG and pixels; computes nothing that is measured. Invariant: everything a colour says, a
shape, a dash or a word says too, and each drawing has a title and a description for a reader who
sees none of it. Colours are CSS variables of the page (`--ink`, `--faint`, `--mark`).
"""

from __future__ import annotations

import math
from html import escape
from itertools import pairwise

from bench.report.plots import Dot, Dots, Plot, Strip, Strips
from bench.report.scales import Scale

WIDTH = 860
LABELS, TEXTS = 240, 170  # room left and right of a dot plot
ROW = 24
STRIP_HEIGHT, STRIP_GAP, STRIP_LEFT = 64, 44, 48
LETTER = 7.2  # pixels of an average letter at 12 px


def draw(plot: Plot) -> str:
    """One `<svg>` element."""
    body, height = _dots(plot) if isinstance(plot, Dots) else _strips(plot)
    name = f"plot-{plot.key}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc">\n'
        f'<title id="{name}-title">{escape(plot.title)}</title>\n'
        f'<desc id="{name}-desc">{escape(_describe(plot))}</desc>\n' + "\n".join(body) + "\n</svg>"
    )


def _describe(plot: Plot) -> str:
    if isinstance(plot, Dots):
        return f"{plot.x_label}: " + "; ".join(f"{dot.label} {dot.text}" for dot in plot.dots)
    parts = [
        f"{strip.label} " + (", ".join(name for name, _ in strip.marks) or _peak(strip))
        for strip in plot.strips
    ]
    return f"{plot.y_label} over {plot.x_label}: " + "; ".join(parts)


def _peak(strip: Strip) -> str:
    return f"peak {max(strip.heights):g}" if strip.heights else "no step"


# A dot plot: a line per row, its name to the left, its figure in words to the right.


def _dots(plot: Dots) -> tuple[list[str], float]:
    bottom = ROW * len(plot.dots) + 8
    scale = _dot_scale(plot)
    body = [_axis(scale, bottom, 4, plot.x_label)]
    if plot.reference is not None:
        body.append(_line(scale(plot.reference), 4, scale(plot.reference), bottom, "reference"))
    # Lines between groups of one row each would be a line below every row.
    has_groups = any(a.group == b.group for a, b in pairwise(plot.dots))
    for i, dot in enumerate(plot.dots):
        y = ROW * (i + 0.5) + 4
        if has_groups and i and dot.group != plot.dots[i - 1].group:
            body.append(_line(0, y - ROW / 2, WIDTH, y - ROW / 2, "separator"))
        body += _dot(dot, scale, y, is_bar=plot.from_zero)
    return body, bottom + 40


def _dot_scale(plot: Dots) -> Scale:
    values = [v for dot in plot.dots for v in (dot.value, dot.low, dot.high) if v is not None]
    values += [0.0] if plot.from_zero else []
    values += [plot.reference] if plot.reference is not None else []
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return Scale(low if plot.from_zero else low - margin, high + margin, LABELS, WIDTH - TEXTS)


def _dot(dot: Dot, scale: Scale, y: float, *, is_bar: bool) -> list[str]:
    x = scale(dot.value)
    parts = [
        _text(_fit(dot.label, LABELS - 12), LABELS - 12, y + 4, "end", title=dot.label),
        _text(dot.text, WIDTH - TEXTS + 12, y + 4, "start"),
    ]
    if is_bar:
        start = scale(0.0)
        parts.append(
            f'<rect class="bar" x="{start:.1f}" y="{y - 7:.1f}" '
            f'width="{max(x - start, 0.5):.1f}" height="14"/>'
        )
        return parts
    if dot.low is not None and dot.high is not None:
        left, right = scale(dot.low), scale(dot.high)
        parts.append(_line(left, y, right, y, "interval"))
        parts += [_line(end, y - 4, end, y + 4, "interval") for end in (left, right)]
    kind = "dot" if dot.low is not None else "dot hollow"
    return [*parts, f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>']


# Small multiples: two columns of strips that share their scales.


def _strips(plot: Strips) -> tuple[list[str], float]:
    num_columns = 1 if len(plot.strips) == 1 else 2
    width = WIDTH / num_columns
    filled = [strip for strip in plot.strips if strip.heights]
    low = min(strip.edges[0] for strip in filled)
    high = max(strip.edges[-1] for strip in filled)
    low, high = (low, high) if plot.log_x else (0.0, max(high, 1e-9))
    peak = max(max(strip.heights) for strip in filled) or 1.0
    body: list[str] = []
    num_lines = math.ceil(len(plot.strips) / num_columns)
    for i, strip in enumerate(plot.strips):
        line, column = divmod(i, num_columns)
        left, top = column * width + STRIP_LEFT, line * (STRIP_HEIGHT + STRIP_GAP) + 20
        x = Scale(low, high, left, (column + 1) * width - 16, plot.log_x)
        y = Scale(0.0, peak, top + STRIP_HEIGHT, top)
        is_last = i + num_columns >= len(plot.strips)
        body += _strip(strip, x, y, x_label=plot.x_label if is_last else "")
    return body, num_lines * (STRIP_HEIGHT + STRIP_GAP) + 24


def _strip(strip: Strip, x: Scale, y: Scale, *, x_label: str) -> list[str]:
    said = ", ".join(name for name, _ in strip.marks) or _peak(strip)
    title = f"{strip.label}: {said}"
    top, bottom = y.end, y.start
    parts = [
        _axis(x, bottom, top, x_label),
        _text(_fit(title, x.end - x.start), x.start, top - 6, "start", title=title),
        _text(f"{y.high:.3g}", x.start - 6, top + 8, "end", "small"),
        _text("0", x.start - 6, bottom, "end", "small"),
    ]
    if strip.heights:
        parts.append(f'<path class="area" d="{_outline(strip, x, y)}"/>')
    for i, (_, at) in enumerate(strip.marks):
        parts.append(_line(x(at), top, x(at), bottom, "percentile" if i else "median"))
    return parts


def _outline(strip: Strip, x: Scale, y: Scale) -> str:
    """The closed path of a step function above zero."""
    path = [f"M{x(strip.edges[0]):.1f},{y(0.0):.1f}"]
    for height, end in zip(strip.heights, strip.edges[1:], strict=True):
        path.append(f"V{y(height):.1f}H{x(end):.1f}")
    return "".join([*path, f"V{y(0.0):.1f}Z"])


def _axis(scale: Scale, bottom: float, top: float, label: str) -> str:
    parts = [_line(scale.start, bottom, scale.end, bottom, "axis")]
    for value in scale.ticks():
        parts.append(_line(scale(value), top, scale(value), bottom, "grid"))
        parts.append(_text(f"{value:g}", scale(value), bottom + 14, "middle", "small"))
    if label:
        middle = (scale.start + scale.end) / 2
        parts.append(_text(label, middle, bottom + 30, "middle"))
    return "\n".join(parts)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(
    text: str, x: float, y: float, anchor: str, kind: str = "label", *, title: str = ""
) -> str:
    whole = f"<title>{escape(title)}</title>" if title and title != text else ""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{whole}{escape(text)}</text>"
    )


def _fit(text: str, width: float) -> str:
    """`text` cut to about `width` pixels, in its middle: the ends tell rows apart."""
    num = max(int(width / LETTER), 5)
    if len(text) <= num:
        return text
    head = (num - 1) // 2
    return f"{text[:head]}…{text[len(text) - (num - 1 - head) :]}"
