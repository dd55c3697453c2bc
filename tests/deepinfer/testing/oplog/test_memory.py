"""Names in rows: a write, a copy and a read that is right or not."""

from __future__ import annotations

import numpy as np

from deepinfer.observer import KV, STATE
from deepinfer.testing.oplog.memory import BlockRows, ReplayMemory
from deepinfer.testing.oplog.operations import Allocate, Copy, Submit

ALL = 0b1111


def test_a_write_replaces_the_names_of_its_rows_only() -> None:
    """Two owners of one place, one after the other, each with its rows."""
    rows = BlockRows(2)
    rows.write(1, ALL, 7)
    rows.write(1, 0b0011, 8)
    assert rows.has(1, 0b0011, 8)
    assert rows.has(1, 0b1100, 7)
    assert not rows.has(1, 0b0110, 8)
    assert sorted(rows.names(1, ALL)) == [7, 8]
    rows.write(1, ALL, 8)
    assert rows.names(1, ALL) == [8]


def test_a_copy_renames_what_was_right_and_keeps_what_was_not() -> None:
    """Rows of another block stay that block's in the copy."""
    rows = BlockRows(3)
    rows.write(1, ALL, 7)
    rows.write(1, 0b1000, 9)
    rows.copy([(1, 7, 2, 8)])
    assert rows.has(2, 0b0111, 8)
    assert rows.has(2, 0b1000, 9)


def test_copies_of_one_operation_read_before_they_write() -> None:
    """A chain 1 -> 2 -> 3 in one operation moves the old rows of 2."""
    rows = BlockRows(4)
    rows.write(1, ALL, 11)
    rows.write(2, ALL, 12)
    rows.copy([(1, 11, 2, 21), (2, 12, 3, 22)])
    assert rows.has(2, ALL, 21)
    assert rows.has(3, ALL, 22)


def test_a_step_may_read_what_it_writes_and_nothing_else_that_is_not_there() -> None:
    """One sentence for each block that does not hold what it must."""
    wrong: list[str] = []
    memory = ReplayMemory(4, 4, wrong.append)
    memory.add(Allocate((1, 2), (3, 1), (("r", "admit", 1),)), [3, 1])
    memory.work(Submit("compute", "one", ((1, 0, 2),), ((1, 0, 2),)))()
    assert wrong == []
    memory.work(Submit("load", "two", (), ((2, 0, None),)))()
    memory.add(Allocate((3,), (3,)), [3])
    memory.work(Submit("load", "", (), ((3, 0, 1),)))()
    memory.work(Submit("compute", "three", ((1, 0, 2), (2, 0, 4), (1, 3, 4))))()
    assert wrong == [
        "three on compute reads a1 of r in block 3 and finds a3",
        "three on compute reads a1 of r in block 3 and finds rows that nobody wrote",
    ]


def test_copying_follows_the_places() -> None:
    """A copy of the log goes from where the source is to where the new block is."""
    wrong: list[str] = []
    memory = ReplayMemory(4, 4, wrong.append)
    memory.add(Allocate((1, 2), (3, 1)), [3, 1])
    memory.work(Submit("compute", "one", (), ((1, 0, None),)))()
    memory.copying(Copy("copy", (1,), (2,)))()
    memory.work(Submit("compute", "two", ((2, 0, None),)))()
    assert wrong == []


def test_a_step_goes_on_from_the_state_it_finds() -> None:
    """A slot is read before it is written: the first step of its owner finds none, a later one, or
    one behind a copy, must find its own."""
    wrong: list[str] = []
    memory = ReplayMemory(4, 4, wrong.append, num_slots=3)
    memory.add(Allocate((1,), (1,), pool="states"), [1])
    slot = ((1, 0, None),)
    memory.work(Submit("compute", "first", slot, slot))()
    memory.work(Submit("compute", "second", slot, slot))()
    assert wrong == []
    memory.add(Allocate((2,), (1,), (("r", "admit", 1),), pool="states"), [1])  # the same place
    other = ((2, 0, None),)
    memory.work(Submit("compute", "other's first", other, other))()
    assert wrong == []
    memory.work(Submit("compute", "third", slot, slot))()
    assert wrong == ["third on compute reads a1 in state slot 1 and finds a2 of r"]
    memory.add(Allocate((3,), (2,), pool="states"), [2])
    memory.copying(Copy("copy", (2,), (3,)))()  # of a slot that is the first owner's again
    copied = ((3, 0, None),)
    memory.work(Submit("compute", "fork", copied, copied))()
    assert wrong[1:] == ["fork on compute reads a3 in state slot 2 and finds a1"]


def test_slots_are_accesses_of_their_own() -> None:
    """By their ids in their pool; a block of the same id stays a block."""
    memory = ReplayMemory(4, 4, lambda message: None, num_slots=3)
    memory.add(Allocate((1,), (2,)), [2])
    memory.add(Allocate((2,), (2,), pool="states"), [2])
    state, kv = memory.accesses(((1, 0, None), (2, 0, None)))
    assert (state.kind, state.ids.tolist(), state.start) == (STATE, [2], None)
    assert (kv.kind, kv.ids.tolist()) == (KV, [2])
    assert memory.places((2,)) == memory.places((1,)) == [2]


def test_accesses_are_of_places() -> None:
    """Whoever watches the device sees ids and rows, and steps of the other kinds."""
    memory = ReplayMemory(4, 4, lambda message: None)
    memory.add(Allocate((1, 2), (3, 1)), [3, 1])
    number, kv = memory.accesses((("staging", 5), (1, 0, None), (2, 1, 3)))
    assert (number.kind, number.ids.tolist()) == ("staging", [5])
    assert kv.ids.tolist() == [3, 1]
    assert np.array_equal(kv.start, [0, 1])
    assert np.array_equal(kv.end, [4, 3])
    assert memory.whole((2,)).ids.tolist() == [1]
