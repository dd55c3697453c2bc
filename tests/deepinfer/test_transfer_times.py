"""The time of transfers, and how much of it steps ran beside them."""

from __future__ import annotations

import pytest

from deepinfer.transfer_times import TransferTimes


class At:
    """An event that passed at a time, in milliseconds."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def elapsed_ms(self, since: At) -> float:
        return self.ms - since.ms


class Clockless:
    """A device whose origin is at 10 ms."""

    def event(self, *, timing: bool) -> At:
        assert timing
        return At(10.0)

    def stream(self, name: str):
        return self

    def record(self, event: At) -> None:
        pass


@pytest.mark.parametrize("transfers_first", [False, True])
def test_each_pair_counts_once_whichever_ends_first(transfers_first):
    """Steps at 20 to 30, 30 to 40, 50 to 60; transfers at 25 to 35 and 38 to 70."""
    times = TransferTimes(Clockless())
    steps = [(20, 30), (30, 40), (50, 60)]
    transfers = [(25, 35), (38, 70)]

    def steps_run() -> None:
        for start, end in steps:
            times.ran(At(start), At(end))

    def transfers_end() -> None:
        for start, end in transfers:
            times.moved(At(start), At(end))

    for call in (transfers_end, steps_run) if transfers_first else (steps_run, transfers_end):
        call()
    assert times.busy_ms == 10 + 32
    assert times.beside_steps_ms == 10 + 12


def test_a_transfer_between_steps_is_beside_none():
    """Nor one before the first, nor one behind the last."""
    times = TransferTimes(Clockless())
    times.ran(At(20), At(30))
    times.ran(At(40), At(50))
    for start, end in ((12, 20), (30, 40), (50, 55)):
        times.moved(At(start), At(end))
    assert (times.busy_ms, times.beside_steps_ms) == (23, 0)
