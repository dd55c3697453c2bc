"""The kit finds what it is for: every invariant can fail, and by a short program."""

from __future__ import annotations

import pytest

from deepinfer.testing.conformance import checking as conformance
from deepinfer.testing.conformance.checking import (
    FAILS,
    HOLDS,
    NOT_OFFERED,
    UNCLEAR,
    check,
    check_all,
)
from deepinfer.testing.conformance.invariants import INVARIANTS
from deepinfer.testing.conformance.managers.reference import Reference
from tests.deepinfer.testing.conformance import broken_managers as broken

BY_NAME = {invariant.name: invariant for invariant in INVARIANTS}
FOUND = [  # a manager, the invariant it breaks, and how many calls show it
    (broken.HandsOutBlockZero, "block zero", 2),
    (broken.KeepsTheLast, "one owner", 4),
    (broken.ForgetsPins, "shared block", 4),
    (broken.CountsOwnersUpToTwo, "owner count", 3),
    (broken.OneShort, "free set", 2),
    (broken.FreesWithFenceAndAgain, "no duplicate", 3),
    (broken.CountsOnItsOwn, "counter", 3),
    (broken.LeaksOnLift, "drained pool", 4),
    (broken.IgnoresFences, "fence", 3),
    (broken.FreesWithFenceAndAgain, "fence", 3),
    (broken.OneFenceForAll, "two fences", 6),
    (broken.ReleasesTwice, "second release", 3),
    (broken.RefusesHalfway, "second release", 5),
    (broken.Bare, "second release", 5),
    (broken.TwoPasses, "named twice", 3),
    (broken.Bare, "named twice", 4),
    (broken.PinsAnything, "pin of a free block", 3),
    (broken.TakesThenRefuses, "refused allocation", 1),
    (broken.WantsPinsUndone, "accepted", 3),
    (broken.WantsARun, "scattered blocks", 5),
    (broken.ForgetsBlockZero, "capacity", 1),
    (broken.KeepsOneBack, "one formula", 2),
    (broken.PromisesLifo, "discipline", 4),
    (broken.PromisesForward, "free order", 3),
    (broken.OtherOrderOnLift, "order behind a fence", 4),
]


def programs(outcomes):
    """Name of each invariant that fails, and its program."""
    return {o.invariant.name: o.program for o in outcomes if o.verdict == FAILS}


@pytest.mark.parametrize(
    ("manager", "name", "num_calls"), FOUND, ids=[f"{m.__name__}-{name}" for m, name, _ in FOUND]
)
def test_a_bug_is_found_and_shrunk(manager, name, num_calls):
    """The invariant fails, and the program that shows it is as short as it can be."""
    outcome = check((manager,), BY_NAME[name])
    assert outcome.verdict == FAILS
    assert len(outcome.calls) <= num_calls, outcome.program
    assert outcome.detail.startswith(outcome.calls[-1])


def test_every_invariant_can_fail():
    """The list above leaves none out."""
    assert {name for _, name, _ in FOUND} == BY_NAME.keys()


def test_a_manager_without_bugs_holds_everything():
    """No false alarm on the plain one, and nothing unclear."""
    assert {o.verdict for o in check_all((Reference,), examples=20)} == {HOLDS}


@pytest.mark.parametrize(
    ("manager", "blamed"),
    [(broken.CountsOnItsOwn, "counter"), (broken.ForgetsBlockZero, "capacity")],
    ids=["CountsOnItsOwn", "ForgetsBlockZero"],
)
def test_one_bug_is_not_blamed_on_everything(manager, blamed):
    """Only the invariant that speaks of it fails; the others hold."""
    outcomes = check_all((manager,), examples=20)
    assert programs(outcomes).keys() == {blamed}
    assert {o.verdict for o in outcomes} == {FAILS, HOLDS}


def test_the_program_is_what_would_be_typed():
    """Allocations have names, parts of tables are slices, and it runs against the manager."""
    outcome = check((broken.ForgetsPins,), BY_NAME["shared block"])
    assert outcome.program == "a = allocate(1); pin(a); release(a); b = allocate(1)"
    pool = broken.ForgetsPins(2)
    names = {"allocate": pool.allocate, "pin": pool.pin, "release": pool.release}
    for call in outcome.calls:
        exec(call, names)
    assert names["a"] == names["b"] == [1]


def test_the_same_adapter_gives_the_same_outcomes():
    """Nothing is drawn from the clock, the process or an earlier run."""
    invariants = [BY_NAME["second release"], BY_NAME["named twice"]]
    once = programs(check_all((broken.ReleasesTwice,), invariants, examples=40))
    assert once
    assert programs(check_all((broken.ReleasesTwice,), invariants, examples=40)) == once


def test_what_is_not_there_is_not_offered():
    """An adapter of two methods is asked only what can be seen through them; the rest is named."""
    outcomes = {o.invariant.name: o for o in check_all((broken.Bare,), examples=10)}
    missing = {name: o.detail for name, o in outcomes.items() if o.verdict == NOT_OFFERED}
    assert missing["two fences"] == "no pin, withhold, lift"
    assert missing["counter"] == "no num_free, free_ids"
    assert outcomes.keys() - missing.keys() == {
        *("block zero", "one owner", "drained pool", "second release", "named twice"),
        *("refused allocation", "accepted", "scattered blocks"),
    }


def test_runs_that_another_bug_ended_prove_nothing():
    """A manager that breaks down in the middle is `unclear` on the rest, not `holds`."""

    class RaisesOnRelease(Reference):
        def release(self, table):
            raise RuntimeError("broken")

    outcome = check((RaisesOnRelease,), BY_NAME["one owner"], examples=40)
    assert outcome.verdict == UNCLEAR
    assert "RuntimeError: broken" in outcome.detail


def test_a_variant_with_a_bug_is_found_among_others():
    """Several classes are one manager: it fails where one of them does."""
    family = (Reference, Reference, broken.ForgetsBlockZero)
    assert check(family, BY_NAME["capacity"]).verdict == FAILS


def test_variants_that_offer_less_do_not_hide_the_others():
    """An invariant is run on those that offer it."""
    assert check((broken.Bare, broken.ForgetsBlockZero), BY_NAME["capacity"]).verdict == FAILS


def test_a_manager_that_is_not_deterministic_is_told_so():
    """A failure that cannot be repeated fails without a program."""

    class Moody(Reference):
        made = 0

        def __init__(self, num_blocks):
            super().__init__(num_blocks)
            Moody.made += 1
            self.number = Moody.made

        def can_allocate(self, count):
            return "NEVER" if self.number in range(5, 9) else super().can_allocate(count)

    outcome = check((Moody,), BY_NAME["capacity"])
    assert (outcome.verdict, outcome.calls) == (FAILS, ())
    assert "twice" in outcome.detail


def test_large_tables_are_tried_too():
    """A bug beyond 32 blocks, where managers may take another path, is found."""

    class LongTablesLeak(Reference):
        def release(self, table):
            super().release(table[:32])

    assert check((LongTablesLeak,), BY_NAME["drained pool"]).verdict == FAILS


def test_the_machine_is_a_test_case():
    """`machine_for(...).TestCase` runs under unittest."""
    machine = conformance.machine_for((Reference,), BY_NAME["one owner"])
    case = machine.TestCase()
    case.settings = conformance._settings(5)
    case.runTest()
