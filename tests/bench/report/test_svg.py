"""Drawings as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from bench.report.plots import Dot, Dots, Strip, Strips
from bench.report.svg import WIDTH, draw

DOTS = Dots(
    "speed",
    "Speed <fast>",
    "caption",
    "tok/s",
    (
        Dot("a/reverse", "1.0 [0.9, 1.1]", 1.0, 0.9, 1.1, "a"),
        Dot("a/forward", "1.2", 1.2, None, None, "a"),
        Dot("b & " + "x" * 60, "0.5 [0.4, 0.6]", 0.5, 0.4, 0.6, "b"),
    ),
    reference=1.0,
)
STRIPS = Strips(
    "steps",
    "Step times",
    "caption",
    "ms",
    "% of steps",
    (
        Strip("a", (1.0, 2.0, 4.0), (25.0, 75.0), (("p50 2 ms", 2.0), ("p99 4 ms", 4.0))),
        Strip("never ran", (1.0, 2.0, 4.0), ()),
        Strip("b", (1.0, 2.0, 4.0), (100.0, 0.0)),
    ),
    log_x=True,
)


def parse(plot):
    """The drawing as XML."""
    return ElementTree.fromstring(draw(plot))


def of_class(root, name):
    """Elements of a class."""
    return [element for element in root.iter() if element.get("class") == name]


@pytest.mark.parametrize("plot", [DOTS, STRIPS], ids=lambda plot: plot.key)
def test_a_drawing_is_xml_with_a_title_and_a_description(plot):
    """Whoever does not see it hears every label and figure; ids are its own."""
    root = parse(plot)
    assert root.get("role") == "img"
    title, description = list(root)[:2]
    assert title.text == plot.title
    assert root.get("aria-labelledby").split() == [title.get("id"), description.get("id")]
    rows = plot.dots if isinstance(plot, Dots) else plot.strips
    assert all(row.label in description.text for row in rows)


def test_a_dot_without_interval_is_hollow():
    """Three dots, two intervals of a line and two ends each."""
    root = parse(DOTS)
    assert (len(of_class(root, "dot")), len(of_class(root, "dot hollow"))) == (2, 1)
    assert len(of_class(root, "interval")) == 6
    assert len(of_class(root, "reference")) == 1
    assert len(of_class(root, "separator")) == 1


def test_dots_stand_in_the_order_of_their_values():
    """Left is slower, and the interval holds its dot."""
    root = parse(DOTS)
    x = [float(e.get("cx")) for e in root.iter() if e.tag == "circle"]
    assert x[2] < x[0] < x[1]
    line = of_class(root, "interval")[0]
    assert float(line.get("x1")) < x[0] < float(line.get("x2"))


def test_bars_start_at_zero():
    """Twice the value is twice the length."""
    bars = Dots("memory", "t", "c", "MiB", (Dot("a", "4", 4.0), Dot("b", "2", 2.0)), from_zero=True)
    widths = [float(element.get("width")) for element in of_class(parse(bars), "bar")]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)


def test_strips_share_their_scales():
    """100 % is as high as the panel; percentiles are told apart by their dashes."""
    root = parse(STRIPS)
    assert len(of_class(root, "area")) == 2
    first, last = (element.get("d") for element in of_class(root, "area"))
    assert first.startswith("M48.0,84.0V68.0H")  # 25 % of 64 pixels above the line at 84
    assert "V36.0H" in first  # 75 %
    assert last.startswith("M48.0,192.0V128.0H")  # the third strip, in the second line, is full
    assert (len(of_class(root, "median")), len(of_class(root, "percentile"))) == (1, 1)
    texts = ["".join(element.itertext()) for element in root.iter("text")]
    assert "a: p50 2 ms, p99 4 ms" in texts
    assert "never ran: no step" in texts
    assert texts.count("100") == 3


@pytest.mark.parametrize("plot", [DOTS, STRIPS], ids=lambda plot: plot.key)
def test_nothing_is_drawn_outside_the_drawing(plot):
    """Every position lies in the view box; a long label is cut and its whole is a tooltip."""
    root = parse(plot)
    height = float(root.get("viewBox").split()[3])
    for element in root.iter():
        for key in ("x", "x1", "x2", "cx"):
            assert 0 <= float(element.get(key, 0)) <= WIDTH
        for key in ("y", "y1", "y2", "cy"):
            assert 0 <= float(element.get(key, 0)) <= height


def test_a_long_label_is_cut_in_its_middle():
    """Start and end stay, and the whole is there as a tooltip."""
    (label,) = (e for e in parse(DOTS).iter("text") if "".join(e.itertext()).count("x") > 60)
    (tooltip,) = label
    assert tooltip.text == DOTS.dots[2].label
    assert "…" in tooltip.tail
