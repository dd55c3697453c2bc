"""The plots as a file."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import pytest

from bench.report.figure import check_figure, draw_figure, write_figure
from bench.report.plots import Strip, Strips
from bench.report.table import build_table
from deepinfer.errors import UserError


@pytest.fixture
def needs_matplotlib():
    """Skip without the extra `plots`."""
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")


@pytest.mark.usefixtures("needs_matplotlib")
def test_a_png_and_an_svg_hold_the_plots(comparison, tmp_path):
    """A PNG is one; the SVG's text is there to be read, and again the same next time."""
    table = build_table(comparison)
    write_figure(table, tmp_path / "plots.png")
    assert (tmp_path / "plots.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for name in ("a.svg", "b.svg"):
        write_figure(table, tmp_path / name)
    content = (tmp_path / "a.svg").read_bytes()
    assert content == (tmp_path / "b.svg").read_bytes()
    texts = {
        element.text
        for element in ElementTree.fromstring(content).iter("{http://www.w3.org/2000/svg}text")
    }
    assert {"Speed against the baseline", "Distribution of step times", "polled"} <= texts


@pytest.mark.usefixtures("needs_matplotlib")
def test_strips_share_an_axis_as_high_as_the_highest():
    """A first strip that is 0 throughout does not cut the others."""
    strips = tuple(Strip(name, (0.0, 1.0), (top,)) for name, top in (("a", 0.0), ("b", 70.0)))
    figure = draw_figure([Strips("withheld", "title", "caption", "s", "blocks", strips)])
    assert [axes.get_ylim() for axes in figure.get_axes()] == [(0, 73.5)] * 2


@pytest.mark.usefixtures("needs_matplotlib")
def test_a_run_without_anything_to_plot_is_a_user_error(synthetic, tmp_path):
    """One line with the reasons, and no file."""
    run = synthetic()
    run.cell()
    with pytest.raises(UserError, match="nothing to plot"):
        write_figure(build_table(run.end("interrupted")), tmp_path / "plots.png")
    assert not (tmp_path / "plots.png").exists()


@pytest.mark.usefixtures("needs_matplotlib")
def test_a_format_nobody_draws_is_refused(tmp_path):
    """The two there are, are named."""
    with pytest.raises(UserError, match=r"ends in \.png or \.svg"):
        check_figure(tmp_path / "plots.jpeg")


def test_without_matplotlib_the_hint_names_the_extra(tmp_path, monkeypatch):
    """One line, and the command that installs it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="need matplotlib") as caught:
        check_figure(tmp_path / "plots.png")
    assert "pip install 'deepinfer-bench[plots]'" in caught.value.hint
