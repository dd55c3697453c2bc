"""A pool that keeps keys: what is found, what is evicted when, and that owners stay right."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.block_manager import BlockManager
from deepinfer.errors import OutOfBlocksError, OwnershipError, UserError
from deepinfer.free_list import SCALAR_LIMIT
from deepinfer.names import FREE_ORDERS, KEYED_FREE_ORDERS
from deepinfer.prefix_cache import CachingBlockManager, chain
from deepinfer.release import Fence, ReleaseQueue

LONG = SCALAR_LIMIT + 8
ALL_ORDERS = (*FREE_ORDERS, *KEYED_FREE_ORDERS)


class OpenEvent:
    """An event that has not happened yet."""

    done = False

    def query(self):
        return self.done

    def synchronize(self, timeout_s=None):
        self.done = True


def published(blocks, keys):
    """A table of new blocks that hold `keys`, each behind the one before."""
    table = blocks.allocate(len(keys)).tolist()
    for block_id, key, parent in zip(table, keys, [None, *keys], strict=False):
        assert blocks.publish(block_id, key, parent)
    return table


def evictions(blocks):
    counters = blocks.counters
    return counters.num_evicted_head, counters.num_evicted_middle, counters.num_evicted_tail


# -- keys ----------------------------------------------------------------------------------------


def test_a_chained_hash_is_what_its_docstring_says():
    """BLAKE2b-128 over the parent's digest and 8 bytes a token, keyed with the salt."""
    first = chain(None, [7, 8], b"lora-3")
    plain = hashlib.blake2b(bytes(16) + struct.pack("<2q", 7, 8), digest_size=16, key=b"lora-3")
    assert first == int.from_bytes(plain.digest(), "little")
    second = chain(first, np.array([9, 10], np.int32), b"lora-3")
    own = plain.digest() + struct.pack("<2q", 9, 10)
    expected = hashlib.blake2b(own, digest_size=16, key=b"lora-3").digest()
    assert second == int.from_bytes(expected, "little")


def test_tokens_parent_and_salt_all_make_another_key():
    """The same block behind another prefix, or under another salt, is another block."""
    keys = [chain(None, [1, 2]), chain(None, [2, 1]), chain(5, [1, 2]), chain(None, [1, 2], b"x")]
    assert len(set(keys)) == 4


def test_a_salt_that_is_too_long_is_refused():
    """BLAKE2b takes 64 bytes."""
    chain(None, [1], bytes(64))
    with pytest.raises(UserError, match="salt: 65 bytes; at most 64"):
        chain(None, [1], bytes(65))


# -- hits ----------------------------------------------------------------------------------------


def test_a_match_ends_at_the_first_hole_and_at_most():
    """What lies behind a block that is gone cannot be hit, nor more than was asked for."""
    blocks = CachingBlockManager(8)
    a, b = published(blocks, "ab")
    published(blocks, "d")
    assert blocks.match("abcd", 4) == [a, b]
    assert blocks.match("abcd", 1) == [a]
    assert blocks.match("xab", 3) == []
    assert blocks.num_cached == 3
    assert blocks.key_of(b) == "b"


def test_a_free_block_that_is_hit_leaves_the_middle_of_the_free_list():
    """It gains its owner there, the others keep their order, and nobody is handed it."""
    blocks = CachingBlockManager(6)
    table = published(blocks, "abc")
    blocks.release(table)
    assert blocks.free_ids() == [4, 5, 3, 2, 1]
    hits = blocks.match("ab", 2)
    assert blocks.num_free_among(hits) == 2
    blocks.take_hits(hits)
    assert blocks.free_ids() == [4, 5, 3]
    assert [blocks.ref_count(i) for i in hits] == [1, 1]
    assert blocks.num_free_among(hits) == 0
    assert blocks.counters.num_hits == 2
    blocks.check_integrity()


def test_a_withheld_block_that_is_hit_stays_owned_when_its_fence_is_lifted():
    """It is withheld no more, joins no free list, and its neighbour does."""
    blocks = CachingBlockManager(6)
    fenced = blocks.release(published(blocks, "ab"), fenced=True)
    hit = blocks.match("a", 1)
    assert blocks.num_free_among(hit) == 0
    blocks.take_hits(hit)
    assert (blocks.num_withheld, blocks.num_held, blocks.num_free) == (1, 1, 3)
    blocks.check_integrity()
    blocks.lift(fenced)
    assert (blocks.num_withheld, blocks.num_held) == (0, 1)
    assert blocks.free_ids() == [3, 4, 5, 2]
    blocks.release(hit)
    assert blocks.free_ids() == [3, 4, 5, 2, 1]
    blocks.check_integrity()


