"""What is said beside the table, so that no row seems to say more than it does."""

from __future__ import annotations

import pytest

from bench.metrics import CellMetrics
from bench.report.notes import HAPPENING, HOLDING
from bench.report.table import build_table
from deepinfer.config import EngineConfig
from deepinfer.names import DESCRIPTIONS


def notes(samples):
    """The notes of a file, as one text."""
    return "\n".join(build_table(samples).notes)


def test_a_comparison_names_rounds_baseline_and_noise(comparison):
    """Rounds, baseline, notes of the run, unsafe cells, and why a row is unclear."""
    said = notes(comparison)
    assert "3 measured rounds per cell; baseline: deferred/reverse" in said
    assert "lengths scaled by 0.1" in said
    assert "early/reverse: UNSAFE" in said
    assert "UNCLEAR, early/reverse: wrong answers here or in the baseline" in said
    assert "UNCLEAR, polled/reverse: under seven rounds give no 98 % interval" in said


def test_a_complete_run_has_no_alarm(synthetic):
    """Nothing failed: the notes hold the rounds and nothing else."""
    run = synthetic()
    run.round(run.cell())
    assert build_table(run.end()).notes == ("1 measured round per cell",)


def test_failed_requests_are_told_with_their_share(synthetic):
    """NEVER and aborted are counted over requests (fw-ai/benchmark#136)."""
    run = synthetic()
    done = (0.0, (0.1, 0.2), "length")
    run.round(run.cell(), requests=[done] * 7 + [(0.0, (), "never")] * 2 + [(0.0, (), "abort")])
    assert "2 NEVER (cannot fit the pool) and 1 aborted of 10 requests (30 % failed)" in notes(
        run.end()
    )


def test_rounds_that_were_not_run_and_the_interruption_are_told(synthetic):
    """Ctrl-C after the first round of the second cell: what is missing is named by cell."""
    run = synthetic(rounds=2)
    first, second = run.cell(), run.cell({"release": "polled", "free_order": "reverse"})
    run.round(first, 0)
    run.round(second, 0)
    run.round(first, 1)
    said = notes(run.end("interrupted", "Ctrl-C"))
    assert "INTERRUPTED (Ctrl-C): the table shows what was measured" in said
    assert "polled/reverse: not run: 1 of 2 rounds" in said
    assert "deferred/reverse: not run" not in said


def test_a_file_without_an_end_or_cut_off_says_so(synthetic):
    """A killed run is not shown as a whole one."""
    run = synthetic()
    run.round(run.cell())
    assert "UNFINISHED" in notes(run.read())
    source = run.folder / "samples.jsonl"
    source.write_bytes(source.read_bytes() + b'{"kind": "en')
    assert "TRUNCATED" in notes(run.read())


def test_unverified_rounds_and_near_ties_are_told(synthetic):
    """Answers nobody checked are named; near-ties are counted apart from wrong ones."""
    run = synthetic(rounds=2)
    cell = run.cell()
    run.round(cell, 0, near_ties=2)
    run.round(cell, 1, wrong=None)
    said = notes(run.end())
    assert "UNVERIFIED, the answers of 1 of 2 rounds" in said
    assert "2 near-ties, not counted as wrong" in said


def test_what_holds_for_every_cell_is_said_once(synthetic):
    """The same failure in all cells is one note."""
    run = synthetic()
    for release in ("deferred", "polled"):
        cell = run.cell({"release": release})
        run.round(cell, requests=[(0.0, (0.1, 0.2), "length"), (0.0, (), "never")])
    said = notes(run.end())
    assert said.count("NEVER") == 1
    assert "every cell: 1 NEVER (cannot fit the pool) of 2 requests (50 % failed)" in said


def compared(synthetic, walls, **keys):
    """A baseline of 1 s rounds, and a cell whose rounds take `walls`."""
    run = synthetic(rounds=len(walls), **keys)
    cells = [run.cell(baseline=True), run.cell({"release": "polled", "free_order": "reverse"})]
    for number, wall_s in enumerate(walls):
        run.round(cells[0], number)
        run.round(cells[1], number, wall_s=wall_s)
    return run


def test_the_smallest_visible_difference_is_told(synthetic):
    """Half the interval of the cell that is compared; the baseline's own is none."""
    said = notes(compared(synthetic, [1.0, 1.02, 0.98, 1.01, 0.99, 1.03, 1.04]).end())
    assert "smallest difference this run could see: 3 %" in said


def test_outliers_are_named_and_counted(synthetic):
    """A round at a third of the speed is told with its number; the others are not."""
    said = notes(compared(synthetic, [1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0]).end())
    assert "polled/reverse: outliers, counted like the others: round 3 at 1 tok/s" in said
    assert "deferred/reverse: outliers" not in said


