"""The checkers' own books."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.checks.ledger import Ledger, OwnerNames
from tests.deepinfer.checks.books import RunningHost


@pytest.fixture
def ledger():
    ledger = Ledger()
    ledger.bind(RunningHost())
    return ledger


def test_owners_and_fences_are_counted(ledger):
    """As often as an id is named."""
    ledger.allocated([1, 2])
    ledger.pinned([2, 2])
    ledger.released([1, 2], [2, 1], True)
    ledger.released([2], [2], True)
    assert ledger.refs.tolist()[:4] == [0, 0, 1, 0]
    assert ledger.fences.tolist()[:4] == [0, 1, 2, 0]
    ledger.lifted([2, 1])
    assert ledger.fences.tolist()[:4] == [0, 0, 1, 0]


def test_an_epoch_begins_when_a_block_is_handed_out(ledger):
    """And the release that ended the one before is remembered with it."""
    ledger.allocated([3])
    ledger.giving_up([3], 7, "a", "abort")
    ledger.released([3], [3], True)
    assert ledger.let_go[3] is None
    ledger.allocated([3])
    ledger.giving_up([3], None, "b", "finish")
    assert ledger.epochs[3] == 2
    assert str(ledger.let_go[3]) == "given up by 'a' (abort) behind step 7, withheld for it"
    assert str(ledger.releases[3]) == "given up by 'b' (finish) with nothing in flight"


def test_what_makes_no_sense_leaves_the_books_in_order(ledger):
    """Counts stop at 0, ids that are no block are left out."""
    ledger.allocated([0, -1, 9, 8])
    ledger.released([8], [8], False)
    ledger.released([8, 99], [99, 8], False)
    ledger.lifted([8])
    assert not ledger.refs.any()
    assert not ledger.fences.any()
    assert np.flatnonzero(ledger.epochs).tolist() == [8]


def test_a_release_past_the_queue_has_no_name(ledger):
    """It is not put down to whoever released the block before."""
    ledger.allocated([1])
    ledger.giving_up([1], 2, "a", "finish")
    ledger.released([1], [1], True)
    ledger.allocated([1])
    ledger.released([1], [1], False)
    assert str(ledger.releases[1]).startswith("given up by 'somebody'")


def test_names_come_with_taking_and_go_with_giving_up(ledger):
    """A new epoch begins without names."""
    ledger.allocated([1, 2])
    ledger.took("a", [1, 2], "admit")
    ledger.forked("b", "a", [2])
    assert ledger.names.of(np.array([1, 2, 3])) == {1: "'a'", 2: "'a' and 'b'"}
    ledger.giving_up([2], None, "a", "shrink")
    assert ledger.names.of(np.array([1, 2])) == {1: "'a'", 2: "'b'"}
    ledger.allocated([2])
    assert ledger.names.of(np.array([1, 2])) == {1: "'a'"}


def test_any_number_of_owners_have_names():
    """The table of names grows, and keeps what it holds."""
    names = OwnerNames(8)
    for number in range(100):
        names.add(f"r{number}", np.array([number % 8]))
    slots = np.array([names.slot(f"r{number}") for number in range(100)])
    ids = np.arange(100) % 8
    assert names.hold(slots, ids).all()
    assert not names.hold(slots, (ids + 1) % 8).any()
    assert names.counts.sum() == 100


def test_nobody_holds_nothing():
    """Neither an unknown owner nor one that let everything go."""
    names = OwnerNames(8)
    names.add("a", np.array([1, 2]))
    names.drop("a", np.array([1, 2]))
    names.drop("b", np.array([1]))
    slots = np.array([names.slot(owner) for owner in ("a", "b", None)])
    assert slots.tolist() == [-1, -1, -1]
    assert not names.hold(slots, np.array([1, 1, 1])).any()
