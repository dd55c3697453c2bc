"""The comparison of two results in each format."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from bench.diff import Difference, compare_results
from bench.report.diff import FORMATS, render_diff, summary

AXES = {"release": "de|ferred", "free_order": "reverse"}


@pytest.fixture
def slower(synthetic: Callable[..., Any]) -> Difference:
    """Twice the time in each of five rounds; a second cell has gone."""
    results = []
    for name, scale in (("base", 1.0), ("new", 2.0)):
        run = synthetic(name, rounds=5, metadata={"ticket": "42"})
        cells = (
            [run.cell(AXES), run.cell({"release": "step"})] if name == "base" else [run.cell(AXES)]
        )
        for cell in cells:
            for number in range(5):
                run.round(cell, number, wall_s=scale * (1 + number / 100), wrong=int(scale == 2))
        results.append(run.end())
    return compare_results(*results)


def test_text_has_a_row_per_figure_and_says_what_matters(slower: Difference) -> None:
    """Figures, ratio, interval, verdict; below them problems, missing cells and how to read it."""
    text = render_diff(slower, "text")
    row = next(line for line in text.splitlines() if "tok/s" in line)
    assert row.split()[:2] == ["de|ferred/reverse", "tok/s"]
    assert row.split()[-1] == "SLOWER"
    assert "0.500" in row
    assert summary(slower) in text
    assert "PROBLEM in de|ferred/reverse: 5 wrong requests" in text
    assert "only in base: step" in text
    assert all(len(line) <= 100 for line in text.splitlines()[2:])


def test_the_sum_counts_each_verdict(slower: Difference) -> None:
    """One figure got worse, four stayed what they were: their times do not depend on the round."""
    assert summary(slower) == "1 SLOWER, 4 SAME of 5 figures in 1 cell"


def test_markdown_is_a_summary_with_all_figures_folded_away(slower: Difference) -> None:
    """A heading, tok/s in sight, everything in `details`; no value breaks a cell."""
    text = render_diff(slower, "md")
    head, _, folded = text.partition("<details>")
    assert head.startswith("### fork-batch: 1 SLOWER")
    assert [line for line in head.splitlines() if "| tok/s" in line]
    assert "TPOT" not in head
    assert "TPOT" in folded
    assert r"de\|ferred/reverse" in head
    rows = [line for line in folded.splitlines() if line.startswith("|")]
    assert {line.replace(r"\|", "").count("|") for line in rows} == {8}


def test_json_has_every_figure_with_its_interval(slower: Difference) -> None:
    """Strict JSON for a program: numbers, verdicts, reasons and where they come from."""
    document = json.loads(render_diff(slower, "json"))
    (cell,) = document["cells"]
    change = cell["changes"][0]
    assert (change["metric"], change["verdict"]) == ("tok_per_s", "SLOWER")
    assert change["ratio_low"] <= change["ratio"] <= change["ratio_high"] < 1
    assert document["new"]["metadata"] == {"ticket": "42"}
    assert document["only_base"] == ["step"]
    assert document["is_worse"] is True


@pytest.mark.parametrize("format_name", FORMATS)
def test_one_round_has_figures_and_no_verdict(
    synthetic: Callable[..., Any], format_name: str
) -> None:
    """Every format shows the ratio, no interval, and why."""
    results = []
    for name in ("a", "b"):
        run = synthetic(name)
        run.round(run.cell())
        results.append(run.end())
    text = render_diff(compare_results(*results), format_name)
    assert "UNCLEAR" in text
    assert "one round on each side has no interval" in " ".join(text.split())
