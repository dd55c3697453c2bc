"""Runs a program under every order of events there is, and sums up what came of it.

`explore` runs all orders of one setup, up to a limit it reports honestly; past the limit it goes on
with random ones. What one run is, `runs` says; which orders there are, `search`; how a failure is
kept, `recording`.

Invariant: `complete` means that no other order could have brought anything else.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress
from dataclasses import dataclass

from deepinfer.testing.explorer.actions import Program
from deepinfer.testing.explorer.recording import replay_file
from deepinfer.testing.explorer.runs import Outcome, Setup, run
from deepinfer.testing.explorer.search import AnyOrder, EveryOrder, Redundant

__all__ = ["Explored", "explore", "replay_file"]


@dataclass(slots=True)
class Explored:
    """What all runs of one setup brought, summed.

    Attributes:
        num_runs: interleavings, no two of them the same as far as anybody can tell.
        num_random: of them, drawn at random past the limit; these may repeat.
        num_redundant: runs given up because they could only repeat others.
        complete: whether these are all there are.
        num_corrupt: runs in which a wrong row was read or a wrong token given.
        num_checked: runs with the order checker on.
        num_hazardous: of these, runs in which it found something.
        num_failed: runs with anything wrong.
        first_corrupt, first_failed: examples.
    """

    num_runs: int = 0
    num_random: int = 0
    num_redundant: int = 0
    complete: bool = False
    num_corrupt: int = 0
    num_checked: int = 0
    num_hazardous: int = 0
    num_failed: int = 0
    wrong_rows: int = 0
    num_actions: int = 0
    num_ops: int = 0
    first_corrupt: Outcome | None = None
    first_failed: Outcome | None = None

    def add(self, outcome: Outcome, checked: bool) -> None:
        """One more run, with the order checker on or not."""
        self.num_runs += 1
        self.num_checked += checked
        self.num_corrupt += outcome.corrupt
        self.num_hazardous += outcome.hazards > 0
        self.num_failed += outcome.failed
        self.wrong_rows += outcome.wrong_rows
        self.num_actions += outcome.num_actions
        self.num_ops += outcome.num_ops
        if outcome.corrupt and self.first_corrupt is None:
            self.first_corrupt = outcome
        if outcome.failed and self.first_failed is None:
            self.first_failed = outcome


def explore(
    setup: Setup,
    program: Program,
    limit: int,
    *,
    deadline: float | None = None,
    reduce: bool = True,
) -> Explored:
    """Run all orders, or `limit` of them and half as many random ones.

    Args:
        deadline: of `time.perf_counter()`, at which to stop.
        reduce: see `search.EveryOrder`; without it streams also go on between actions.
    """
    explored, orders = Explored(), EveryOrder(reduce=reduce)
    checked = "order" in setup.config.checks
    while explored.num_runs < limit:
        with suppress(Redundant):
            explored.add(run(setup, program, orders, pauses=not reduce), checked)
        if not orders.next():
            explored.complete = True
            break
        if deadline is not None and time.perf_counter() > deadline:
            break
    explored.num_redundant = orders.num_redundant
    if not explored.complete:
        chooser = AnyOrder(random.Random(0))
        while explored.num_random < limit // 2:
            if deadline is not None and time.perf_counter() > deadline:
                break
            explored.add(run(setup, program, chooser, pauses=True), checked)
            explored.num_random += 1
    return explored
