"""Planted faults: each changes something, each is found by a checker, none is left behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer.device.wrapper import inner_event
from deepinfer.names import CHECKS, RELEASE_POLICIES, UNSAFE_POLICIES
from deepinfer.observer import CALLS, Observer
from deepinfer.testing.faults import ENGINE, FAULTS, Fault, Outcome, run_trial

SEEDS = range(8)
DOCUMENT = Path(__file__).parents[4] / "docs" / "faults.md"
ADDRESS = re.compile(r"\b\d{11,}\b")  # of an event or a host buffer: another one in every run
UNFAULTY = "early-with-unordered-writer"  # a policy as it is, in the wrong company


class Trace(Observer):
    """Everything that an observer is told, in words that are the same in every run."""

    def __init__(self) -> None:
        self.states = self
        self.calls: list[str] = []
        self._numbers: dict[int, int] = {}
        for name in CALLS:
            setattr(self, name, self._note(name))

    def _note(self, name: str) -> Callable[..., None]:
        def note(*args: Any) -> None:
            self.calls.append(f"{name} {[self._word(arg) for arg in args]}")

        return note

    def _word(self, arg: Any) -> str:
        if hasattr(arg, "query"):
            arg = id(inner_event(arg))
        text = str(arg.tolist() if isinstance(arg, np.ndarray) else arg)
        return ADDRESS.sub(self._number, text)

    def _number(self, found: re.Match[str]) -> str:
        return f"address {self._numbers.setdefault(int(found[0]), len(self._numbers))}"


@cache
def clean_run(
    settings: frozenset[tuple[str, Any]], seed: int, with_state: bool
) -> tuple[Outcome, list[str]]:
    trace, clean = Trace(), Fault("clean", "", "", lambda engine: None, settings=dict(settings))
    outcome = run_trial(clean, seed, with_state=with_state, observers=(trace,))
    assert clean.settings.get("release") in UNSAFE_POLICIES or not outcome.first
    return outcome, trace.calls


def is_found(name: str, seed: int, with_state: bool) -> bool:
    """Whether a checker finds the fault in the scenario of `seed`."""
    outcome = run_trial(FAULTS[name], seed, stop_at_first=True, with_state=with_state)
    return bool(outcome.first.keys() & set(CHECKS))


def is_changed(name: str, seed: int, with_state: bool) -> bool:
    """Whether a run with the fault differs from the same run without it."""
    trace, settings = Trace(), frozenset(FAULTS[name].settings.items())
    outcome = run_trial(FAULTS[name], seed, with_state=with_state, observers=(trace,))
    clean, calls = clean_run(settings, seed, with_state)
    same_answers = all(
        theirs.get(key) == value
        for theirs, ours in ((clean.tokens, outcome.tokens), (clean.told, outcome.told))
        for key, value in ours.items()
    )
    return trace.calls != calls[: len(trace.calls)] or not same_answers


def test_there_are_enough() -> None:
    """At least 25 faults, each with a line that says what goes wrong and where it is from."""
    assert len(FAULTS) >= 25
    assert all(fault.what and fault.report for fault in FAULTS.values())
    assert len({fault.what for fault in FAULTS.values()}) == len(FAULTS)


def test_the_document_has_them_all() -> None:
    """With the line that says what goes wrong, and the report."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for fault in FAULTS.values():
        assert f"| `{fault.name}` | {fault.what} | {fault.report} |" in text


RUNS = [(name, "num_state_slots" in fault.settings) for name, fault in FAULTS.items()]
RUNS += [(name, True) for name, fault in FAULTS.items() if fault.of_client]


@pytest.mark.parametrize(("name", "with_state"), RUNS)
def test_every_fault_changes_the_run_and_is_found(name: str, with_state: bool) -> None:
    """Some checker finds it, and what happens is not what happens in a clean engine.

    What concerns the client beside the engine in a model without state and in one with it.
    """
    found = (seed for seed in SEEDS if is_found(name, seed, with_state))
    first = next(found, None)
    assert first is not None, "nobody found it"
    if name != UNFAULTY:
        assert any(is_changed(name, seed, with_state) for seed in chain([first], found))


@pytest.mark.parametrize("release", RELEASE_POLICIES)
def test_the_clean_engine_is_silent(release: str) -> None:
    """No checker finds anything in the scenarios of the faults, and the engine refuses nothing."""
    alone = release in UNSAFE_POLICIES
    for seed in range(2):
        for with_state, ahead, store in product((False, True), repeat=3):
            if store and alone:  # its copies write beside the steps
                continue
            outcome = run_trial(
                None,
                seed,
                release=release,
                transfers=not alone,
                with_state=with_state,
                ahead=ahead,
                store=store,
            )
            assert outcome.first == {}, outcome.messages
            assert outcome.num_steps == 100


def test_a_fault_stays_in_its_engine() -> None:
    """After every fault has been planted somewhere, a clean engine still does the same."""
    before = Trace(), Trace()
    run_trial(None, 0, max_steps=30, observers=(before[0],))
    for fault in FAULTS.values():
        run_trial(fault, 0, max_steps=2)
    run_trial(None, 0, max_steps=30, observers=(before[1],))
    assert before[0].calls == before[1].calls


@pytest.mark.parametrize(
    ("name", "finders"),
    [
        ("withheld-for-ever", {"conservation"}),
        ("free-order-lost-when-withheld", {"conservation"}),
        ("never-treated-as-later", {"conservation"}),
        ("result-read-early", {"order"}),
        ("tail-not-copied", {"tags", "conservation"}),
        ("computed-count-kept", {"tags", "conservation"}),
        ("staging-rewritten", {"tags", "order"}),
        ("captured-with-old-table", {"tags"}),
        ("slot-not-copied", {"tags"}),
        ("slot-leaked-when-idle", {"conservation"}),
        ("open-group-of-the-last-owner", {"tags"}),
        ("record-recycled-under-its-reader", {"conservation"}),
        ("record-recycled-without-a-mark", {"conservation"}),
        ("state-gone-on-too-far", {"tags"}),
        ("draft-row-read-after-rejection", {"tags"}),
        ("ring-without-room-for-drafts", {"tags"}),
        ("optimistic-count-never-corrected", {"tags", "conservation"}),
        ("placeholder-after-a-skipped-step", {"conservation"}),
        ("state-kept-that-has-gone-on", {"tags"}),
        ("state-not-loaded", {"tags"}),
    ],
)
def test_no_checker_finds_what_it_cannot_see(name: str, finders: set[str]) -> None:
    """Blindness is as documented: nobody else finds these, and at least one of them does."""
    found = set[str]()
    for seed in range(3):
        found |= run_trial(FAULTS[name], seed, max_steps=60).first.keys() - {ENGINE}
    assert found
    assert found <= finders


def test_an_exception_is_a_finding_of_the_engine() -> None:
    """It ends the run and stands in a column of its own, with its message."""
    outcome = run_trial(FAULTS["block-zero-in-the-pool"], 0)
    assert outcome.num_steps < 100
    assert outcome.messages[ENGINE].startswith("OwnershipError")
