"""A pool that finds blocks by what they hold: keys, hits, and what is evicted when.

    publish(id, key)     the block's rows are final and are what `key` stands for
    match(keys, most)    the blocks of the longest prefix there is
    take_hits(ids)       one owner more each; a free one leaves the free list, wherever it stands

A block has at most one key and a key at most one block. The key stays when the block becomes free
or withheld, and goes when it is handed out again: that is an eviction, and the free order decides
which block it hits. A withheld block may be hit too: the fence keeps writers off, and a reader of
final rows is none. It is owned from then on, and lifting the fence leaves it so.

Knows keys as things to compare, not as tokens; `chain` makes one from the other. Knows no request:
how much of a prompt may be hit, and when rows are final, is the caller's to say.
Invariant: keys and blocks name one another; a refused call changes nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from deepinfer.block_manager import BlockIds, BlockManager
from deepinfer.errors import OwnershipError, UserError
from deepinfer.free_list import Ids, LinkedFreeList
from deepinfer.names import KEYED_FREE_ORDERS

Key = Hashable

KEY_BYTES = 16  # of a chained hash: 2^40 blocks share one by chance in 2^-49 of all cases
MAX_SALT_BYTES = blake2b.MAX_KEY_SIZE


def chain(
    parent: int | None, tokens: Sequence[int] | NDArray[np.integer], salt: bytes = b""
) -> int:
    """The key of a full block: a 128-bit hash of its tokens and all before them.

    BLAKE2b with a digest of 16 bytes, keyed with `salt`, over the parent's digest (16 zero bytes
    for the first block) and the tokens, 8 bytes each, signed; all integers little-endian.

    Args:
        parent: the key of the block before; None for the first.
        salt: whatever else the rows depend on, at most 64 bytes; other salts share no key.
    """
    if len(salt) > MAX_SALT_BYTES:
        raise UserError(f"salt: {len(salt)} bytes; at most {MAX_SALT_BYTES}")
    digest = blake2b((parent or 0).to_bytes(KEY_BYTES, "little"), digest_size=KEY_BYTES, key=salt)
    digest.update(np.asarray(tokens, dtype="<i8").tobytes())
    return int.from_bytes(digest.digest(), "little")


def block_keys(
    keys: list[int], tokens: NDArray[np.integer], count: int, block_size: int
) -> list[int]:
    """The keys of the first `count` full blocks of `tokens`, int [>= count * block_size].

    `keys` are those known so far, of its first blocks; the list is extended by what was missing.
    """
    for column in range(len(keys), count):
        own = tokens[column * block_size : (column + 1) * block_size]
        keys.append(chain(keys[-1] if keys else None, own))
    return keys[:count]


@dataclass(slots=True)
class CacheCounters:
    """What became of keys so far.

    Attributes:
        num_published: keys that got a block.
        num_hits: owners that blocks gained by their keys.
        num_evicted_tail: evicted blocks that no cached block continued.
        num_evicted_head: first blocks of a chain, with cached blocks behind them that nobody can
            reach until the head is computed again.
        num_evicted_middle: others with cached blocks behind them.
    """

    num_published: int = 0
    num_hits: int = 0
    num_evicted_head: int = 0
    num_evicted_middle: int = 0
    num_evicted_tail: int = 0

    @property
    def num_evictions(self) -> int:
        """Blocks that lost their key by being handed out."""
        return self.num_evicted_head + self.num_evicted_middle + self.num_evicted_tail


class CachingBlockManager(BlockManager):
    """A `BlockManager` whose blocks keep their keys until they are handed out again.

    Args:
        free_order: one of `free_orders`: the base's, and three that look at keys.

    The free list is first in first out: it doubles as the list of what is evicted next, and any
    other discipline would evict what was used last. Three free orders look at keys, each at the
    moment at which a block is released or joins. They visit a table last block first and put

        reverse_unhashed_first  those without a key at the tail, then those with one at the tail
        reverse_unhashed_head   those without a key at the head, those with one at the tail
        never_hit_first         at the tail of its group; blocks that were hit since they were last
                                published are a group that is handed out only when no other block is
                                left, and nothing but that ends their membership

    Blocks without a key count as never hit.
    """

    free_orders = (*BlockManager.free_orders, *KEYED_FREE_ORDERS)

    def __init__(
        self,
        num_blocks: int,
        *,
        free_order: str = "reverse",
        discipline: str = "fifo",
        seed: int = 0,
    ) -> None:
        super().__init__(num_blocks, free_order=free_order, discipline=discipline, seed=seed)
        if discipline != "fifo":
            raise UserError(f"discipline: {discipline} for a pool that keeps keys; expected 'fifo'")
        self.counters = CacheCounters()
        self._keys: list[Key | None] = [None] * num_blocks
        self._parents: list[Key | None] = [None] * num_blocks
        self._was_hit = bytearray(num_blocks)
        self._block_of: dict[Key, int] = {}
        self._num_children: dict[Key, int] = {}  # cached blocks behind a key, cached or not
        joins_front = {
            "reverse_unhashed_head": lambda block_id: self._keys[block_id] is None,
            "never_hit_first": lambda block_id: not self._was_hit[block_id],
        }
        self._linked = LinkedFreeList(
            num_blocks,
            joins_front=joins_front.get(free_order),
            stack=free_order == "reverse_unhashed_head",
        )
        first_ids = range(num_blocks - 1, 0, -1) if self._linked.is_stack else range(1, num_blocks)
        self._linked.push(first_ids)
        self._free = self._linked

    # -- looking ---------------------------------------------------------------------------------

    @property
    def num_cached(self) -> int:
        """Keys that have a block."""
        return len(self._block_of)

    def key_of(self, block_id: int) -> Key | None:
        """What the block holds; None if that was never published."""
        return self._keys[block_id]

    def match(self, keys: Iterable[Key], most: int) -> list[int]:
        """The blocks of the first keys, up to the first without a block, or to `most` of them.

        Of any state: see `take_hits`. Nothing is kept for the caller meanwhile.
        """
        ids = []
        for key in islice(keys, most):
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            ids.append(block_id)
        return ids

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of these different blocks are in the free list.

        Taking them leaves `num_free` minus that many for everything else.
        """
        refs, fences = self._ref_counts, self._fence_counts
        return sum(not (refs[block_id] or fences[block_id]) for block_id in block_ids)

    # -- changing hands --------------------------------------------------------------------------

    def take_hits(self, block_ids: Sequence[int]) -> None:
        """Add one owner to each of these blocks with keys, whatever their state.

        A free block leaves the free list. A withheld one is withheld no more: its fences stay, and
        lifting them frees it only if it has been given up again.

        Raises:
            OwnershipError: a block has no key. Nothing has changed.
        """
        for block_id in block_ids:
            self._check_id(block_id, "hit")
            if self._keys[block_id] is None:
                raise OwnershipError(f"cannot hit block {block_id}: it has no key")
        refs, fences = self._ref_counts, self._fence_counts
        for block_id in block_ids:
            if not refs[block_id]:
                if fences[block_id]:
                    self._num_withheld -= 1
                else:
                    self._linked.remove(block_id)
            refs[block_id] += 1
            self._was_hit[block_id] = 1
        self.counters.num_hits += len(block_ids)

    def publish(self, block_id: int, key: Key, parent: Key | None = None) -> bool:
        """Let an owned block whose rows are final be found by `key`.

        Args:
            parent: the key of the block before it; None if it begins its chain.

        Returns:
            Whether the block has the key now. Not if another block has: use that one instead
            (`match`, `take_hits`), and give this one up once no table names it.

        Raises:
            OwnershipError: nobody owns the block, or it has another key. Nothing has changed.
        """
        self._check_id(block_id, "publish")
        if not self._ref_counts[block_id]:
            raise OwnershipError(f"cannot publish block {block_id}: {self._state(block_id)}")
        if self._keys[block_id] is not None and self._keys[block_id] != key:
            raise OwnershipError(f"cannot publish block {block_id}: it has another key")
        if self._block_of.setdefault(key, block_id) != block_id:
            return False
        if self._keys[block_id] is None:
            self._keys[block_id], self._parents[block_id] = key, parent
            self.counters.num_published += 1
            if parent is not None:
                self._num_children[parent] = self._num_children.get(parent, 0) + 1
        return True

    def allocate(self, count: int) -> Ids:
        """As the base's; what the blocks held is forgotten."""
        ids = super().allocate(count)
        for block_id in ids.tolist():
            if self._keys[block_id] is not None:
                self._evict(block_id)
        return ids

    def allocate_one(self) -> int:
        """As the base's; what the block held is forgotten."""
        block_id = super().allocate_one()
        if self._keys[block_id] is not None:
            self._evict(block_id)
        return block_id

    def in_free_order(self, table: BlockIds) -> BlockIds:
        """As the base's, and for the orders that look at keys."""
        if self.free_order not in KEYED_FREE_ORDERS:
            return super().in_free_order(table)
        ids = table[::-1]
        if self.free_order != "reverse_unhashed_first":
            return ids
        keys = self._keys
        values = ids.tolist() if isinstance(ids, np.ndarray) else ids
        return [i for i in values if keys[i] is None] + [i for i in values if keys[i] is not None]

    # -- proof -----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """As the base's, and that keys and blocks name one another."""
        super().check_integrity()
        keyed = {key: i for i, key in enumerate(self._keys) if key is not None}
        children: dict[Key, int] = {}
        for block_id in keyed.values():
            parent = self._parents[block_id]
            if parent is not None:
                children[parent] = children.get(parent, 0) + 1
        if keyed != self._block_of or len(keyed) != sum(key is not None for key in self._keys):
            raise OwnershipError(f"pool of {self.num_blocks}: keys and blocks do not agree")
        if children != self._num_children:
            raise OwnershipError(f"pool of {self.num_blocks}: the counts of what follows are off")

    # -- inside ----------------------------------------------------------------------------------

    def _evict(self, block_id: int) -> None:
        key, parent = self._keys[block_id], self._parents[block_id]
        assert key is not None
        del self._block_of[key]
        self._keys[block_id] = self._parents[block_id] = None
        self._was_hit[block_id] = 0
        if key not in self._num_children:
            self.counters.num_evicted_tail += 1
        elif parent is None:
            self.counters.num_evicted_head += 1
        else:
            self.counters.num_evicted_middle += 1
        if parent is not None:
            left = self._num_children[parent] - 1
            if left:
                self._num_children[parent] = left
            else:
                del self._num_children[parent]
