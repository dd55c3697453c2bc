"""Block ownership: who may pin and release what, and in which order blocks come back."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.block_manager import BlockManager, Verdict
from deepinfer.errors import OutOfBlocksError, OwnershipError, UserError
from deepinfer.free_list import SCALAR_LIMIT
from deepinfer.names import DISCIPLINES, FREE_ORDERS

LONG = SCALAR_LIMIT + 8  # long enough for the paths that use numpy


def snapshot(blocks):
    counts = blocks.ref_counts(np.arange(blocks.num_blocks)).tolist()
    return counts, blocks.free_ids(), blocks.num_free, blocks.num_held, blocks.num_withheld


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_a_new_pool_hands_out_ascending_ids_but_never_block_0(discipline):
    """The first allocations are 1, 2, 3, ... and 0 means "no block"."""
    blocks = BlockManager(6, discipline=discipline)
    assert blocks.allocate(2).tolist() == [1, 2]
    assert blocks.allocate_one() == 3
    assert blocks.allocate(2).tolist() == [4, 5]
    assert blocks.num_free == 0


def test_verdicts_tell_waiting_from_hopeless():
    """LATER may fit when others leave; NEVER exceeds what the pool can ever issue."""
    blocks = BlockManager(8)
    blocks.allocate(4)
    verdicts = [blocks.can_allocate(count) for count in (0, 3, 4, 7, 8)]
    assert verdicts == [Verdict.OK, Verdict.OK, Verdict.LATER, Verdict.LATER, Verdict.NEVER]


@pytest.mark.parametrize(
    ("free_order", "discipline", "free"),
    [
        ("reverse", "fifo", [4, 3, 2, 1]),
        ("forward", "fifo", [4, 1, 2, 3]),
        ("reverse", "lifo", [1, 2, 3, 4]),
        ("forward", "lifo", [3, 2, 1, 4]),
        ("forward", "by_id", [1, 2, 3, 4]),
    ],
)
def test_free_order_and_discipline_decide_the_free_list(free_order, discipline, free):
    """One table joins in the free order, one by one, where the discipline says."""
    blocks = BlockManager(5, free_order=free_order, discipline=discipline)
    blocks.release(blocks.allocate(3))
    assert blocks.free_ids() == free


def test_by_id_order_sorts_a_scattered_table():
    """The order by_id ignores the table's order."""
    blocks = BlockManager(5, free_order="by_id")
    blocks.allocate(4)
    blocks.release([3, 1, 4, 2])
    assert blocks.free_ids() == [1, 2, 3, 4]


def test_shuffled_order_comes_from_the_seed():
    """Equal seeds give equal orders, and the order is not just the table's."""

    def order(seed):
        blocks = BlockManager(40, free_order="shuffled", seed=seed)
        blocks.release(blocks.allocate(39))
        return blocks.free_ids()

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == list(range(1, 40))


@pytest.mark.parametrize("count", [3, LONG])
def test_a_block_is_free_when_its_last_owner_lets_go(count):
    """Pins add owners; each release drops one."""
    blocks = BlockManager(count + 1)
    ids = blocks.allocate(count)
    blocks.pin(ids)
    blocks.release(ids)
    assert blocks.num_free == 0
    assert blocks.ref_counts(ids).tolist() == [1] * count
    blocks.release(ids)
    assert blocks.num_free == count
    blocks.check_integrity()


@pytest.mark.parametrize("padding", [0, LONG])
def test_an_id_named_twice_counts_twice(padding):
    """Pinning or releasing one id twice in a call moves its count by two, short or long."""
    blocks = BlockManager(padding + 3)
    *others, block_id = blocks.allocate(padding + 1).tolist()
    blocks.pin([*others, block_id, block_id])
    assert blocks.ref_count(block_id) == 3
    blocks.release([*others, block_id, block_id])
    assert blocks.ref_count(block_id) == 1
    blocks.release([*others, block_id])
    assert blocks.num_free == blocks.num_usable
    blocks.check_integrity()


@pytest.mark.parametrize("padding", [2, LONG])
@pytest.mark.parametrize("bad", ["free", "withheld", "zero", "negative", "too large", "twice"])
@pytest.mark.parametrize("call", ["pin", "release"])
def test_a_refused_call_changes_nothing(call, bad, padding):
    """A bad id anywhere in the list is refused by name, and no count has moved."""
    blocks = BlockManager(padding + 6)
    good = blocks.allocate(padding).tolist()
    withheld = blocks.allocate_one()
    blocks.release([withheld], fenced=True)
    bad_id = {
        "free": blocks.free_ids()[0],
        "withheld": withheld,
        "zero": 0,
        "negative": -3,
        "too large": blocks.num_blocks,
        "twice": good[0],
    }[bad]
    if bad == "twice" and call == "pin":
        bad_id = blocks.free_ids()[0]  # naming an owned block twice is a valid pin
    before = snapshot(blocks)
    with pytest.raises(OwnershipError, match=f"{call} block {bad_id}"):
        getattr(blocks, call)([*good, bad_id])
    assert snapshot(blocks) == before
    blocks.check_integrity()


def test_allocating_more_than_there_is_changes_nothing():
    """The error says what was asked and what there is."""
    blocks = BlockManager(4)
    blocks.allocate(1)
    before = snapshot(blocks)
    with pytest.raises(OutOfBlocksError, match="asked for 3 blocks, 2 are free"):
        blocks.allocate(3)
    with pytest.raises(OutOfBlocksError):
        blocks.allocate(-1)
    assert snapshot(blocks) == before
    blocks.allocate(2)
    with pytest.raises(OutOfBlocksError):
        blocks.allocate_one()


