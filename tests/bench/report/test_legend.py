"""The sentences below a table explain what is shown, and nothing else."""

from __future__ import annotations

import pytest

from bench.report import View, apply_view, build_table, render
from bench.report.legend import build_legend
from bench.report.table import METRIC_COLUMNS


def pair(synthetic, rounds, second=None):
    """A baseline with `rounds` rounds and cells with these, or `second`, in common with it."""
    run = synthetic(rounds=rounds)
    counts = (rounds, rounds if second is None else second)
    baseline = run.cell(baseline=True)
    cells = [run.cell({"release": f"r{i}", "free_order": "reverse"}) for i in range(len(counts))]
    for number in range(rounds):
        run.round(baseline, number)
        for cell, count in zip(cells, counts, strict=True):
            if number < count:
                run.round(cell, number, wall_s=1 + number / 100)
    return build_table(run.end())


def legend(table):
    """The legend of all columns, as one text."""
    return "\n".join(build_legend(table, METRIC_COLUMNS))


def test_every_column_shown_is_explained_once(comparison):
    """All columns: all sentences, the groups of figures named one by one."""
    said = legend(build_table(comparison))
    assert said.count("TTFT: ") == said.count("ITL: ") == said.count("step: ") == 1
    assert "Withheld block-ms, copies, LATER, preemptions: median of the rounds." in said
    assert "Withheld peak, memory: largest." in said


def test_what_is_planned_ahead_is_explained_where_it_is_shown(synthetic):
    """Gaps and blocks ahead with `overlap`; drafts beside them where there are some."""
    said = {}
    for drafts in (0, 2):
        run = synthetic(f"run{drafts}", config={"engine": {"overlap": "on", "drafts": drafts}})
        run.round(run.cell())
        table = build_table(run.end())
        said[drafts] = "\n".join(build_legend(table, table.columns))
    for start in ("gap: ", "ahead: "):
        assert said[0].count(start) == said[2].count(start) == 1
    for start in ("ITL delivery: ", "acceptance length: ", "accept at k: ", "drafts' peak: "):
        assert (said[0].count(start), said[2].count(start)) == (0, 1)
    assert "Blocks shrunk" not in said[0]
    assert "drafts, rows rejected, blocks shrunk: median of the rounds." in said[2]


def test_columns_that_are_not_shown_are_not_explained(comparison):
    """Two columns chosen: their two sentences, in each format that has a legend."""
    table = apply_view(build_table(comparison), View(columns=("release", "later", "tpot_ms")))
    for name in ("text", "md", "latex", "html"):
        said = render(table, name)
        assert "LATER: median of the rounds." in said
        assert "TPOT = " in said
        for absent in ("TTFT: ", "wait: ", "copies", "Withheld", "vs baseline: ", "Percentiles"):
            assert absent not in said, name


def test_a_single_cell_has_no_baseline_to_explain(synthetic):
    """Nothing is compared, in Markdown either, which shows every column."""
    run = synthetic()
    run.round(run.cell(baseline=True))
    table = build_table(run.end())
    assert "vs baseline: " not in legend(table)
    assert "vs baseline: " not in render(table, "md")


@pytest.mark.parametrize(
    ("rounds", "second", "name", "has_verdicts"),
    [
        (1, 1, "the centre of the rounds' ratios.", False),
        (3, 3, "[range of the 3 ratios]", False),
        (6, 3, "[range of the 3 to 6 ratios]", False),
        (7, 7, "[98 % interval]", True),
        (7, 4, "[98 % interval, or range of the 4 ratios]", True),
    ],
)
def test_an_interval_is_called_what_it_is(synthetic, rounds, second, name, has_verdicts):
    """Under seven rounds there is a range of ratios, and no verdict to define."""
    table = pair(synthetic, rounds, second)
    said = legend(table)
    assert name in said
    assert ("98 %" in said) is has_verdicts
    assert ("FASTER, SLOWER" in said) is has_verdicts
    figure = " ".join(render(table, "html").split())
    assert ("with the 98 % interval" in figure) is has_verdicts
