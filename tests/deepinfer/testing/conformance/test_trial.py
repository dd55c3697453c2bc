"""A trial by hand: calls, what they are called, and when a finding counts."""

from __future__ import annotations

import pytest

from deepinfer.testing.conformance.invariants import INVARIANTS
from deepinfer.testing.conformance.managers.reference import Reference
from deepinfer.testing.conformance.trial import CutShort, Trial, Violation
from tests.deepinfer.testing.conformance import broken_managers as broken

BY_NAME = {invariant.name: invariant for invariant in INVARIANTS}


def test_calls_read_as_a_program():
    """Answers get letters; parts of an allocation are slices of its letter, however cut."""
    trial = Trial(Reference, BY_NAME["drained pool"], 6)
    trial.allocate(4)
    trial.release(0, 1, 2)
    trial.pin(1, 0, 1)
    trial.withhold(0, 0, 1)
    trial.lift(0)
    assert trial.calls == [
        "a = allocate(4)",
        "release(a[1:2])",
        "pin(a[2:3])",
        "b = withhold(a[:1])",
        "lift(b)",
    ]
    trial.drain()
    assert trial.calls[-1] == "[allocate(1) for _ in range(6)]"


def test_a_finding_of_another_invariant_ends_the_trial():
    """A double allocation is a violation for `one owner`, and for `fence` only an end."""
    for name, error in (("one owner", Violation), ("fence", CutShort)):
        trial = Trial(broken.KeepsTheLast, BY_NAME[name], 3)
        trial.allocate(2)
        with pytest.raises(error, match="handed out 2, which has an owner"):
            trial.allocate(1)


@pytest.mark.parametrize("answer", [["b1"], [None], 7])
def test_an_answer_without_ids_is_a_finding(answer):
    """What is no list of numbers breaks `block zero`, and ends the trials of all others."""

    class Mumbles(Reference):
        def allocate(self, count):
            return answer

    for name, error in (("block zero", Violation), ("fence", CutShort)):
        with pytest.raises(error, match="no list of ids"):
            Trial(Mumbles, BY_NAME[name], 3).allocate(1)


def test_an_illegal_release_must_change_nothing():
    """Refused is fine; accepted with a count changed is a violation that names the count."""
    trial = Trial(Reference, BY_NAME["second release"], 3)
    trial.allocate(1)
    trial.release(0, 0, 1)
    trial.release_again(trial.without_owner()[0])
    trial = Trial(broken.ReleasesTwice, BY_NAME["second release"], 3)
    trial.allocate(1)
    trial.release(0, 0, 1)
    with pytest.raises(Violation, match=r"num_free\(\) went from 2 to 3"):
        trial.release_again(trial.without_owner()[0])


def test_a_block_named_twice_may_be_pinned_twice():
    """vllm#42571: with two owners it is freed once; with one it is refused, or freed once."""
    trial = Trial(Reference, BY_NAME["named twice"], 3)
    trial.allocate(1)
    trial.release_twice(0)  # refused
    assert len(trial.tables) == 1
    trial.pin(0, 0, 1)
    trial.release_twice(0)
    assert trial.tables == []
    trial.drain()


def test_a_look_that_raises_is_a_difference():
    """A manager that cannot even be looked at after an illegal call has been changed by it."""

    class FallsOver(Reference):
        over = False

        def release(self, table):
            self.over = not self.owners[table[0]]
            super().release(table)

        def num_free(self):
            if self.over:
                raise KeyError("list")
            return super().num_free()

    trial = Trial(FallsOver, BY_NAME["second release"], 2)
    trial.allocate(1)
    trial.release(0, 0, 1)
    with pytest.raises(Violation, match=r"num_free\(\) went from 1 to KeyError: 'list'"):
        trial.release_again(trial.without_owner()[0])