def test_a_withheld_block_given_up_again_waits_for_both_fences():
    """Hit while withheld and released behind a second fence, it is free after the last of them."""
    blocks = CachingBlockManager(3)
    first = blocks.release(published(blocks, "a"), fenced=True)
    blocks.take_hits([1])
    second = blocks.release([1], fenced=True)
    blocks.lift(first)
    assert (blocks.num_withheld, blocks.free_ids()) == (1, [2])
    blocks.lift(second)
    assert (blocks.num_withheld, blocks.free_ids()) == (0, [2, 1])
    blocks.check_integrity()


def test_the_next_writer_still_waits_for_a_fence_that_a_hit_outlived():
    """Under `ordered` a hit reads at once; the tag stays for whoever is handed the block."""
    blocks = CachingBlockManager(3)
    queue = ReleaseQueue(blocks, "ordered")
    fence = Fence(1, OpenEvent())
    queue.give_up(published(blocks, "a"), fence)
    blocks.take_hits(blocks.match("a", 1))
    queue.give_up([1])
    ids = blocks.allocate(2)
    assert queue.fences_before_writing(ids) == [fence]


def test_hits_in_the_free_list_are_not_free_for_anything_else():
    """vllm#6849 at the pool: 8 free, 2 of them hits, leave 6 for what is not cached."""
    blocks = CachingBlockManager(9)
    queue = ReleaseQueue(blocks, "step")
    queue.give_up(published(blocks, "ab"))
    hits = blocks.match("ab", 2)
    assert queue.make_room(6 + blocks.num_free_among(hits))
    assert not queue.make_room(7 + blocks.num_free_among(hits))


def test_a_pin_is_on_the_block_and_not_on_what_it_holds():
    """TensorRT-LLM#12648: the same content in two blocks has two owners' counts."""
    blocks = CachingBlockManager(4)
    (found,) = published(blocks, "h")
    blocks.release([found])
    (private,) = blocks.allocate(1).tolist()
    assert not blocks.publish(private, "h")
    blocks.pin([private])
    blocks.release([private])
    assert (blocks.ref_count(private), blocks.ref_count(found)) == (1, 0)
    blocks.release([private])
    assert blocks.free_ids().count(private) == 1
    blocks.check_integrity()


def test_two_who_computed_the_same_block_share_one():
    """mini-sglang#142: the second finds the first's, and its own copy is free without a key."""
    blocks = CachingBlockManager(5)
    first, second = blocks.allocate(2).tolist()
    assert blocks.publish(first, "h")
    assert not blocks.publish(second, "h")
    kept = blocks.match("h", 1)
    blocks.take_hits(kept)
    blocks.release([second])
    assert kept == [first]
    assert blocks.ref_count(first) == 2
    assert blocks.key_of(second) is None
    assert blocks.free_ids() == [3, 4, second]


def test_publishing_again_changes_nothing():
    """The same key on the same block is there already."""
    blocks = CachingBlockManager(3)
    published(blocks, "a")
    assert blocks.publish(1, "a")
    assert blocks.counters.num_published == 1
    blocks.check_integrity()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.publish(3, "c"), "cannot publish block 3: it is free"),
        (lambda b: b.publish(1, "c"), "cannot publish block 1: it has another key"),
        (lambda b: b.publish(0, "c"), "cannot publish block 0: ids run from 1 to 3"),
        (lambda b: b.take_hits([1, 2]), "cannot hit block 2: it has no key"),
        (lambda b: b.take_hits([1, 9]), "cannot hit block 9: ids run from 1 to 3"),
    ],
)
def test_a_refused_call_changes_nothing(call, message):
    """What nobody owns, has another key, no key or no such id is refused by name."""
    blocks = CachingBlockManager(4)
    published(blocks, "a")
    blocks.allocate_one()
    with pytest.raises(OwnershipError, match=message):
        call(blocks)
    assert [blocks.ref_count(i) for i in range(4)] == [0, 1, 1, 0]
    assert (blocks.num_cached, blocks.counters.num_hits) == (1, 0)
    blocks.check_integrity()


