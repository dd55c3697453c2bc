"""Adapters of the conformance kit under a release queue, in place of the engine's manager."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from deepinfer.block_manager import BlockManager
from deepinfer.errors import OutOfBlocksError, OwnershipError, UserError
from deepinfer.names import RELEASE_POLICIES
from deepinfer.testing.conformance.managers.own import Own
from deepinfer.testing.conformance.managers.reference import Reference
from deepinfer.testing.oplog.managers import AdaptedBlocks, block_manager
from deepinfer.testing.oplog.replay import Replay, replay_all
from tests.deepinfer.testing.oplog.op_logs import SMALL, TWO_IN_FLIGHT


class Least:
    """The two methods that every adapter has."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks))

    def allocate(self, count: int) -> list[int] | None:
        return [self.free.pop() for _ in range(count)] if count <= len(self.free) else None

    def release(self, table: list[int]) -> None:
        if not table:
            raise RuntimeError("nothing to release")
        self.free += table


class Late(Least):
    """Not installed, as it turns out."""

    def __init__(self, num_blocks: int) -> None:
        raise ImportError("no pool here")


def test_counts_follow_owners_and_fences() -> None:
    """Free, held and withheld add up to the pool whatever is shared and fenced."""
    blocks = AdaptedBlocks(Reference, 5)
    table = blocks.allocate(3)
    blocks.pin(table[:1])
    withheld = blocks.release(table, fenced=True)
    assert (blocks.num_free, blocks.num_held, blocks.num_withheld) == (1, 1, 2)
    blocks.release(table[:1])
    assert (blocks.num_free, blocks.num_held, blocks.num_withheld) == (1, 0, 3)
    blocks.lift(withheld)
    assert (blocks.num_free, blocks.num_held, blocks.num_withheld) == (4, 0, 0)


@pytest.mark.parametrize("policy", RELEASE_POLICIES)
def test_the_reference_replays_like_the_engines_manager(policy: str) -> None:
    """The same ids, so the same figures, under every policy."""
    config = replace(SMALL, release=policy)
    replays = [Replay(config), Replay(config, make_blocks=block_manager("reference"))]
    replay_all(list(enumerate(TWO_IN_FLIGHT)), replays)
    assert replays[0].figures == replays[1].figures
    assert replays[0].stopped == replays[1].stopped


def test_the_variant_asked_for_is_taken() -> None:
    """Of a manager with several, the one with this free order and discipline."""
    make = block_manager("tests.deepinfer.testing.oplog.test_managers:VARIANTS")
    for order in ("forward", "by_id"):
        blocks = make(9, free_order=order, discipline="fifo", seed=0)
        expected = BlockManager(9, free_order=order)
        for pool in (blocks, expected):
            taken = [int(i) for i in pool.allocate(8)]
            pool.release([taken[3], taken[1], taken[6]])
        assert [int(i) for i in blocks.allocate(3)] == expected.allocate(3).tolist()


VARIANTS = tuple(
    type(
        f"Own{order}",
        (Own,),
        {"options": {"free_order": order, "discipline": "fifo"}}
        | {"free_order": order, "discipline": "fifo"},
    )
    for order in ("reverse", "forward", "by_id")
)


@pytest.mark.parametrize(
    ("order", "expected"), [("reverse", [1, 3, 2]), ("forward", [2, 3, 1]), ("by_id", [1, 2, 3])]
)
def test_the_promised_order(order: str, expected: list[int]) -> None:
    """What fences of single blocks are put on one after the other."""
    blocks = AdaptedBlocks(type("Promising", (Least,), {"free_order": order}), 9)
    assert list(blocks.in_free_order([2, 3, 1])) == expected


def test_what_is_not_offered_is_refused_by_name() -> None:
    """Only when it is needed: the least adapter will do for a policy that withholds nothing."""
    blocks = AdaptedBlocks(Least, 5)
    table = blocks.allocate(2)
    for call in (lambda: blocks.pin(table), lambda: blocks.release(table, fenced=True)):
        with pytest.raises(UserError, match=r"Least does not offer '(pin|withhold)'"):
            call()
    assert blocks.num_held == 2
    blocks.release(table)
    assert blocks.num_free == 4


def test_a_refusal_and_an_error_of_the_adapter() -> None:
    """None is too few blocks; whatever is raised is a broken rule, and names the call."""
    blocks = AdaptedBlocks(Least, 5)
    with pytest.raises(OutOfBlocksError, match="Least refuses 5 blocks; 4 are free"):
        blocks.allocate(5)
    with pytest.raises(OwnershipError, match=r"Least\.release: nothing to release"):
        blocks.release([])


def test_a_class_with_the_engines_protocol_is_used_as_it_is() -> None:
    """docs/block-manager.md describes it; it needs no adapter."""
    assert block_manager("deepinfer.block_manager:BlockManager") is BlockManager


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("refrence", "unknown name 'refrence'"),
        ("json:loads", "json:loads"),
        (f"{__name__}:Late", "not available here: no pool here"),
    ],
)
def test_a_name_that_leads_nowhere(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, whether it is unknown, no manager, or not installed."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Late.__module__])
    with pytest.raises(UserError, match=message):
        block_manager(name)
