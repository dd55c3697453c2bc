"""What the table says of a results file: its columns, rows and reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.report.table import METRIC_COLUMNS, build_table


def test_columns_stand_in_their_order_axes_first(synthetic):
    """release and free_order lead whatever the order given; keys carry their unit."""
    run = synthetic(axes={"fence": ["step"], "free_order": ["reverse"], "release": ["polled"]})
    run.cell({"fence": "step", "free_order": "reverse", "release": "polled"})
    keys = [column.key for column in build_table(run.end()).columns]
    assert keys[:3] == ["release", "free_order", "fence"]
    assert keys[3:6] == ["tok_per_s", "ttft_ms_p50", "ttft_ms_p99"]
    assert keys.index("wrong_requests") < keys.index("vs_baseline") < keys.index("vs_baseline_high")
    assert len(keys) == len(set(keys))


def test_ratios_are_paired_round_by_round(comparison):
    """A machine that halves its speed over the rounds leaves a ratio of exactly 2."""
    rows = build_table(comparison).rows
    assert [row.values["tok_per_s"] for row in rows] == [2.0, 2.0, 4.0]
    assert [row.values["vs_baseline"] for row in rows] == [1.0, 1.0, 2.0]
    assert (rows[2].values["vs_baseline_low"], rows[2].values["vs_baseline_high"]) == (2.0, 2.0)


def test_unsafe_and_baseline_cells_are_flagged(comparison):
    """The flags come from the file, not from luck."""
    table = build_table(comparison)
    assert [row.unsafe for row in table.rows] == [False, True, False]
    assert [row.baseline for row in table.rows] == [True, False, False]
    assert table.num_wrong_requests == 3


def test_the_table_is_a_pure_function_of_the_file(comparison):
    """Exporting twice gives the same table, intervals included."""
    assert build_table(comparison) == build_table(comparison)


def test_every_value_has_a_key_and_every_none_a_reason(synthetic):
    """A cell that never ran: nothing is 0, everything is explained."""
    run = synthetic()
    run.cell(baseline=True)
    (row,) = build_table(run.end("interrupted")).rows
    assert (row.values["verdict"], row.values["verdict_reason"]) == ("baseline", "baseline")
    for column in METRIC_COLUMNS:
        if column.key in ("verdict", "verdict_reason"):
            continue
        assert row.values[column.key] is None
        assert row.undefined[column.key]
    assert build_table(run.read()).num_wrong_requests == 0


def test_one_round_has_a_ratio_and_no_interval(synthetic):
    """The ends of the interval are undefined, not equal to the ratio."""
    run = synthetic()
    run.round(run.cell(baseline=True))
    (row,) = build_table(run.end()).rows
    assert row.values["vs_baseline"] == 1.0
    assert row.values["vs_baseline_low"] is None
    assert row.undefined["vs_baseline_low"] == "one round has no interval"


def test_without_a_baseline_there_is_no_ratio(synthetic):
    """No baseline cell: undefined with its reason."""
    run = synthetic()
    run.round(run.cell())
    (row,) = build_table(run.end()).rows
    assert row.undefined["vs_baseline"] == "no round to compare with the baseline's"


def test_a_value_that_is_not_finite_is_undefined(synthetic):
    """A speed beyond the largest float is no number to print."""
    run = synthetic()
    run.round(run.cell(), wall_s=5e-324)
    (row,) = build_table(run.end()).rows
    assert row.undefined["tok_per_s"] == "not a finite number"


@pytest.mark.parametrize("count", [3, 2.0])
def test_whole_counts_are_integers(synthetic, count):
    """A count is printed without a decimal point."""
    run = synthetic()
    run.round(run.cell(), counters={"num_later": count})
    (row,) = build_table(run.end()).rows
    assert isinstance(row.values["later"], int)


def test_each_reason_is_one_footnote(synthetic):
    """Two cells that lack NVML share the footnote."""
    run = synthetic()
    for _ in range(2):
        run.round(run.cell())
    footnotes = build_table(run.end()).footnotes
    assert footnotes.count("nvml: no usable NVIDIA driver") == 1


def test_the_verdict_and_its_reason_stand_in_the_row(synthetic):
    """Seven rounds, one cell twice as fast: FASTER, by its interval; and what could be seen."""
    run = synthetic(rounds=7)
    cells = [run.cell(baseline=True), run.cell({"release": "polled", "free_order": "reverse"})]
    for number in range(7):
        run.round(cells[0], number)
        run.round(cells[1], number, wall_s=0.5)
    rows = build_table(run.end()).rows
    assert [row.values["verdict"] for row in rows] == ["baseline", "FASTER"]
    assert rows[1].values["verdict_reason"] == "interval_excludes_1"
    assert rows[1].values["detectable_percent"] == 0


def test_blocks_and_slots_stand_apart_where_there_are_slots(synthetic):
    """Peaks and LATER of each, behind LATER; a model without state has none of these columns."""
    run = synthetic()
    cell = run.cell()
    slots = {"num_state_slots": 12, "num_later_blocks": 1, "num_later_slots": 3}
    run.round(cell, counters={**slots, "num_later": 4, "slots_withheld_peak": 2})
    samples = run.end()
    samples.steps = [replace(s, slots_held=11, slots_withheld=1) for s in samples.steps]
    table = build_table(samples)
    keys = [column.key for column in table.columns]
    at = keys.index("later") + 1
    found = {key: table.rows[0].values[key] for key in keys[at : at + 5]}
    assert found == {
        "held_blocks_peak": 28,
        "held_slots_peak": 11,
        "withheld_slots_peak": 2,
        "later_blocks": 1,
        "later_slots": 3,
    }
    without = synthetic("without")
    without.round(without.cell())
    assert "held_slots_peak" not in [c.key for c in build_table(without.end()).columns]


AHEAD = ["gap_us", "gap_percent", "ahead_blocks_peak", "ahead_blocks_mean", "held_blocks_peak"]
DRAFTS = ["drafts_proposed", "acceptance_length", "acceptance_1", "draft_blocks_peak"]


@pytest.mark.parametrize(
    ("engine", "axes", "ahead", "num_rates"),
    [
        ({}, {}, False, 0),
        ({"overlap": "off", "drafts": 0}, {}, False, 0),
        ({"overlap": "on", "drafts": 0}, {}, True, 0),
        ({"overlap": "off", "drafts": 0}, {"overlap": "2"}, True, 0),
        ({"overlap": "off", "drafts": 2}, {}, True, 2),
        ({"overlap": "off", "drafts": 0}, {"drafts": 3}, True, 3),
        ({"overlap": "on", "drafts": 3}, {"overlap": "off", "drafts": 0}, False, 0),
    ],
)
def test_columns_of_what_is_planned_ahead(synthetic, engine, axes, ahead, num_rates):
    """Only where a cell has it, by its axes or what all share; rates as far as drafts go."""
    run = synthetic(config={"engine": engine})
    run.round(run.cell({"release": "step", "free_order": "reverse", **axes}))
    keys = [column.key for column in build_table(run.end()).columns]
    assert [key in keys for key in AHEAD] == [ahead] * len(AHEAD)
    assert [key in keys for key in DRAFTS] == [num_rates > 0] * len(DRAFTS)
    assert sum(key.startswith("acceptance_") for key in keys) == num_rates + (num_rates > 0)
    assert len(keys) == len(set(keys))
