"""What the checkers of `--check` cost a step: rounds with each of them against rounds with none.

Every round runs the same requests once without checkers, once with each, and once with all of them
together, in an order drawn anew; so each ratio is one of two runs of the same minute. Knows no
output format. Invariant: a step's time is the median from one step's end to the next, in all of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.probes.step import step_period_s
from bench.probes.watched_engine import draw_requests, nothing_ran, num_wrong, run_plain
from bench.rounds import round_order
from bench.runner import Target
from bench.samples import FINDING_COUNTERS
from bench.spec import Resolved
from bench.stats import Estimate, median, paired_ratio
from deepinfer.checks.suite import OFF

US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class CheckCost:
    """One choice of checkers.

    Attributes:
        checks: a value of `EngineConfig.checks`; `off` comes first.
        step_us: median of the rounds' step times.
        ratio: of step times to those without checkers, round by round; None for `off`.
        num_findings: what the checkers found, in all rounds.
        num_wrong: requests with wrong tokens, of one round.
    """

    checks: str
    step_us: float
    ratio: Estimate | None
    num_findings: int
    num_wrong: int


@dataclass(frozen=True, slots=True)
class CheckProfile:
    """All figures of one run; `notes` say what was done to its input."""

    rows: tuple[CheckCost, ...]
    device: str
    num_rounds: int
    notes: tuple[str, ...]


def choices_of(names: Sequence[str]) -> tuple[str, ...]:
    """`off`, each checker alone, and all of them where there are several."""
    return (OFF, *names, *(["+".join(names)] if len(names) > 1 else []))


def profile_checks(
    resolved: Resolved,
    names: Sequence[str],
    *,
    num_rounds: int,
    on_probe: Callable[[str], None] = lambda name: None,
) -> CheckProfile:
    """`num_rounds` rounds of each choice of checkers, after one that warms up.

    `on_probe` is told what runs next.
    """
    target = Target(resolved)
    try:
        contestants = [_Contestant(resolved, checks, target) for checks in choices_of(names)]
        for contestant in contestants:
            on_probe(f"{contestant.checks}: warm-up")
            contestant.warm_up()
        for index in range(num_rounds):
            for number in round_order(len(contestants), resolved.seed, index):
                on_probe(f"{contestants[number].checks}: round {index + 1} of {num_rounds}")
                contestants[number].run(index)
    finally:
        target.close()
    plain = contestants[0].periods_s
    rows = tuple(contestant.cost(plain) for contestant in contestants)
    return CheckProfile(rows, resolved.device, num_rounds, resolved.notes)


class _Contestant:
    """The rounds of one choice of checkers."""

    def __init__(self, resolved: Resolved, checks: str, target: Target) -> None:
        self.checks = checks
        self.periods_s: dict[int, float] = {}  # by round
        self._resolved = resolved.with_engine(checks=checks)
        self._target = target
        self._requests = draw_requests(resolved)
        self._num_findings = self._num_wrong = 0

    def warm_up(self) -> None:
        """Run once, on the requests of another round."""
        run_plain(self._resolved, self._target, draw_requests(self._resolved, -1))

    def run(self, index: int) -> None:
        """Run a round and note its step time."""
        result = run_plain(self._resolved, self._target, self._requests)
        period_s = step_period_s(result)
        if period_s is None:
            raise nothing_ran(self._resolved)
        self.periods_s[index] = period_s
        counters = result.round.counters
        self._num_findings += sum(int(counters.get(c) or 0) for c in FINDING_COUNTERS.values())
        if index == 0:
            self._num_wrong = num_wrong(self._resolved, self._target, result)

    def cost(self, plain_s: dict[int, float]) -> CheckCost:
        """What it took, against the rounds without checkers."""
        middle = median(list(self.periods_s.values()))
        assert middle is not None, "there was a round"
        return CheckCost(
            checks=self.checks,
            step_us=middle * US_PER_S,
            ratio=None if self.checks == OFF else paired_ratio(self.periods_s, plain_s),
            num_findings=self._num_findings,
            num_wrong=self._num_wrong,
        )