# -- evictions -----------------------------------------------------------------------------------


def test_a_block_handed_out_again_holds_nothing():
    """nano-vllm#163: X, then Y in X's block, then X again finds nothing."""
    blocks = CachingBlockManager(2)
    blocks.release(published(blocks, "x"))
    assert blocks.match("x", 1) == [1]
    blocks.release(published(blocks, "y"))
    assert blocks.match("x", 1) == []
    assert blocks.match("y", 1) == [1]


def test_what_was_found_may_be_gone_when_it_is_wanted():
    """vllm#17305: a match keeps nothing, so it is made again when the request is admitted."""
    blocks = CachingBlockManager(3)
    blocks.release(published(blocks, "ab"))
    assert len(blocks.match("ab", 2)) == 2
    blocks.release(blocks.allocate(2))
    assert blocks.match("ab", 2) == []


@pytest.mark.parametrize(
    ("free_order", "hits", "evicted"), [("reverse", 2, (0, 0, 1)), ("forward", 0, (1, 0, 0))]
)
def test_last_block_first_keeps_what_can_be_hit(free_order, hits, evicted):
    """llm-d-inference-sim#704: of three blocks freed at once, the tail is the one to lose."""
    blocks = CachingBlockManager(4, free_order=free_order)
    blocks.release(published(blocks, "abc"))
    blocks.allocate_one()
    assert len(blocks.match("abc", 3)) == hits
    assert evictions(blocks) == evicted


def test_evictions_are_counted_by_what_they_cut_off():
    """A first block with blocks behind it, one in between, and one that nothing continues."""
    blocks = CachingBlockManager(4, free_order="forward")
    blocks.release(published(blocks, "abc"))
    blocks.allocate(3)
    assert evictions(blocks) == (1, 1, 1)
    assert blocks.counters.num_evictions == 3


def test_a_block_that_two_continue_is_a_tail_when_both_are_gone():
    """Children are counted, also of a parent that was evicted and published again."""
    blocks = CachingBlockManager(6)
    (root,) = published(blocks, "r")
    left, right = blocks.allocate(2).tolist()
    blocks.publish(left, "x", "r")
    blocks.publish(right, "y", "r")
    blocks.release([root])
    blocks.allocate(3)  # 4, 5 and the root
    assert evictions(blocks) == (1, 0, 0)
    blocks.publish(4, "r")
    blocks.release([4])
    blocks.allocate(1)
    assert evictions(blocks) == (2, 0, 0)
    blocks.release([left, right])
    blocks.allocate(2)
    assert evictions(blocks) == (2, 0, 2)
    blocks.check_integrity()


def test_more_than_is_free_is_refused_and_evicts_nothing():
    """As in the base, and with all keys still there."""
    blocks = CachingBlockManager(3)
    blocks.release(published(blocks, "ab"))
    with pytest.raises(OutOfBlocksError):
        blocks.allocate(3)
    assert blocks.num_cached == 2


# -- free orders ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free_order", "free"),
    [
        ("reverse", [5, 6, 4, 3, 2, 1]),
        ("reverse_unhashed_first", [5, 6, 4, 2, 3, 1]),
        ("reverse_unhashed_head", [2, 4, 5, 6, 3, 1]),
        ("never_hit_first", [5, 6, 4, 3, 2, 1]),
    ],
)
def test_where_blocks_with_and_without_a_key_join(free_order, free):
    """Table 1 to 4, of which 1 and 3 have keys, 5 and 6 never used."""
    blocks = CachingBlockManager(7, free_order=free_order)
    table = blocks.allocate(4).tolist()
    blocks.publish(1, "a")
    blocks.publish(3, "c")
    blocks.release(table)
    assert blocks.free_ids() == free


def test_blocks_that_were_hit_go_last_until_they_are_handed_out():
    """A hit counts until the block holds something else; then it starts anew."""
    blocks = CachingBlockManager(5, free_order="never_hit_first")
    blocks.release(published(blocks, "ab"))
    blocks.take_hits(blocks.match("a", 1))
    blocks.release([1])
    blocks.release(published(blocks, "cd"))
    assert blocks.free_ids() == [2, 4, 3, 1]
    blocks.release(blocks.allocate(4))
    blocks.release(published(blocks, "e"))
    blocks.release(published(blocks, "f"))
    assert blocks.free_ids() == [4, 2, 1, 3]  # 1 was hit when it held a, 3 joined after it


