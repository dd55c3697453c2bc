"""One run of a program: an engine's settings, who decides the order of events, what came of it.

Knows no scenario's purpose and no policy but by name. Invariant: the same setup, actions and
answers give the same outcome.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from deepinfer.config import EngineConfig
from deepinfer.device.wrapper import DeviceWrapper
from deepinfer.testing.explorer.actions import Action, Program, is_possible, perform
from deepinfer.testing.explorer.choices import NOT_YET, ChoiceDevice, Chooser
from deepinfer.testing.explorer.scenarios import Scenario
from deepinfer.testing.explorer.search import Recorded, Redundant
from deepinfer.testing.world import OneStream, World

SEPARATE, ONE = "separate", "one"  # streams
Performed = tuple[Action | None, Sequence[str]]  # and the answers during it; None: the drain
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 32}


@dataclass(frozen=True, slots=True)
class Setup:
    """An engine to explore.

    Attributes:
        config: its settings.
        streams: `separate`: `compute`, `copy` and `load`; `one`: all of them the same.
    """

    config: EngineConfig
    streams: str = SEPARATE


@dataclass(slots=True)
class Outcome:
    """What one run brought.

    Attributes:
        wrong_rows: rows read that did not hold what they should.
        wrong_tokens: tokens that a right pool would not have given.
        hazards: findings of the order checker.
        num_findings: of all checkers.
        problems: everything else that was wrong, one line each.
        findings: the checkers' first findings in words.
        performed: the actions that were possible, each with the chooser's answers during it; the
            answers of the final drain come last, with None.
        log: actions, and operations as they ran.
        num_actions, num_ops: calls that changed something, and operations queued.
    """

    wrong_rows: int = 0
    wrong_tokens: int = 0
    hazards: int = 0
    num_findings: int = 0
    problems: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    performed: list[Performed] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    num_actions: int = 0
    num_ops: int = 0

    @property
    def corrupt(self) -> bool:
        """Whether anybody read a wrong row or got a wrong token."""
        return bool(self.wrong_rows or self.wrong_tokens)

    @property
    def failed(self) -> bool:
        """Whether anything was wrong, in this run or by luck only not in this run."""
        return bool(self.corrupt or self.hazards or self.problems)


def setup_of(
    scenario: Scenario,
    release: str,
    free_order: str = "reverse",
    discipline: str = "fifo",
    streams: str = SEPARATE,
    checks: str = "off",
) -> Setup:
    """A scenario's pool under one policy."""
    settings = {**LIMITS, **scenario.settings}
    config = EngineConfig(
        block_size=scenario.block_size,
        num_blocks=scenario.num_blocks,
        release=release,
        free_order=free_order,
        discipline=discipline,
        checks=checks,
        **settings,  # type: ignore[arg-type]
    )
    return Setup(config, streams)


class Run:
    """A program that is being run."""

    def __init__(self, setup: Setup, chooser: Chooser) -> None:
        self.device = ChoiceDevice(setup.config.block_size, chooser)
        one = setup.streams == ONE
        device: DeviceWrapper = OneStream(self.device) if one else self.device
        self.world = World(setup.config, device=device)
        self._outcome = Outcome(log=self.device.log)

    def perform(self, action: Action) -> bool:
        """Do one action if it is possible; whether it was. Raises what the engine raises."""
        self.device.log.append(f"host: {action}")
        try:
            done = perform(self.world, action)
        finally:
            answers = self._answers()
        if done or answers:
            self._outcome.performed.append((action, answers))
        if not done:
            self.device.log[-1] += " (not possible)"
        return done

    def pause(self) -> None:
        """Let streams go on before the next action."""
        self.device.pause()
        for stream in self._answers():
            if stream != NOT_YET:
                self._outcome.performed.append((Action("advance", stream), ()))

    def finish(self) -> Outcome:
        """Run everything to its end."""
        self.device.log.append("host: drain")
        try:
            self.world.drain()
        finally:
            self._outcome.performed.append((None, self._answers()))
        return self.outcome()

    def outcome(self, error: Exception | None = None) -> Outcome:
        """What it brought so far."""
        outcome, world = self._outcome, self.world
        findings = world.engine.findings
        outcome.wrong_rows, outcome.wrong_tokens = world.wrong_rows, world.wrong_tokens()
        outcome.hazards = findings.counts["order"]
        outcome.num_findings = len(findings)
        outcome.findings = [str(finding) for finding in findings.first]
        others = (str(f) for f in findings.first if f.check != "order")
        outcome.problems = [*world.problems, *others]
        if error is not None:
            outcome.problems.append(f"{type(error).__name__}: {error}")
        outcome.num_actions, outcome.num_ops = world.num_actions, self.device.num_ops
        return outcome

    def _answers(self) -> list[str]:
        answers, self.device.answers = self.device.answers, []
        return answers


def run(setup: Setup, program: Program, chooser: Chooser, *, pauses: bool = False) -> Outcome:
    """Run a program to its end; `pauses`: let streams go on between actions too.

    What the engine raises becomes a problem of the outcome. Raises Redundant as the chooser does.
    """
    running = Run(setup, chooser)
    try:
        for action in _in_turn(running.world, program, chooser):
            if pauses:
                running.pause()
            running.perform(action)
        return running.finish()
    except Redundant:
        raise
    except Exception as error:
        return running.outcome(error)


def _in_turn(world: World, program: Program, chooser: Chooser) -> Iterator[Action]:
    """The actions of all users, each user's in order, whoever's turn the chooser says it is.

    A user whose next action is not possible waits; when all do, the first one leaves it out.
    """
    yield from program.start
    left = {f"user {number}": list(track) for number, track in enumerate(program.users)}
    while left := {name: track for name, track in left.items() if track}:
        able = [name for name, track in left.items() if is_possible(world, track[0])]
        if not able:
            del next(iter(left.values()))[0]
            continue
        yield left[able[0] if len(able) == 1 else chooser.pick(able)].pop(0)


def replay(
    setup: Setup,
    performed: Sequence[Performed],
) -> Outcome:
    """Run actions with the answers that go with them; None stands for the final drain."""
    chooser = Recorded()
    running = Run(setup, chooser)
    try:
        for action, answers in performed:
            chooser.answers = answers
            if action is not None:
                running.perform(action)
        if not performed or performed[-1][0] is not None:
            chooser.answers = ()
        return running.finish()
    except Exception as error:
        return running.outcome(error)