@pytest.mark.parametrize("count", [2, LONG])
def test_a_fenced_block_is_withheld_until_its_fence_is_lifted(count):
    """Withheld blocks have no owner, cannot be pinned, and are not handed out."""
    blocks = BlockManager(count + 1)
    ids = blocks.release(blocks.allocate(count), fenced=True)
    assert (blocks.num_withheld, blocks.num_held, blocks.num_free) == (count, 0, 0)
    blocks.check_integrity()
    blocks.lift(ids)
    assert (blocks.num_withheld, blocks.num_free) == (0, count)
    blocks.check_integrity()


def test_a_block_with_two_fences_waits_for_both():
    """Each owner that gave a block up behind a fence keeps it back."""
    blocks = BlockManager(2)
    ids = blocks.allocate(1)
    blocks.pin(ids)
    blocks.release(ids, fenced=True)
    assert blocks.num_withheld == 0
    blocks.release(ids, fenced=True)
    blocks.lift([1])
    assert blocks.num_withheld == 1
    blocks.lift([1])
    assert blocks.free_ids() == [1]


@pytest.mark.parametrize("count", [1, LONG])
def test_an_unfenced_release_respects_an_older_fence(count):
    """The last owner may let go without a fence: an older owner's fence still holds the block."""
    blocks = BlockManager(count + 1)
    ids = blocks.allocate(count)
    blocks.pin(ids)
    order = blocks.release(ids, fenced=True)
    blocks.release(ids)
    assert (blocks.num_free, blocks.num_withheld) == (0, count)
    blocks.lift(order)
    assert blocks.num_free == count
    blocks.check_integrity()


def test_lifting_a_fence_nobody_put_changes_nothing():
    """The whole call is refused, also if only its last id is wrong."""
    blocks = BlockManager(5)
    ids = blocks.release(blocks.allocate(2), fenced=True)
    before = snapshot(blocks)
    with pytest.raises(OwnershipError, match="fence of block 4"):
        blocks.lift([*ids, 4])
    assert snapshot(blocks) == before
    blocks.lift(ids)
    blocks.check_integrity()


def test_integrity_check_finds_a_tampered_counter():
    """check_integrity compares with a walk: a wrong counter cannot confirm itself."""
    blocks = BlockManager(5)
    blocks.allocate(2)
    blocks._refs[4] = 1
    with pytest.raises(OwnershipError, match="free list holds"):
        blocks.check_integrity()


@pytest.mark.parametrize(
    "wrong", [{"num_blocks": 1}, {"free_order": "revers"}, {"discipline": "stack"}]
)
def test_bad_settings_are_user_errors(wrong):
    """A pool without usable blocks or with an unknown name is refused by key."""
    with pytest.raises(UserError, match=next(iter(wrong))):
        BlockManager(**{"num_blocks": 4, **wrong})


@settings(max_examples=150, deadline=None)
@given(
    free_order=st.sampled_from(FREE_ORDERS),
    discipline=st.sampled_from(DISCIPLINES),
    sizes=st.lists(st.integers(1, LONG), min_size=1, max_size=4),
    data=st.data(),
)
def test_immediate_and_withheld_paths_leave_the_same_free_order(
    free_order, discipline, sizes, data
):
    """A pool that frees at once and one that withholds first hand out the same ids afterwards."""
    pools = [
        BlockManager(sum(sizes) + 3, free_order=free_order, discipline=discipline, seed=5)
        for _ in range(2)
    ]
    at_once, waiting = pools
    tables = [[pool.allocate(size) for size in sizes] for pool in pools]
    shared = data.draw(st.lists(st.integers(0, len(sizes) - 1), unique=True))
    for pool, own in zip(pools, tables, strict=True):
        for index in shared:
            pool.pin(own[index])
    as_list = data.draw(st.booleans())
    order = data.draw(st.permutations(range(len(sizes))))
    entries = []
    for index in order:
        at_once_table, waiting_table = tables[0][index], tables[1][index]
        assert at_once_table.tolist() == waiting_table.tolist()
        at_once.release(at_once_table.tolist() if as_list else at_once_table)
        entries.append(waiting.release(waiting_table, fenced=True))
        waiting.check_integrity()
    for ids in entries:
        waiting.lift(ids)
    assert waiting.free_ids() == at_once.free_ids()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_counts_follow_a_plain_counter(data):
    """Random allocate, pin, release and lift, short and long, keep every count as counted here."""
    blocks = BlockManager(2 * LONG)
    owners: Counter[int] = Counter()
    fences: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 20))):
        held = sorted(b for b, count in owners.items() if count)
        some = data.draw(st.lists(st.sampled_from(held), max_size=LONG)) if held else []
        match data.draw(st.sampled_from(["allocate", "pin", "release", "withhold", "lift"])):
            case "allocate":
                count = data.draw(st.integers(0, blocks.num_free))
                owners.update(blocks.allocate(count).tolist())
            case "pin":
                blocks.pin(some)
                owners.update(some)
            case "lift":
                if fences:
                    blocks.lift(fences.pop(0))
            case verb:
                given_up = Counter(some) & owners
                ids = blocks.release(list(given_up.elements()), fenced=verb == "withhold")
                owners -= given_up
                if verb == "withhold":
                    fences.append(list(ids))
        counts = blocks.ref_counts(np.arange(blocks.num_blocks)).tolist()
        assert counts == [owners[b] for b in range(blocks.num_blocks)]
        fenced = {b for ids in fences for b in ids}
        assert blocks.num_withheld == sum(not owners[b] for b in fenced)
        blocks.check_integrity()