@settings(max_examples=150, deadline=None)
@given(
    free_order=st.sampled_from(ALL_ORDERS),
    sizes=st.lists(st.integers(1, LONG), min_size=1, max_size=4),
    as_list=st.booleans(),
    data=st.data(),
)
def test_every_path_leaves_the_same_free_order(free_order, sizes, as_list, data):
    """At once, withheld as a table, or withheld block by block: the same ids come next."""
    keyed = data.draw(st.sets(st.integers(1, sum(sizes))))
    hit = data.draw(st.sets(st.sampled_from(sorted(keyed)))) if keyed else set()
    order = data.draw(st.permutations(range(len(sizes))))

    def free_ids(fenced, per_block=False):
        blocks = CachingBlockManager(sum(sizes) + 3, free_order=free_order, seed=5)
        queue = ReleaseQueue(blocks, "step")
        tables = [blocks.allocate(size) for size in sizes]
        for block_id in sorted(keyed):
            blocks.publish(block_id, block_id)
        blocks.take_hits(sorted(hit))
        blocks.release(sorted(hit))
        for step, index in enumerate(order, 1):
            table = tables[index].tolist() if as_list else tables[index]
            parts = [[int(i)] for i in blocks.in_free_order(table)] if per_block else [table]
            for part in parts:
                queue.give_up(part, Fence(step) if fenced else None)
        queue.collected(len(sizes))
        blocks.check_integrity()
        return blocks.free_ids()

    at_once = free_ids(fenced=False)
    assert free_ids(fenced=True) == at_once
    assert free_ids(fenced=True, per_block=True) == at_once


@pytest.mark.parametrize(
    ("free_order", "base"),
    [
        *((order, (order, "fifo")) for order in FREE_ORDERS),
        ("reverse_unhashed_first", ("reverse", "fifo")),
        ("never_hit_first", ("reverse", "fifo")),
        ("reverse_unhashed_head", ("reverse", "lifo")),
    ],
)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_without_keys_it_is_a_plain_pool(free_order, base, data):
    """The orders that look at keys are then an old one by another name."""
    size = data.draw(st.integers(2, 2 * LONG))
    own = CachingBlockManager(size, free_order=free_order, seed=3)
    plain = BlockManager(size, free_order=base[0], discipline=base[1], seed=3)
    tables, fenced = [], []
    for _ in range(data.draw(st.integers(1, 12))):
        verb = data.draw(st.sampled_from(["allocate", "one", "pin", "release", "withhold", "lift"]))
        chosen = data.draw(st.integers(0, len(tables) - 1)) if tables else None
        if verb == "one" and plain.num_free:
            tables.append([own.allocate_one()])
            assert tables[-1] == [plain.allocate_one()]
        elif verb == "allocate":
            count = data.draw(st.integers(0, plain.num_free))
            tables.append(own.allocate(count))
            assert tables[-1].tolist() == plain.allocate(count).tolist()
        elif verb == "pin" and tables:
            tables.append(tables[chosen])
            own.pin(tables[chosen])
            plain.pin(tables[chosen])
        elif verb in ("release", "withhold") and tables:
            table, is_fenced = tables.pop(chosen), verb == "withhold"
            ids = own.release(table, fenced=is_fenced)
            assert list(ids) == list(plain.release(table, fenced=is_fenced))
            fenced += [ids] if is_fenced else []
        elif verb == "lift" and fenced:
            own.lift(fenced[0])
            plain.lift(fenced.pop(0))
        assert own.free_ids() == plain.free_ids()
        own.check_integrity()


@pytest.mark.parametrize("order", sorted(KEYED_FREE_ORDERS))
def test_a_plain_pool_refuses_orders_that_look_at_keys(order):
    """It has no keys to look at."""
    with pytest.raises(UserError, match="free_order: unknown name"):
        BlockManager(4, free_order=order)


