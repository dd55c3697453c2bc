"""Choosers: every order there is, a random one, or one from a record.

`EveryOrder` answers run after run, depth first, until all orders that differ in anything have been
run. Two orders differ if the host saw something else, or two conflicting operations ran the other
way round. It leaves out the rest in two ways, both exact:

- nothing runs before somebody looks or waits for it, and then only what the event needs and what
  conflicts with that (`ChoiceDevice.rivals`);
- of two operations that do not conflict only one order is run: what was tried first at a point
  sleeps in the branches beside it, until something that conflicts with it has run (sleep sets,
  Godefroid, "Partial-Order Methods for the Verification of Concurrent Systems", 1996).

Knows no block and no request. Invariant: the same answers lead to the same questions, so a run is
repeated by its answers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.testing.explorer.choices import NOT_YET, ChoiceDevice, Op, Question

Sleeping = dict[tuple[str, int], Op]


class Redundant(Exception):
    """The run so far is the beginning of nothing but orders that were run already."""


@dataclass(slots=True)
class _Branch:
    """A question, and which of its answers is being run."""

    answers: list[str]
    ops: list[Op | None]  # what each answer runs
    asleep: Sleeping  # before the question
    index: int = 0


class EveryOrder:
    """Answers so that each run differs from all before, until there are no more.

    Args:
        reduce: leave out orders that differ in nothing; without it every answer to every question
            is run.

    Attributes:
        num_redundant: runs given up because they could only repeat others.
    """

    def __init__(self, *, reduce: bool = True) -> None:
        self.num_redundant = 0
        self._reduce = reduce
        self._path: list[_Branch] = []
        self.begin()

    def begin(self) -> None:
        """A run begins."""
        self._depth = 0
        self._asleep: Sleeping = {}

    def next(self) -> bool:
        """Turn to the next order; False if there is none."""
        while self._path:
            branch = self._path[-1]
            branch.index += 1
            if branch.index < len(branch.answers):
                self.begin()
                return True
            self._path.pop()
        return False

    def choose(self, device: ChoiceDevice, question: Question) -> str:
        """See `Chooser`. Raises Redundant if every answer would repeat an earlier run."""
        if self._depth == len(self._path):
            answers, ops = self._options(device, question)
            if not answers:
                self.num_redundant += 1
                raise Redundant
            self._path.append(_Branch(answers, ops, self._asleep))
        branch = self._path[self._depth]
        self._depth += 1
        self._asleep = branch.asleep
        if branch.index:
            tried = [op for op in branch.ops[: branch.index] if op is not None]
            self._asleep = {**branch.asleep, **{(op.stream, op.ticket): op for op in tried}}
        return self._go(branch.answers[branch.index], branch.ops[branch.index])

    def pick(self, names: Sequence[str]) -> str:
        """See `Chooser`."""
        if self._depth == len(self._path):
            self._path.append(_Branch(list(names), [], self._asleep))
        branch = self._path[self._depth]
        self._depth += 1
        return branch.answers[branch.index]

    def _go(self, answer: str, op: Op | None) -> str:
        if op is None:
            self._asleep = {}  # the answer may depend on any of them
        elif self._asleep:
            self._asleep = {
                key: other
                for key, other in self._asleep.items()
                if other.stream != op.stream and not other.conflicts(op)
            }
        return answer

    def _options(
        self, device: ChoiceDevice, question: Question
    ) -> tuple[list[str], list[Op | None]]:
        needed = question.needed
        if not self._reduce:
            ops = [device.next_op(name) for name in device.runnable()]
        elif needed is None:
            return [NOT_YET], [None]
        else:
            ops = device.rivals(needed)
            ops = [op for op in ops if (op.stream, op.ticket) not in self._asleep]
        answers: list[str] = [op.stream for op in ops]
        may_refuse = question.may_refuse and not (self._reduce and question.started)
        if may_refuse:
            return [NOT_YET, *answers], [None, *ops]
        return answers, list(ops)


class AnyOrder:
    """Random answers."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, device: ChoiceDevice, question: Question) -> str:
        """See `Chooser`."""
        if question.may_refuse and self._rng.random() < 0.5:
            return NOT_YET
        return self._rng.choice(device.runnable())

    def pick(self, names: Sequence[str]) -> str:
        """See `Chooser`."""
        return self._rng.choice(names)


class Recorded:
    """Answers from a record; where that ends or does not fit, what is needed and no more.

    Attributes:
        answers: those to give, first one first; may be set anew before every action.
    """

    def __init__(self) -> None:
        self.answers: Sequence[str] = ()

    def choose(self, device: ChoiceDevice, question: Question) -> str:
        """See `Chooser`."""
        answer = NOT_YET
        if self.answers:
            answer, self.answers = self.answers[0], self.answers[1:]
        if answer in device.runnable():
            return answer
        if question.may_refuse:
            return NOT_YET
        assert question.needed is not None, "a pause may be refused"
        return question.needed.stream

    def pick(self, names: Sequence[str]) -> str:
        """See `Chooser`; a record has one track."""
        return names[0]
