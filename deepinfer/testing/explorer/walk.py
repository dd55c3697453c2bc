"""Random users on random engines under safe policies: nothing may be found, however long it runs.

A walk is one small engine, its settings drawn, and some hundred random calls; streams go on at
random between them and wherever the host looks or waits. The checkers `order` and `conservation`
are on, so a finding is a false alarm or a bug; wrong rows, wrong tokens and blocks that do not come
back are looked for as in every run. Invariant: the same seed gives the same walk.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from deepinfer.config import MAX_DRAFTS, EngineConfig
from deepinfer.names import (
    ADMISSIONS,
    DISCIPLINES,
    FENCES,
    FORK_COPIES,
    FREE_ORDERS,
    OVERLAPS,
    PREEMPTIONS,
    RELEASE_POLICIES,
    UNSAFE_POLICIES,
)
from deepinfer.testing.explorer.actions import Action
from deepinfer.testing.explorer.runs import ONE, SEPARATE, Outcome, Run, Setup
from deepinfer.testing.explorer.search import AnyOrder
from deepinfer.testing.world import World

SAFE = tuple(name for name in RELEASE_POLICIES if name not in UNSAFE_POLICIES)
MAX_LIVE, MAX_LOADS = 8, 2
MAX_KEPT = 5


@dataclass(frozen=True, slots=True)
class Walk:
    """What one walk brought.

    Attributes:
        seed: makes the same walk again.
    """

    seed: int
    setup: Setup
    outcome: Outcome

    @property
    def num_operations(self) -> int:
        """Calls that changed something, and operations they queued on the device."""
        return self.outcome.num_actions + self.outcome.num_ops


@dataclass(slots=True)
class Tally:
    """All walks under one policy.

    Attributes:
        num_actions: calls that changed something.
        num_ops: operations queued on the device.
        num_alarms: findings of the checkers.
        num_failed: walks with anything wrong.
    """

    release: str
    num_walks: int = 0
    num_actions: int = 0
    num_ops: int = 0
    num_alarms: int = 0
    wrong_rows: int = 0
    num_failed: int = 0

    def add(self, outcome: Outcome) -> None:
        """One more walk."""
        self.num_walks += 1
        self.num_actions += outcome.num_actions
        self.num_ops += outcome.num_ops
        self.num_alarms += outcome.num_findings
        self.wrong_rows += outcome.wrong_rows
        self.num_failed += outcome.failed


def tally(
    num_operations: int,
    seed: int = 0,
    releases: Sequence[str] = SAFE,
    *,
    seconds: float | None = None,
    tell: Callable[[str], None] | None = None,
) -> tuple[list[Tally], list[Walk]]:
    """Walk until calls and device operations sum up to `num_operations`, policy by policy.

    Args:
        seconds: stop earlier, at this time.
        tell: told now and then how far it is.

    Returns the sums of each policy, and the first walks that failed, at most `MAX_KEPT`.
    """
    tallies = {release: Tally(release) for release in releases}
    failed: list[Walk] = []
    deadline = None if seconds is None else time.perf_counter() + seconds
    done, number = 0, 0
    while done < num_operations and (deadline is None or time.perf_counter() < deadline):
        release = releases[number % len(releases)]
        walk = one_walk(seed + number, release)
        tallies[release].add(walk.outcome)
        if walk.outcome.failed and len(failed) < MAX_KEPT:
            failed.append(walk)
        done += walk.num_operations
        number += 1
        if tell is not None and number % 500 == 0:
            tell(f"{done} of {num_operations} operations")
    return list(tallies.values()), failed


def one_walk(seed: int, release: str, num_actions: int = 200) -> Walk:
    """That many random calls; nothing is found in them unless the policy is unsafe."""
    rng = random.Random(seed)
    setup = draw_setup(rng, release)
    running = Run(setup, AnyOrder(rng))
    try:
        for _ in range(num_actions):
            running.pause()
            running.perform(draw_action(rng, running.world))
        outcome = running.finish()
    except Exception as error:
        outcome = running.outcome(error)
    return Walk(seed, setup, outcome)


def draw_setup(rng: random.Random, release: str) -> Setup:
    """Settings in which blocks are scarce."""
    config = EngineConfig(
        block_size=rng.randint(1, 4),
        num_blocks=rng.randint(3, 14),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.randint(5, 14),
        max_model_len=24,
        release=release,
        free_order=rng.choice(FREE_ORDERS),
        discipline=rng.choice(DISCIPLINES),
        fence=rng.choice(FENCES),
        admission=rng.choice(ADMISSIONS),
        preemption=rng.choice(PREEMPTIONS),
        fork_copy=rng.choice(FORK_COPIES),
        checks="order+conservation",
        seed=rng.randrange(4),
    )
    streams = rng.choice((SEPARATE, SEPARATE, SEPARATE, ONE))
    if rng.random() < 0.5:  # of a model whose requests have state
        config = replace(config, num_state_slots=rng.randint(2, 8))
    if rng.random() < 0.6:
        drafts = rng.choice((0, 1, 3, MAX_DRAFTS))
        config = replace(config, overlap=rng.choice(OVERLAPS), drafts=drafts)
    return Setup(config, streams)


def draw_action(rng: random.Random, world: World) -> Action:
    """A call that is possible now."""
    live, running, loads = list(world.tokens), world.running_ids(), list(world.transfers.held)
    readable = world.readable_ids()
    name = f"r{world.num_actions}"
    kinds = {
        "collect": 6 * bool(world.in_flight),
        "submit": 6 * (world.can_submit and bool(live)),
        "add": 2 * (len(live) < MAX_LIVE),
        "fork": 2 * (len(live) < MAX_LIVE and bool(running)),
        "abort": bool(live),
        "load": len(loads) < MAX_LOADS,
        "use": bool(loads),
        "drop": bool(loads),
        "save": 2 * bool(readable),
    }
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    if kind == "add":
        stop = rng.choice((-1, -1, rng.randrange(9)))
        return Action(
            kind, name, tokens=rng.randint(1, 12), max_tokens=rng.randint(1, 7), stop=stop
        )
    if kind == "fork":
        of, own, max_tokens = rng.choice(running), rng.choice((0, 0, 3)), rng.randint(1, 7)
        shared = rng.choice((0, rng.randint(1, len(world.tokens[of]))))
        return Action(kind, name, of, own, shared, max_tokens)
    if kind == "load":
        most = world.blocks.num_usable * world.config.block_size
        return Action(kind, name, tokens=rng.randint(1, min(12, most)))
    if kind == "save":
        return Action(kind, name, rng.choice(readable))
    if kind in ("abort", "use", "drop"):
        return Action(kind, rng.choice(live if kind == "abort" else loads))
    return Action(kind)
