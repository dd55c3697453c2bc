"""The rows of the table of faults: medians, and when a row passes."""

from __future__ import annotations

from deepinfer.names import RELEASE_POLICIES, UNSAFE_POLICIES
from deepinfer.testing.faults import ENGINE, FAULTS, Outcome
from deepinfer.testing.faults.survey import _row, survey


def test_a_figure_is_the_median_over_the_seeds_that_found_something() -> None:
    """Seeds without a finding are counted, and leave the median alone."""
    runs = [
        Outcome(9, {"tags": 7}, {"tags": "first"}),
        Outcome(9, {}, {}),
        Outcome(9, {"tags": 3, "order": 2}, {"tags": "second", "order": "a"}),
        Outcome(9, {"tags": 4}, {"tags": "third"}),
    ]
    row = _row("a-fault", "what", "report", False, runs)
    assert row.num_seeds == 4
    assert row.first_step == {"tags": 4, "order": 2}
    assert row.num_found == {"tags": 3, "order": 1}
    assert row.example == {"tags": "first", "order": "a"}


def test_a_fault_passes_if_a_checker_found_it_and_a_clean_engine_if_nobody_did() -> None:
    """What only the engine refuses is no detection, and with a clean engine a failure."""
    silent = [Outcome(9, {}, {})]
    refused = [Outcome(9, {ENGINE: 3}, {ENGINE: "no"})]
    found = [Outcome(9, {"order": 3}, {"order": "yes"})]
    passed = {
        is_clean: [_row("", "", "", is_clean, runs).passed for runs in (silent, refused, found)]
        for is_clean in (False, True)
    }
    assert passed == {False: [False, False, True], True: [True, False, False]}


def test_clean_rows_come_first_six_for_each_policy() -> None:
    """Without state and with it, step by step, ahead, and with a store; then the faults asked for.

    Unsafe policies have no store: its copies are a writer beside the steps. Faults of the client
    are run in both models.
    """
    companies = ("", ", state", ", ahead", ", state, ahead")
    with_store = (", ahead, store", ", state, ahead, store")
    rows = list(survey([FAULTS["staging-rewritten"], FAULTS["load-used-before-written"]], 1))
    assert [row.name for row in rows] == [
        *(
            f"clean, {release}{of}"
            for release in RELEASE_POLICIES
            for of in companies + (() if release in UNSAFE_POLICIES else with_store)
        ),
        *("staging-rewritten", "load-used-before-written", "load-used-before-written, state"),
    ]
    assert all(row.passed for row in rows)
