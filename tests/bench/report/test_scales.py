"""Scales and their ticks."""

from __future__ import annotations

import pytest

from bench.report.scales import Scale, log_ticks, ticks


def test_a_scale_maps_ends_to_ends():
    """Linear in the value, or in its logarithm."""
    linear = Scale(10.0, 20.0, 100.0, 300.0)
    assert [linear(v) for v in (10, 15, 20)] == [100, 200, 300]
    log = Scale(1.0, 100.0, 0.0, 200.0, log=True)
    assert [round(log(v), 9) for v in (1, 10, 100)] == [0, 100, 200]


@pytest.mark.parametrize(
    ("low", "high", "num", "expected"),
    [
        (0.0, 10.0, 5, [0, 2, 4, 6, 8, 10]),
        (0.83, 1.04, 5, [0.85, 0.9, 0.95, 1.0]),
        (-3.0, 4.0, 4, [-2, 0, 2, 4]),
        (0.0, 0.00031, 4, [0, 0.0001, 0.0002, 0.0003]),
    ],
)
def test_ticks_are_round_and_inside(low, high, num, expected):
    """Multiples of 1, 2 or 5 times a power of ten."""
    assert ticks(low, high, num) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("low", "high", "num", "expected"),
    [
        (0.3, 6.0, 4, [0.5, 1, 2, 5]),
        (1.0, 1e6, 7, [1, 10, 100, 1e3, 1e4, 1e5, 1e6]),
        (2.1, 4.9, 4, [3, 4]),
    ],
)
def test_log_ticks_thin_out_with_the_decades(low, high, num, expected):
    """1-2-5, then powers of ten; a range within a decade gets linear ticks."""
    assert log_ticks(low, high, num) == pytest.approx(expected)
