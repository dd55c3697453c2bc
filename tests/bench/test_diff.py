"""Two results compared: which cells, which verdicts, which warnings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.diff import Change, Difference, compare_results, source_of
from bench.samples import Samples
from bench.stats import Verdict
from deepinfer.errors import UserError

AXES = {"release": "deferred", "free_order": "reverse"}
POLLED = {"release": "polled", "free_order": "reverse"}
STEADY = (1.0, 1.01, 0.99, 1.0, 1.005)

Start = Callable[..., Any]


def result(start: Start, name: str, scale: float = 1.0, **run: Any) -> Samples:
    """One cell whose five rounds take `scale` times the steady ones' time, latencies too."""
    made = start(name, rounds=5, **run)
    cell = made.cell(AXES, baseline=True)
    for number, wall_s in enumerate(STEADY):
        add_round(made, cell, number, wall_s * scale)
    return made.end()


def add_round(made: Any, cell: int, number: int, wall_s: float, **options: Any) -> None:
    """A round of one request, all of whose times are proportional to `wall_s`."""
    times: Sequence[float] = [0.1 * wall_s, 0.2 * wall_s, 0.4 * wall_s]
    requests = ((0.0, times, "length"),)
    made.round(cell, number, wall_s=wall_s, requests=requests, **options)


def verdicts(difference: Difference) -> dict[str, Verdict]:
    """Of the only cell, by figure."""
    (cell,) = difference.cells
    return {change.metric: change.verdict for change in cell.changes}


def change_of(difference: Difference, metric: str) -> Change:
    """One figure of the first cell."""
    return next(c for c in difference.cells[0].changes if c.metric == metric)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(1.2, Verdict.SLOWER), (0.8, Verdict.FASTER), (1.0, Verdict.SAME)],
)
def test_speed_and_latencies_agree_on_the_verdict(
    synthetic: Start, scale: float, expected: Verdict
) -> None:
    """Fewer tok/s are SLOWER, and so is a longer latency; alike is SAME."""
    difference = compare_results(result(synthetic, "a"), result(synthetic, "b", scale))
    assert set(verdicts(difference).values()) == {expected}
    assert difference.is_worse == (expected is Verdict.SLOWER)
    assert change_of(difference, "tok_per_s").ratio == pytest.approx(1 / scale, rel=0.01)
    assert change_of(difference, "tpot_ms").ratio == pytest.approx(scale, rel=0.01)


def test_base_and_new_are_medians_over_rounds(synthetic: Start) -> None:
    """Three tokens in the median second, and in the median two seconds."""
    change = change_of(
        compare_results(result(synthetic, "a"), result(synthetic, "b", 2)), "tok_per_s"
    )
    assert (change.base, change.new) == (3.0, 1.5)
    assert change.interval is not None
    assert change.interval.low < 0.5 < change.interval.high


def test_the_threshold_makes_a_small_change_none(synthetic: Start) -> None:
    """5 % slower is SLOWER at 3 %, SAME at 10 %."""
    base, new = result(synthetic, "a"), result(synthetic, "b", 1.05)
    assert set(verdicts(compare_results(base, new)).values()) == {Verdict.SLOWER}
    assert set(verdicts(compare_results(base, new, 0.10)).values()) == {Verdict.SAME}


def test_three_rounds_cannot_tell(synthetic: Start) -> None:
    """However far apart they lie: three and three do so by chance in one of ten."""
    samples = []
    for name, scale in (("a", 1.0), ("b", 3.0)):
        made = synthetic(name, rounds=3)
        cell = made.cell(AXES)
        for number in range(3):
            add_round(made, cell, number, STEADY[number] * scale)
        samples.append(made.end())
    change = change_of(compare_results(*samples), "tok_per_s")
    assert change.verdict is Verdict.UNCLEAR
    assert "5 on each side are enough" in change.reason


def test_cells_are_matched_by_axes_and_the_others_named(synthetic: Start) -> None:
    """Order of cells and of axes does not matter; what has no partner is in `only_*`."""
    base = synthetic("a", rounds=1)
    for axes in (AXES, POLLED):
        add_round(base, base.cell(axes), 0, 1.0)
    new = synthetic("b", rounds=1)
    for axes in ({"release": "step", "free_order": "reverse"}, dict(reversed(AXES.items()))):
        add_round(new, new.cell(axes), 0, 1.0)
    difference = compare_results(base.end(), new.end())
    assert [sorted(cell.axes.values()) for cell in difference.cells] == [["deferred", "reverse"]]
    assert difference.only_base == ("polled/reverse",)
    assert difference.only_new == ("step/reverse",)
    assert difference.is_worse, "a cell that is gone must not pass a check"


def test_nothing_in_common_is_refused(synthetic: Start) -> None:
    """Another workload, or no equal cell: one line that names both."""
    base = result(synthetic, "a")
    with pytest.raises(UserError, match=r"workload mixed-chat, but .* has fork-batch"):
        compare_results(base, result(synthetic, "b", workload="mixed-chat"))
    other = synthetic("c")
    other.cell(POLLED)
    with pytest.raises(UserError, match=r"no cell of it \(polled/reverse\)"):
        compare_results(base, other.end())


def test_wrong_answers_and_failures_of_the_new_are_problems(synthetic: Start) -> None:
    """They make a check fail, even where nothing is slower."""
    base = result(synthetic, "a")
    wrong = synthetic("b", rounds=5)
    cell = wrong.cell(AXES)
    for number, wall_s in enumerate(STEADY):
        add_round(wrong, cell, number, wall_s, wrong=int(number == 0))
    difference = compare_results(base, wrong.end())
    assert difference.cells[0].problems == ("1 wrong requests",)
    assert difference.is_worse
    failed = synthetic("c", rounds=5)
    failed.fail(failed.cell(AXES))
    difference = compare_results(base, failed.end())
    assert difference.cells[0].problems == ("failed: RuntimeError: no",)
    assert set(verdicts(difference).values()) == {Verdict.UNCLEAR}
    assert difference.is_worse
    assert not difference.slower


def test_other_machines_settings_and_ends_are_warned_of(synthetic: Start) -> None:
    """Environment, configuration, profile, dirty trees and unfinished runs, each in a line."""
    base = result(synthetic, "a", config={"engine": {"block_size": 16, "release": "deferred"}})
    new = synthetic(
        "b",
        environment={"host": "other", "git": {"commit": "f" * 40, "dirty": True}},
        config={"engine": {"block_size": 32, "release": "polled"}},
        profile="cpu-small",
    )
    add_round(new, new.cell(AXES), 0, 1.0)
    warnings = compare_results(base, new.read()).warnings
    assert warnings == (
        "different machine or code: host test -> other",
        f"{new.folder}: measured with uncommitted changes",
        f"{new.folder}: the run is unfinished",
        "different profile: cpu-tiny -> cpu-small",
        "different configuration: engine.block_size 16 -> 32",
    )
    assert compare_results(base, result(synthetic, "c")).warnings[0].startswith("different conf")
    again = result(synthetic, "d", config=base.run.config)
    assert compare_results(base, again).warnings == ()


def test_a_result_is_named_by_its_folder_or_its_own_name(synthetic: Start, tmp_path: Path) -> None:
    """`samples.jsonl` says nothing; another file name does."""
    samples = result(synthetic, "a")
    assert source_of(samples) == tmp_path / "a"
    samples.path = tmp_path / "kept.jsonl"
    assert source_of(samples) == tmp_path / "kept.jsonl"
