"""Every order of events: none is missing, and few are run twice."""

from __future__ import annotations

import pytest

from deepinfer.names import RELEASE_POLICIES
from deepinfer.testing.explorer.actions import Action, Program
from deepinfer.testing.explorer.runs import run, setup_of
from deepinfer.testing.explorer.scenarios import SCENARIOS, Scenario
from deepinfer.testing.explorer.search import EveryOrder, Redundant

A = Action("add", "a", tokens=2, max_tokens=1)
SUBMIT, COLLECT = Action("submit"), Action("collect")
SMALL = {
    "abort and load": Program(
        (A, SUBMIT, Action("abort", "a"), Action("load", "x", tokens=4), Action("use", "x"))
    ),
    "two loads": Program(
        (
            Action("load", "x", tokens=3),
            Action("use", "x"),
            Action("load", "y", tokens=3),
            Action("drop", "y"),
            A,
            SUBMIT,
        )
    ),
    "save": Program(
        (
            Action("add", "a", tokens=2, max_tokens=2),
            SUBMIT,
            COLLECT,
            Action("save", "s", of="a"),
            Action("abort", "a"),
            Action("add", "b", tokens=3, max_tokens=1),
            SUBMIT,
        )
    ),
}


def outcomes(program, release, reduce):
    """What the runs can bring, and how many there were."""
    setup = setup_of(Scenario("small", "", 3, program), release)
    orders, seen, num_runs = EveryOrder(reduce=reduce), set(), 0
    while True:
        try:
            outcome = run(setup, program, orders, pauses=not reduce)
            seen.add((outcome.wrong_rows, outcome.wrong_tokens, tuple(outcome.problems)))
            num_runs += 1
        except Redundant:
            pass
        if not orders.next():
            return seen, num_runs


@pytest.mark.parametrize("release", RELEASE_POLICIES)
@pytest.mark.parametrize("name", SMALL)
def test_leaving_orders_out_loses_no_outcome(name, release):
    """The few runs of the reduced search bring all that the runs in every order bring."""
    reduced, num_reduced = outcomes(SMALL[name], release, reduce=True)
    everything, num_runs = outcomes(SMALL[name], release, reduce=False)
    assert reduced == everything
    assert num_reduced < num_runs
    assert (len(everything) > 1) == (release == "early")


def test_every_run_differs_from_all_before():
    """No two runs have the same log."""
    scenario = SCENARIOS["load-to-load"]
    setup, orders, logs = setup_of(scenario, "ordered"), EveryOrder(), []
    while True:
        logs.append(tuple(run(setup, scenario.program, orders).log))
        if not orders.next():
            break
    # The host may have seen more than the log shows, so some logs may repeat, but not many.
    assert len(logs) > 100
    assert len(set(logs)) > len(logs) // 3


def test_the_search_repeats_itself_exactly():
    """Two searches run the same orders one after the other."""
    scenario = SCENARIOS["fork-and-load"]

    def logs():
        orders, found = EveryOrder(), []
        for _ in range(10):
            found.append(run(setup_of(scenario, "polled"), scenario.program, orders).log)
            orders.next()
        return found

    assert logs() == logs()