@pytest.mark.parametrize("discipline", ["lifo", "by_id"])
def test_only_first_in_first_out_evicts_the_oldest(discipline):
    """Any other discipline is refused, not ignored."""
    with pytest.raises(UserError, match=f"discipline: {discipline} .* expected 'fifo'"):
        CachingBlockManager(4, discipline=discipline)


# -- all of it -----------------------------------------------------------------------------------


class PlainCache:
    """The same pool with lists and dictionaries, one block at a time."""

    def __init__(self, num_blocks, free_order):
        self.order = free_order
        self.free = list(range(1, num_blocks))
        self.owners, self.fences = [0] * num_blocks, [0] * num_blocks
        self.key, self.hit = {}, set()  # by block

    def block_of(self, key):
        return next((block_id for block_id, own in self.key.items() if own == key), None)

    def take(self):
        block_id = self.free.pop(0)
        self.owners[block_id] = 1
        self.key.pop(block_id, None)
        self.hit.discard(block_id)
        return block_id

    def take_hit(self, block_id):
        if block_id in self.free:
            self.free.remove(block_id)
        self.owners[block_id] += 1
        self.hit.add(block_id)

    def release(self, table, fenced):
        ids = {"forward": table, "by_id": sorted(table)}.get(self.order, table[::-1])
        if self.order == "reverse_unhashed_first":
            ids = sorted(ids, key=lambda block_id: block_id in self.key)
        for block_id in ids:
            self.owners[block_id] -= 1
            self.fences[block_id] += fenced
            self.join(block_id)
        return ids

    def lift(self, ids):
        for block_id in ids:
            self.fences[block_id] -= 1
            self.join(block_id)

    def join(self, block_id):
        if self.owners[block_id] or self.fences[block_id]:
            return
        at = len(self.free)
        if self.order == "reverse_unhashed_head" and block_id not in self.key:
            at = 0
        elif self.order == "never_hit_first" and block_id not in self.hit:
            at = next((i for i, other in enumerate(self.free) if other in self.hit), at)
        self.free.insert(at, block_id)


@pytest.mark.parametrize("free_order", [order for order in ALL_ORDERS if order != "shuffled"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_equals_the_plain_cache_on_any_history(free_order, data):
    """Requests with few different prompts come, hit, publish, go behind fences or without."""
    size = data.draw(st.integers(2, 24))
    blocks, plain = CachingBlockManager(size, free_order=free_order), PlainCache(size, free_order)
    tables, fenced = [], []
    for _ in range(data.draw(st.integers(1, 25))):
        verb = data.draw(st.sampled_from(["admit", "admit", "release", "withhold", "lift"]))
        if verb == "admit":
            keys = data.draw(st.sampled_from(["abcde", "abxy", "abc", "z", ""]))
            hits = blocks.match(keys, len(keys))
            assert hits == [plain.block_of(key) for key in keys[: len(hits)]]
            assert len(hits) == len(keys) or plain.block_of(keys[len(hits)]) is None
            count = len(keys) - len(hits) + data.draw(st.integers(0, 3))
            assert blocks.num_free_among(hits) == sum(block_id in plain.free for block_id in hits)
            if count > blocks.num_free - blocks.num_free_among(hits):
                continue
            blocks.take_hits(hits)
            for block_id in hits:
                plain.take_hit(block_id)
            new = blocks.allocate(count).tolist()
            assert new == [plain.take() for _ in range(count)]
            tables.append([*hits, *new])
            for i, key in list(enumerate(keys))[len(hits) :]:
                is_new = plain.block_of(key) is None
                assert blocks.publish(tables[-1][i], key, keys[i - 1] if i else None) == is_new
                if is_new:
                    plain.key[tables[-1][i]] = key
        elif verb == "lift" and fenced:
            blocks.lift(fenced[0])
            plain.lift(fenced.pop(0))
        elif verb in ("release", "withhold") and tables:
            table = tables.pop(data.draw(st.integers(0, len(tables) - 1)))
            ids = blocks.release(table, fenced=verb == "withhold")
            assert list(ids) == plain.release(table, verb == "withhold")
            fenced += [list(ids)] if verb == "withhold" else []
        assert blocks.free_ids() == plain.free
        assert [blocks.ref_count(i) for i in range(size)] == plain.owners
        assert blocks.num_cached == len(plain.key)
        blocks.check_integrity()