def test_a_throttled_round_is_told_whether_or_not_it_helped_to_repeat_it(synthetic):
    """The set-aside round is counted, and the one that was throttled again too."""
    run = synthetic()
    cell = run.cell()
    slow = {"torch_peak_allocated_bytes": 1, "gpu": {"slowdowns": ["hw_thermal_slowdown"]}}
    run.round(cell, -1001, warmup=True, memory=slow, wrong=None)
    run.round(cell, 0, memory=slow)
    said = notes(run.end())
    assert "1 round run again because the GPU was throttled; THROTTLED again in 1 of them" in said


def test_a_cell_that_never_settled_is_told(synthetic):
    """Warm-ups of 500, 700, 900 and 1200 us a step go on changing; 500 and 510 do not."""
    for host_us, expected in (((100, 300, 500, 800), True), ((100, 110), False)):
        run = synthetic(str(host_us))
        cell = run.cell()
        for number, host in enumerate(host_us):
            run.round(cell, -1 - number, warmup=True, host_us=(host,), wrong=None)
        run.round(cell)
        assert ("never settled" in notes(run.end())) is expected


def test_added_rounds_are_counted_and_why_there_are_no_more(synthetic):
    """`-r auto` asks for 7; what was run is told, and what ended it."""
    run = compared(synthetic, [1.0] * 9)
    said = notes(run.end(reason="every interval within 2 %"))
    assert "9 measured rounds per cell" in said
    assert "rounds were added until: every interval within 2 %" in said


IDLE = {"withheld_peak": 0}


def policies(synthetic, names, *, wait_us=0.0, counters=IDLE):
    """One round of each release policy."""
    run = synthetic()
    for number, name in enumerate(names):
        cell = run.cell({"release": name, "free_order": "reverse"}, baseline=number == 0)
        run.round(cell, wait_us=wait_us, counters=counters)
    return notes(run.end())


def test_policies_that_had_nothing_to_do_are_told(synthetic):
    """Nothing withheld, nothing waited for: the table cannot tell the policies apart."""
    assert "the release policies cannot differ here" in policies(synthetic, ("deferred", "early"))


@pytest.mark.parametrize(
    "names_and_figures",
    [
        {"names": ("deferred",)},
        {"names": ("early", "ordered")},
        {"names": ("deferred", "early"), "counters": {"withheld_peak": 1}},
        {"names": ("blocking", "early"), "wait_us": 0.5},
        {"names": ("deferred", "early"), "counters": {"withheld_peak": None}},
    ],
)
def test_policies_are_not_called_alike_without_reason(synthetic, names_and_figures):
    """One policy, none that holds anything, a block withheld, a wait, a figure that is missing."""
    assert "cannot differ" not in policies(synthetic, **names_and_figures)


def drafters(synthetic, *names, proposed):
    """The notes of a run with a cell of each drafter, of which the last proposed so many drafts."""
    run = synthetic()
    for name in names:
        counters = {"num_drafts_proposed": proposed if name == names[-1] else 0}
        run.round(run.cell({"release": "deferred", "drafter": name}), counters=counters)
    return notes(run.end())


def test_an_axis_that_had_nothing_to_do_is_told(synthetic):
    """Two drafters without a draft."""
    said = drafters(synthetic, "ngram", "replay", proposed=0)
    assert "no draft was proposed: drafter cannot make a difference here" in said


@pytest.mark.parametrize(("names", "proposed"), [(("ngram", "replay"), 3), (("ngram",), 0)])
def test_other_axes_are_not_called_idle(synthetic, names, proposed):
    """Of several drafters one proposed something; there is one only."""
    assert "cannot make" not in drafters(synthetic, *names, proposed=proposed)


def test_axes_that_may_have_nothing_to_do_are_axes():
    """A renamed setting or figure must not silence the note."""
    axes = {"acceptance", *EngineConfig.__dataclass_fields__}
    assert axes >= HAPPENING.keys()
    figures = set(CellMetrics.__dataclass_fields__)
    assert figures >= {figure for figure, _ in HAPPENING.values()}


def test_a_run_without_a_round_says_so(synthetic):
    """The rounds that were asked for are not counted as measured."""
    run = synthetic(rounds=7)
    run.cell()
    said = notes(run.read())
    assert "no measured round has ended" in said
    assert "7 measured rounds per cell" not in said


def test_holding_policies_are_policies():
    """A renamed policy must not silence the note."""
    assert set(DESCRIPTIONS["release"]) - HOLDING == {"early", "ordered"}
    assert set(DESCRIPTIONS["release"]) > HOLDING
