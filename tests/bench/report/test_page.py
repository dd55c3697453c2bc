"""The page around a report."""

from __future__ import annotations

import re

from bench.report.page import PAGE

PLACES = {"title", "subtitle", "tables", "notes", "plots", "missing", "legend", "run"}


def test_a_dollar_marks_a_place_and_nothing_else():
    """Script and style hold none that would be taken for one."""
    assert set(re.findall(r"\$(\w*)", PAGE)) == PLACES


def test_light_and_dark_name_the_same_colours():
    """No colour of one scheme shows through in the other, and no rule has a colour of its own."""
    light, dark = re.findall(r":root \{(.*?)\}", PAGE, re.DOTALL)
    names = re.findall(r"(--\w+):", light)
    assert names == re.findall(r"(--\w+):", dark)
    rules = PAGE.replace(light, "").replace(dark, "")
    assert not re.search(r"#[0-9a-f]{3,6}\b", rules)
    assert set(re.findall(r"var\((--\w+)\)", rules)) == set(names)
