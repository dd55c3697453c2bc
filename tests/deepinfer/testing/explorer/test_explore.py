"""Exploring small engines: what is safe, what is not, and what is kept of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.errors import UserError
from deepinfer.names import RELEASE_POLICIES, UNSAFE_POLICIES
from deepinfer.testing.explorer.actions import Action
from deepinfer.testing.explorer.explore import explore, replay_file
from deepinfer.testing.explorer.recording import happened, read_file, write_file
from deepinfer.testing.explorer.runs import ONE, SEPARATE, Run, replay, setup_of
from deepinfer.testing.explorer.scenarios import SCENARIOS
from deepinfer.testing.explorer.search import Recorded
from deepinfer.testing.explorer.shrink import shrink
from deepinfer.testing.explorer.survey import survey

KEPT = sorted((Path(__file__).parents[3] / "data" / "explorations").glob("*.json"))
RACES = [name for name, scenario in SCENARIOS.items() if scenario.races and name != "mixed"]
AHEAD = [name for name, scenario in SCENARIOS.items() if "overlap" in scenario.settings]
SAFE = [name for name in RELEASE_POLICIES if name not in UNSAFE_POLICIES]


@pytest.mark.parametrize("name", RACES)
def test_early_corrupts_beside_a_transfer_and_not_on_one_stream(name):
    """The same program, all orders of it: unsafe with an unordered writer, safe without."""
    program = SCENARIOS[name].program
    apart = explore(setup_of(SCENARIOS[name], "early"), program, 100)
    together = explore(setup_of(SCENARIOS[name], "early", streams=ONE), program, 100)
    assert apart.complete
    assert 0 < apart.num_corrupt < apart.num_runs
    assert together.complete
    assert together.num_failed == 0


@pytest.mark.parametrize("release", SAFE)
@pytest.mark.parametrize("name", ["load-after-abort", "save-at-finish"])
def test_safe_policies_never_corrupt_and_raise_no_alarm(name, release):
    """All orders of events with both checkers on: nothing to report."""
    scenario = SCENARIOS[name]
    setup = setup_of(scenario, release, checks="order+conservation")
    explored = explore(setup, scenario.program, 100)
    assert explored.complete
    assert explored.num_checked == explored.num_runs
    assert explored.num_failed == 0


@pytest.mark.parametrize("release", RELEASE_POLICIES)
@pytest.mark.parametrize("name", AHEAD)
def test_looking_ahead_corrupts_nothing_but_under_early_beside_a_transfer(name, release):
    """Every order, or 60 of them, with both checkers on: alarms there and nowhere else."""
    scenario = SCENARIOS[name]
    setup = setup_of(scenario, release, checks="order+conservation")
    explored = explore(setup, scenario.program, 60)
    must_corrupt = scenario.races and release in UNSAFE_POLICIES
    assert (explored.num_corrupt > 0) == (explored.num_failed > 0) == must_corrupt


@pytest.mark.parametrize(
    ("name", "counter"),
    [("preempt-ahead", "num_preemptions"), ("reject-ahead", "num_blocks_shrunk")],
)
def test_what_a_scenario_is_about_happens_with_a_step_in_flight(name, counter):
    """In the order in which its users come by themselves."""
    scenario = SCENARIOS[name]
    running = Run(setup_of(scenario, "step"), Recorded())
    happened_in_flight = False
    for action in (*scenario.program.start, *scenario.program.users[0]):
        before = getattr(running.world.scheduler.counters, counter)
        running.perform(action)
        after = getattr(running.world.scheduler.counters, counter)
        happened_in_flight |= after > before and len(running.world.in_flight) > 0
    assert happened_in_flight
    assert not running.finish().failed


def test_the_order_checker_sees_the_hazard_in_runs_that_were_lucky():
    """Wherever one order of events corrupts, the others are reported too."""
    scenario = SCENARIOS["save-at-finish"]
    explored = explore(setup_of(scenario, "early", checks="order"), scenario.program, 100)
    assert explored.num_hazardous > explored.num_corrupt > 0


def test_a_limit_is_reported_and_random_runs_follow():
    """Past the limit nothing claims to be complete."""
    scenario = SCENARIOS["mixed"]
    explored = explore(setup_of(scenario, "step"), scenario.program, 10)
    assert not explored.complete
    assert (explored.num_runs, explored.num_random) == (15, 5)


def test_a_survey_sums_cells_and_knows_what_to_expect():
    """A row per scenario, streams and policy; `early` must corrupt where something races."""
    rows = survey(["abort", "save-at-finish"], ["early", "step"], 50)
    found = {(row.scenario, row.streams, row.release): row for row in rows}
    assert len(found) == 6
    assert all(row.complete and row.as_expected for row in rows)
    assert found["save-at-finish", SEPARATE, "early"].num_corrupt > 0
    assert sum(row.must_corrupt for row in rows) == 1


def test_a_failure_shrinks_and_its_file_replays_it(tmp_path):
    """From a program of fifteen actions to a few, which bring the same again from the file."""
    scenario = SCENARIOS["mixed"]
    setup = setup_of(scenario, "early", checks="order")
    outcome = explore(setup, scenario.program, 50).first_corrupt
    shortest = shrink(setup, outcome)
    assert shortest.corrupt
    assert len(shortest.performed) < len(outcome.performed)
    for index, (action, _) in enumerate(shortest.performed):
        if action is not None:
            rest = [*shortest.performed[:index], *shortest.performed[index + 1 :]]
            assert not replay(setup, rest).corrupt
    path = tmp_path / "sub" / "failure.json"
    write_file(path, "what it shows", setup, shortest)
    assert happened(replay_file(path)) == read_file(path).happened == happened(shortest)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_explorations_still_bring_what_they_brought(path):
    """Every file of `tests/data/explorations`, replayed."""
    assert happened(replay_file(path)) == read_file(path).happened


@pytest.mark.parametrize("release", SAFE)
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_explorations_are_harmless_under_safe_policies(path, release, tmp_path):
    """The same actions and events under another policy corrupt nothing."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content["configuration"]["release"] = release
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(content), encoding="utf-8")
    assert not replay_file(changed).failed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "else"}, "not an exploration"),
        ({"version": 2}, "version 2"),
        ({"actions": None}, "actions"),
        ({"actions": [{"do": "sumbit"}]}, "'sumbit' is unknown"),
        ({"actions": [{"do": "submit", "nam": "a"}]}, "'nam' is unknown"),
        ({"actions": [{"do": "add", "name": 3}]}, "name: 3"),
        ({"actions": [{"do": "submit", "meanwhile": "load"}]}, "meanwhile"),
        ({"configuration": {"num_block": 3}}, "'num_block' is unknown"),
        ({"configuration": {"streams": "two"}}, "streams"),
    ],
)
def test_a_broken_file_is_refused_by_name_and_key(change, message, tmp_path):
    """One line that says which file and what is wrong."""
    content = {**json.loads(KEPT[0].read_text(encoding="utf-8")), **change}
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        replay_file(path)
    assert str(path) in str(caught.value)


def test_an_action_that_is_not_possible_does_nothing():
    """So a program stays one when actions are taken out of it."""
    setup = setup_of(SCENARIOS["abort"], "step")
    actions = [Action("collect"), Action("abort", "nobody"), Action("use", "nothing")]
    outcome = replay(setup, [(action, ()) for action in actions])
    assert not outcome.failed
    assert outcome.performed == [(None, [])]
