"""The shortest run that still goes wrong in the same way.

Takes actions out, makes requests shorter, and leaves events out, as long as the run still fails
alike. Where taking an action out moves the failure to another order of events, that order is looked
for. Knows nothing of policies. Invariant: what comes out is a run that was made, and fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from deepinfer.testing.explorer.actions import Action, Program
from deepinfer.testing.explorer.runs import Outcome, Performed, Setup, replay, run
from deepinfer.testing.explorer.search import EveryOrder, Redundant

MAX_ORDERS = 40  # tried for each shorter program
FEW = 24  # actions: from here on one at a time, and other orders of events are tried too
_HAS = {"tokens": ("add", "fork", "load"), "max_tokens": ("add", "fork")}


def shrink(setup: Setup, outcome: Outcome) -> Outcome:
    """A shorter run that fails as `outcome` does: with its checkers on if they are in `setup`."""
    fails = _alike(outcome)
    best = replay(setup, outcome.performed)
    if not fails(best):
        return outcome
    best = _without_chunks(setup, best, fails)
    shorter: Outcome | None = best
    while shorter is not None:
        best = shorter
        shorter = _shorter(setup, best, fails)
    return best


def _without_chunks(setup: Setup, best: Outcome, fails: Callable[[Outcome], bool]) -> Outcome:
    """Take out many actions at a time, then fewer, as long as there are many."""
    chunk = len(best.performed) // 2
    while chunk and len(best.performed) > FEW:
        end = len(best.performed)
        while end > 0:
            rest = [*best.performed[: max(end - chunk, 0)], *best.performed[end:]]
            found = replay(setup, rest)
            if fails(found) and _size(found) < _size(best):
                best = found
            end = min(end - chunk, len(best.performed))
        chunk //= 2
    return best


def _shorter(setup: Setup, outcome: Outcome, fails: Callable[[Outcome], bool]) -> Outcome | None:
    """The first of all slightly shorter runs that fails, or None."""
    size = _size(outcome)
    for performed in _candidates(outcome.performed):
        found = replay(setup, performed)
        if not fails(found) and len(performed) <= FEW:
            found = _search(setup, [action for action, _ in performed if action], fails) or found
        if fails(found) and _size(found) < size:
            return found
    for performed in _fewer_answers(outcome.performed):
        found = replay(setup, performed)
        if fails(found) and _size(found) < size:
            return found
    return None


def _search(
    setup: Setup, actions: Sequence[Action], fails: Callable[[Outcome], bool]
) -> Outcome | None:
    orders = EveryOrder()
    for _ in range(MAX_ORDERS):
        try:
            outcome = run(setup, Program(tuple(actions)), orders)
            if fails(outcome):
                return outcome
        except Redundant:
            pass
        if not orders.next():
            break
    return None


def _candidates(performed: Sequence[Performed]) -> Iterator[list[Performed]]:
    """Without one action, from the last to the first; then with a smaller number in one."""
    for index in reversed(range(len(performed))):
        if performed[index][0] is not None:
            yield [*performed[:index], *performed[index + 1 :]]
    for index, (action, answers) in enumerate(performed):
        if action is None:
            continue
        for name in ("tokens", "max_tokens"):
            value = getattr(action, name)
            for smaller in sorted({value // 2, value - 1}):
                if 0 < smaller < value and action.do in _HAS[name]:
                    smaller_one: Performed = (replace(action, **{name: smaller}), answers)
                    yield [*performed[:index], smaller_one, *performed[index + 1 :]]


def _fewer_answers(performed: Sequence[Performed]) -> Iterator[list[Performed]]:
    for index, (action, answers) in enumerate(performed):
        for at in reversed(range(len(answers))):
            fewer = [*answers[:at], *answers[at + 1 :]]
            yield [*performed[:index], (action, fewer), *performed[index + 1 :]]


def _size(outcome: Outcome) -> tuple[int, int, int]:
    """Actions, the numbers in them, events: what is to be small, the most important first."""
    actions = [action for action, _ in outcome.performed if action is not None]
    numbers = sum(action.tokens + action.max_tokens for action in actions)
    return len(actions), numbers, sum(len(answers) for _, answers in outcome.performed)


def _alike(outcome: Outcome) -> Callable[[Outcome], bool]:
    if outcome.corrupt:
        return lambda other: other.corrupt
    if outcome.hazards:
        return lambda other: other.hazards > 0
    kind = outcome.problems[0].split(":")[0] if outcome.problems else ""
    return lambda other: any(problem.startswith(kind) for problem in other.problems)
