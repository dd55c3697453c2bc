"""The order of rounds, and what ends them."""

from __future__ import annotations

import pytest

from bench.rounds import DEFAULT_ROUNDS, Auto, is_settled, play_rounds, round_order, slowdowns

NOISY = {index: 1.0 + 0.2 * (index % 2) for index in range(20)}
EVEN = dict.fromkeys(range(20), 1.0)


def first(speeds: dict[int, float], count: int) -> dict[int, float]:
    """The speeds of the first rounds."""
    return {index: speeds[index] for index in range(count)}


def test_every_round_has_all_cells_in_an_order_of_the_seed():
    """The same seed gives the same orders, and they are not all alike."""
    orders = [round_order(5, 3, index) for index in range(6)]
    assert orders == [round_order(5, 3, index) for index in range(6)]
    assert all(sorted(order) == list(range(5)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_fixed_rounds_are_played_and_no_more():
    """Three rounds of two cells, whatever their speeds."""
    played: list[tuple[int, int]] = []
    reason = play_rounds(
        lambda cell, index: played.append((index, cell)), [{}, {}], seed=0, rounds=3, auto=None
    )
    assert reason == ""
    assert sorted(played) == [(index, cell) for index in range(3) for cell in range(2)]


def test_nothing_is_played_on_when_it_is_over():
    """When every cell has failed, the round is the last."""
    played: list[int] = []
    play_rounds(
        lambda cell, index: played.append(index),
        [{}],
        seed=0,
        rounds=9,
        auto=Auto(),
        is_over=lambda: True,
        clock=lambda: 0.0,
    )
    assert played == [0]


@pytest.mark.parametrize(
    ("count", "elapsed_s", "speeds", "reason"),
    [
        (DEFAULT_ROUNDS - 1, 1.0, EVEN, ""),
        (DEFAULT_ROUNDS, 1.0, EVEN, "every interval within 2 %"),
        (DEFAULT_ROUNDS, 1.0, NOISY, ""),
        (1, 9.5, EVEN, "--max-time of 10 s"),
    ],
)
def test_rounds_end_when_intervals_are_narrow_or_time_is_up(count, elapsed_s, speeds, reason):
    """Seven at least; wide intervals ask for more; a round that would end too late is not begun."""
    auto = Auto(half_width=0.02, max_time_s=10.0)
    found = auto.reason_to_stop([first(EVEN, count), first(speeds, count)], count, elapsed_s, 1.0)
    assert found == reason


def test_a_cell_without_a_speed_holds_nobody_up():
    """A cell that failed never gets an interval; a cell alone is judged by its own speed."""
    assert Auto().reason_to_stop([EVEN, {}], 20, 1.0, 0.1) == "every interval within 2 %"
    assert Auto().reason_to_stop([EVEN], 20, 1.0, 0.1) == "every interval within 2 %"
    assert Auto().reason_to_stop([NOISY], 20, 1.0, 0.1) == ""


@pytest.mark.parametrize(
    ("step_us", "settled"),
    [
        ([100.0], False),
        ([100.0, 109.0], True),
        ([100.0, 112.0], False),
        ([300.0, 100.0, 101.0], True),
        ([None, None], True),
    ],
)
def test_warm_ups_have_settled_when_the_last_two_are_alike(step_us, settled):
    """Within 10 %; a warm-up without steps has nothing that could settle."""
    assert is_settled(step_us) is settled


def test_only_a_gpu_in_use_is_throttled():
    """A throttled GPU in the machine says nothing of a round on the CPU."""
    gpu = {"gpu": {"slowdowns": ["hw_slowdown"]}}
    assert slowdowns({**gpu, "torch_peak_allocated_bytes": 1}) == ("hw_slowdown",)
    assert slowdowns({**gpu, "torch_peak_allocated_bytes": None}) == ()
    assert slowdowns({"torch_peak_allocated_bytes": 1, "gpu": {"slowdowns": None}}) == ()
    assert slowdowns({}) == ()
