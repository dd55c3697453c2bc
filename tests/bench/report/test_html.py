"""The HTML report: its DOM, and a real browser where there is one."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from bench.report.html import render_html
from bench.report.table import View, build_table
from bench.report.view import apply_view

VOID = {"meta", "br", "link", "img", "input", "hr"}
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NEEDS_BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Document(HTMLParser):
    """Elements as `(tag, attributes, text)`; fails on a tag that is never closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        """Open an element; its text is gathered until it is closed."""
        element = [tag, dict(attributes), ""]
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attributes):
        """An element of SVG that closes itself."""
        self.elements.append([tag, dict(attributes), ""])

    def handle_endtag(self, tag):
        """Close the innermost element, which must be of this tag."""
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        """Text belongs to every element around it."""
        for element in self.open:
            element[2] += data

    def all(self, tag, **attributes):
        """Elements of a tag with these attributes."""
        wanted = {key.rstrip("_"): value for key, value in attributes.items()}
        return [e for e in self.elements if e[0] == tag and wanted.items() <= e[1].items()]


@pytest.fixture
def busy(comparison):
    """The comparison with blocks withheld in every step."""
    comparison.steps = [replace(s, blocks_withheld=2 + s.round) for s in comparison.steps]
    return comparison


def test_the_table_has_a_row_per_cell_and_a_button_per_column(comparison):
    """Headings say what they sort; a cell's raw value is beside its text; undefined has none."""
    document = Document(render_html(build_table(comparison)))
    assert len(document.all("tr")) == 1 + 3
    headings = document.all("th", scope="col")
    assert len(headings) == len(document.all("button", type="button"))
    assert headings[0][1]["data-key"] == "release"
    assert [e[2] for e in document.all("th", scope="row")] == ["deferred", "early UNSAFE", "polled"]
    speeds = [e for e in document.all("td") if e[2] == "4.00" and e[1].get("data-value") == "4.0"]
    assert len(speeds) == 1
    assert any(e[2] == "3 WRONG" for e in document.all("td"))


def test_undefined_cells_have_no_value_and_say_why(synthetic):
    """The browser sorts them last; hovering shows the reason, and a footnote has it too."""
    run = synthetic()
    run.round(run.cell(baseline=True))
    run.cell({"release": "polled"})
    document = Document(render_html(build_table(run.end("interrupted"))))
    cells = [e for e in document.all("td") if "title" in e[1]]
    assert cells
    assert all("data-value" not in e[1] for e in cells)
    notes = " ".join(e[2] for e in document.all("li"))
    assert all(e[1]["title"] in notes for e in cells)


def test_every_plot_with_data_is_a_figure(busy):
    """Speed, withheld blocks, step times, each with a caption; what is missing is a sentence."""
    document = Document(render_html(build_table(busy)))
    titles = [e[2] for e in document.all("h3")]
    assert titles == [
        "Speed against the baseline",
        "Withheld blocks over time",
        "Distribution of step times",
    ]
    assert len(document.all("svg", role="img")) == len(document.all("figcaption")) == 3
    assert any(e[2].startswith("no plot of device memory") for e in document.all("li"))


def test_groups_are_tables_with_captions(comparison):
    """A table per value, each in a region the keyboard can scroll."""
    table = apply_view(build_table(comparison), View(group_by="release"))
    document = Document(render_html(table))
    captions = [e[2] for e in document.all("caption")]
    assert captions == ["release: deferred", "release: early", "release: polled"]
    assert len(document.all("div", role="region", tabindex="0")) == 3


def test_ids_are_unique(busy):
    """Titles and descriptions of drawings are found by them."""
    ids = [e[1]["id"] for e in Document(render_html(build_table(busy))).elements if "id" in e[1]]
    assert len(ids) == len(set(ids)) > 0


def test_no_text_of_the_run_is_markup(synthetic):
    """A workload, an axis value and a note that look like scripts stay text."""
    evil = '</title><script>alert("x")</script><b a=\'&amp;'
    run = synthetic(workload=evil, notes=(evil,), metadata={"k": evil}, axes={"release": [evil]})
    run.round(run.cell({"release": evil, "free_order": "$title"}))
    document = Document(render_html(build_table(run.end())))
    assert len(document.all("script")) == 1
    assert document.all("b") == []
    assert any(evil in e[2] for e in document.all("h1"))
    assert any(e[2] == "$title" for e in document.all("td"))


def test_it_loads_nothing(busy):
    """No address of another file in it, and the page forbids loading any."""
    text = render_html(build_table(busy))
    assert not re.search(r"https?://|\bsrc=|\bhref=|@import|url\(", text)
    assert "default-src 'none'" in text


def test_the_environment_is_in_the_file(comparison):
    """Whoever gets the file sees where it was measured."""
    (pre,) = Document(render_html(build_table(comparison))).all("pre")
    assert '"host": "test"' in pre[2]


def browse(tmp_path, text, *flags):
    """Open the page in headless Chromium and give what it prints."""
    page = tmp_path / "page.html"
    page.write_text(text, encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags]
    done = subprocess.run(
        [*command, page.as_uri()], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@NEEDS_BROWSER
def test_a_click_sorts_and_a_second_click_turns_the_order(comparison, tmp_path):
    """The browser's own DOM after the clicks; `aria-sort` says it to a screen reader."""
    text = render_html(build_table(comparison))
    clicks = "document.querySelector('th[data-key=tok_per_s] button').click();"
    for times, expected, sort in ((1, "deferred", "ascending"), (2, "polled", "descending")):
        page = text.replace("</body>", f"<script>{clicks * times}</script></body>")
        document = Document(browse(tmp_path, page, "--dump-dom"))
        assert document.all("th", scope="row")[0][1]["data-value"] == expected
        (heading,) = (e for e in document.all("th") if "aria-sort" in e[1])
        assert (heading[1]["data-key"], heading[1]["aria-sort"]) == ("tok_per_s", sort)


@NEEDS_BROWSER
def test_undefined_cells_stay_last_in_either_order(synthetic, tmp_path):
    """A cell that never ran is below the others after one click and after two."""
    run = synthetic(axes={"release": ["a", "b", "c"]})
    run.cell({"release": "never ran"}, baseline=True)
    for release, wall_s in (("slow", 2.0), ("fast", 1.0)):
        run.round(run.cell({"release": release}), wall_s=wall_s)
    text = render_html(build_table(run.end("interrupted")))
    click = "document.querySelector('th[data-key=tok_per_s] button').click();"
    for times, expected in ((1, ["slow", "fast"]), (2, ["fast", "slow"])):
        page = text.replace("</body>", f"<script>{click * times}</script></body>")
        rows = Document(browse(tmp_path, page, "--dump-dom")).all("th", scope="row")
        assert [row[1]["data-value"] for row in rows] == [*expected, "never ran"]


@NEEDS_BROWSER
def test_the_browser_draws_the_plots(busy, tmp_path):
    """A screenshot with drawings is richer than the same page without them."""
    sizes = []
    for text in (
        render_html(build_table(busy)),
        re.sub(r"<svg.*?</svg>", "", render_html(build_table(busy)), flags=re.DOTALL),
    ):
        shot = tmp_path / "shot.png"
        browse(tmp_path, text, f"--screenshot={shot}", "--window-size=1000,2000")
        content = shot.read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", content[16:24]) == (1000, 2000)
        sizes.append(len(content))
    assert sizes[0] > 1.1 * sizes[1]
