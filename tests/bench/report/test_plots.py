"""What the plots show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.report.plots import NUM_POINTS, Dots, Strips, build_plots, row_label
from bench.report.table import build_table

MIB = 2**20


def plot(table, key):
    """The plot of this key."""
    (found,) = (plot for plot in build_plots(table)[0] if plot.key == key)
    return found


def test_speed_is_each_row_against_the_baseline(comparison):
    """Value and interval of the table, under the row's settings; 1 is the reference."""
    speed = plot(build_table(comparison), "speed")
    assert isinstance(speed, Dots)
    assert speed.reference == 1.0
    assert [dot.label for dot in speed.dots] == ["deferred (baseline)", "early UNSAFE", "polled"]
    assert [(dot.value, dot.low, dot.high) for dot in speed.dots] == [
        (1.0, 1.0, 1.0),
        (1.0, 1.0, 1.0),
        (2.0, 2.0, 2.0),
    ]


def test_one_cell_shows_its_speed(synthetic):
    """Nothing is compared: tokens a second, from zero."""
    run = synthetic()
    run.round(run.cell(baseline=True))
    speed = plot(build_table(run.end()), "speed")
    assert (speed.x_label, speed.reference, speed.from_zero) == ("tok/s", None, True)
    assert [dot.text for dot in speed.dots] == ["3.00"]


def test_a_row_without_a_speed_is_named_in_the_caption(synthetic):
    """It never ran: no dot, but its name and the reason."""
    run = synthetic()
    run.round(run.cell(baseline=True))
    run.cell({"release": "polled", "free_order": "reverse"})
    speed = plot(build_table(run.end("interrupted")), "speed")
    assert len(speed.dots) == 1
    assert "Not shown: polled (no round" in speed.caption


def test_what_all_rows_share_is_not_in_their_labels(comparison):
    """free_order is the same everywhere; a single cell keeps all its settings."""
    table = build_table(comparison)
    assert row_label(table, table.rows[2]) == "polled"


def test_withheld_blocks_keep_their_peak_when_steps_share_a_pixel(comparison, make_step):
    """Three steps per point: the one with 9 blocks is not averaged away."""
    num_steps = 3 * NUM_POINTS
    comparison.steps = [
        replace(make_step(0, 0, i), blocks_withheld=9 if i == 601 else 1) for i in range(num_steps)
    ]
    withheld = plot(build_table(comparison), "withheld")
    assert isinstance(withheld, Strips)
    strip = withheld.strips[0]
    assert len(strip.heights) == NUM_POINTS
    assert (max(strip.heights), sum(strip.heights)) == (9, NUM_POINTS + 8)
    assert len(strip.edges) == len(strip.heights) + 1
    assert list(strip.edges) == sorted(strip.edges)
    assert withheld.strips[1].heights == ()


def test_shares_of_step_times_add_up(comparison):
    """Every step of every measured round is in one bin; median and p99 are marked."""
    steps = plot(build_table(comparison), "steps")
    for strip in steps.strips:
        assert sum(strip.heights) == pytest.approx(100)
        assert [name for name, _ in strip.marks] == ["p50 0.500 ms", "p99 0.500 ms"]
        assert strip.edges[0] < 0.5 < strip.edges[-1]


def test_memory_is_shown_where_the_file_has_layers_of_it(synthetic):
    """Widest first, in MiB; one layer is no waterfall."""
    run = synthetic()
    memory = {"nvml_used_bytes": 8 * MIB, "torch_reserved_bytes": 2 * MIB, "reasons": {}}
    run.round(run.cell(), memory=memory)
    dots = plot(build_table(run.end()), "memory").dots
    assert [(dot.label, dot.value) for dot in dots] == [
        ("device, all processes (NVML)", 8.0),
        ("torch reserved", 2.0),
    ]


def test_every_plot_that_is_missing_has_its_reason(synthetic):
    """A run that never began: no plot, and a sentence for each."""
    run = synthetic()
    run.cell()
    plots, missing = build_plots(build_table(run.end("interrupted")))
    assert plots == []
    assert len(missing) == 4
    assert any("no step in a measured round" in text for text in missing)


def test_no_withheld_block_is_a_sentence(comparison):
    """A flat line at 0 says less than words."""
    _, missing = build_plots(build_table(comparison))
    assert "no plot of withheld blocks: none was withheld at the end of a step" in missing
