"""Who comes when: phases, arrivals, and turns that come back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.agenda import Agenda
from bench.arrivals import RequestSpec


def spec(name: str, arrival_s: float, phase: int = 1) -> RequestSpec:
    """A request of three tokens."""
    return RequestSpec(name, arrival_s, np.arange(3, dtype=np.int32), 1, 0.0, 0, phase=phase)


def due(agenda: Agenda, now_s: float, idle: bool = False) -> list[tuple[str, float]]:
    """Names and arrivals of those who have come."""
    return [(found.request_id, found.arrival_s) for found in agenda.due(now_s, idle=idle)]


def test_requests_come_when_their_time_has_come() -> None:
    """In order, each once; `wait_s` tells how long until the next."""
    agenda = Agenda([spec("a", 0.0), spec("b", 0.5), spec("c", 2.0)])
    assert due(agenda, 0.0, idle=True) == [("a", 0.0)]
    assert agenda.wait_s(0.2) == pytest.approx(0.3)
    assert due(agenda, 0.75) == [("b", 0.5)]
    assert due(agenda, 0.75) == []
    assert due(agenda, 2.0) == [("c", 2.0)]
    assert not agenda
    assert agenda.wait_s(3.0) is None


def test_a_late_first_look_moves_no_arrival() -> None:
    """The first phase begins with the round, whatever its number: the wait for it is queueing."""
    agenda = Agenda([spec("a", 0.25, phase=3)])
    assert due(agenda, 1.0, idle=True) == [("a", 0.25)]


def test_a_phase_begins_when_nothing_is_left_to_run() -> None:
    """Not before, however late it is; its arrivals count from then."""
    agenda = Agenda([spec("a", 0.0), spec("b", 0.5, 2), spec("c", 1.0, 2), spec("d", 0.0, 7)])
    assert due(agenda, 0.0, idle=True) == [("a", 0.0)]
    assert agenda
    assert agenda.wait_s(9.0) is None
    assert due(agenda, 9.0, idle=False) == []
    assert due(agenda, 10.0, idle=True) == []
    assert agenda.wait_s(10.0) == pytest.approx(0.5)
    assert due(agenda, 10.75) == [("b", 10.5)]
    assert due(agenda, 10.75, idle=True) == []  # somebody of this phase is still to come
    assert due(agenda, 11.0) == [("c", 11.0)]
    assert due(agenda, 20.0, idle=True) == [("d", 20.0)]


def test_a_turn_comes_back_in_its_place() -> None:
    """So long after the answer as its client thinks, among the arrivals of the phase."""
    agenda = Agenda([spec("a", 0.0, 2), spec("b", 4.0, 2), spec("c", 0.0, 3)])
    assert due(agenda, 0.0, idle=True) == [("a", 0.0)]
    agenda.come_back(spec("a-1", 0.5, 2), end_s=3.0)
    agenda.come_back(spec("a-2", 1.5, 2), end_s=3.0)
    assert due(agenda, 9.0) == [("a-1", 3.5), ("b", 4.0), ("a-2", 4.5)]


def test_a_turn_of_a_later_phase_is_as_late_as_in_the_first() -> None:
    """Times of the round, not of the phase, go in and come out."""
    agenda = Agenda([spec("a", 0.0), spec("b", 0.0, 2)])
    assert due(agenda, 0.0, idle=True) == [("a", 0.0)]
    assert due(agenda, 100.0, idle=True) == [("b", 100.0)]
    agenda.come_back(dataclasses.replace(spec("b-1", 0.5), phase=2), end_s=101.0)
    assert agenda.wait_s(101.0) == pytest.approx(0.5)
    assert due(agenda, 101.5) == [("b-1", 101.5)]
