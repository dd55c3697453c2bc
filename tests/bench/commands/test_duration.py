"""Seconds as a person says them."""

import pytest

from bench.commands.duration import duration


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.04, "0.0 s"),
        (0.44, "0.4 s"),
        (12.4, "12 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
    ],
)
def test_no_finer_than_an_estimate_deserves(seconds: float, said: str) -> None:
    """Tenths below a second, seconds below an hour, minutes above."""
    assert duration(seconds) == said
