"""Puts a block manager through the invariants: a state machine draws calls, hypothesis shrinks.

Each invariant has a run of its own, so that each gets a verdict of its own:

    holds         no run of the examples broke it
    fails         with the shortest program that hypothesis finds
    not offered   the adapter lacks what it takes to look
    unclear       it did not fail, but runs ended early because another invariant broke

Knows which calls are possible when; `trial` knows what they must do. Invariant:
the same adapter gives the same outcomes, call for call, every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from deepinfer.testing.conformance.adapters import Family
from deepinfer.testing.conformance.invariants import INVARIANTS, Invariant
from deepinfer.testing.conformance.trial import CutShort, Trial, Violation

HOLDS, FAILS, NOT_OFFERED, UNCLEAR = "holds", "fails", "not offered", "unclear"
EXAMPLES = 300  # with 150 one bug in a hundred runs of the tests would be missed
STEPS = 30
# Usable blocks, a fifth of the runs each; None: drawn. Smallest first, for hypothesis shrinks one
# number at a time, and a program for a smaller pool often has other counts as well.
POOL_SIZES = (1, 2, 3, 40, None)
OPERATION = st.runner().flatmap(lambda machine: st.sampled_from(machine.trial.operations))
EDGES = (0, 0, 0, 1, 2)  # entries left out at an end of a table


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the runs of one invariant showed.

    Attributes:
        verdict: `holds`, `fails`, `not offered` or `unclear`.
        detail: what was seen, what is missing, or what ended runs early; empty if it holds.
        calls: the failing program, call by call; empty unless it fails.
    """

    invariant: Invariant
    verdict: str
    detail: str = ""
    calls: tuple[str, ...] = ()

    @property
    def program(self) -> str:
        """The calls in one line."""
        return "; ".join(self.calls)


class BlockManagerMachine(RuleBasedStateMachine):
    """Random calls to a manager of a small pool, or one eight times as large.

    A subclass sets the attributes. To use it in a test of your own:
    `machine_for((adapter,), invariant).TestCase`.
    """

    family: Family
    invariant: Invariant
    pool_size: int | None  # usable blocks; None: drawn
    cut_short: list[str]  # why runs ended early, one entry each; shared by all runs
    trial: Trial

    @initialize(variant=st.integers(0, 99), usable=st.integers(1, 7), scale=st.sampled_from((1, 8)))
    def create(self, variant: int, usable: int, scale: int) -> None:
        adapter = self.family[variant % len(self.family)]
        self.is_over = False
        self.scale = max(self.pool_size // 5, 1) if self.pool_size else scale
        size = self.pool_size or usable * scale
        self.trial = Trial(adapter, self.invariant, 1 + size)
        if "fill" in self.invariant.tries:
            self.attempt(self.trial.allocate, size)

    def attempt(self, operation: Callable[..., None], *args: Any) -> None:
        """Do it, unless this run is over; remember what ends it."""
        if self.is_over:
            return
        self.is_over = True  # unless it succeeds
        try:
            operation(*args)
        except CutShort as reason:
            self.cut_short.append(str(reason))
        else:
            self.is_over = False

    def part(self, number: int) -> tuple[int, int, int]:
        """A table and what of it: whole, or without so many entries in front and at the end."""
        which, edges = divmod(number, len(EDGES) ** 2)
        index = which % len(self.trial.tables)
        length = len(self.trial.tables[index].ids)
        start, end = (EDGES[digit] for digit in divmod(edges, len(EDGES)))
        start = min(start, length - 1)
        stop = start + 1 if "ones" in self.invariant.tries else max(length - end, start + 1)
        return index, start, stop

    # One rule, for hypothesis leaves whole rules out of most runs, and the rare failures take many.
    # Two draws, for it deletes no more than five at once, and a call should go in one piece.
    @rule(operation=OPERATION, number=st.integers(0, 499))
    def call(self, operation: str, number: int) -> None:
        """Make one call, if there is something to make it on; `number` says on what."""
        trial = self.trial
        if operation == "allocate":
            self.attempt(trial.allocate, (1 + number % 5) * self.scale)
        elif operation == "lift":
            if trial.withheld:
                self.attempt(trial.lift, number % len(trial.withheld))
        elif operation in ("release_again", "pin_free"):
            if tables := trial.without_owner():
                self.attempt(getattr(trial, operation), tables[number % len(tables)])
        elif trial.tables and operation == "release_twice":
            self.attempt(trial.release_twice, number % len(trial.tables))
        elif trial.tables:
            self.attempt(getattr(trial, operation), *self.part(number))

    def teardown(self) -> None:
        if hasattr(self, "trial"):
            self.attempt(self.trial.drain)


def machine_for(
    family: Family, invariant: Invariant, pool_size: int | None = None
) -> type[BlockManagerMachine]:
    """The state machine of one invariant; its `TestCase` is a test for unittest and pytest."""
    members = {
        "family": family,
        "invariant": invariant,
        "pool_size": pool_size,
        "cut_short": [],
    }
    return type("Conformance", (BlockManagerMachine,), members)


def check(family: Family, invariant: Invariant, examples: int = EXAMPLES) -> Outcome:
    """Run one invariant on an adapter, or on several that are variants of one manager."""
    offering = tuple(adapter for adapter in family if not invariant.missing(adapter))
    if not offering:
        return Outcome(invariant, NOT_OFFERED, "no " + ", ".join(invariant.missing(family[0])))
    cut_short: list[str] = []
    for pool_size in POOL_SIZES:
        machine = machine_for(offering, invariant, pool_size)
        try:
            run_state_machine_as_test(machine, settings=_settings(-(-examples // len(POOL_SIZES))))
        except Violation as found:
            return Outcome(invariant, FAILS, found.text, found.calls)
        except Flaky:
            return Outcome(invariant, FAILS, "the same calls do not give the same answers twice")
        cut_short += machine.cut_short
    if cut_short:
        why = f"{len(cut_short)} runs ended early, the last at {cut_short[-1]}"
        return Outcome(invariant, UNCLEAR, why)
    return Outcome(invariant, HOLDS)


def check_all(
    family: Family, invariants: Sequence[Invariant] = INVARIANTS, examples: int = EXAMPLES
) -> list[Outcome]:
    """The outcomes of all invariants, in their order."""
    return [check(family, invariant, examples) for invariant in invariants]


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
