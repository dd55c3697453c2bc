"""A block manager that tells an observer what changes hands.

Stands in front of any manager and forwards what it does not watch. Invariant: the observer hears of
a change once it is made; a call the manager refuses is not heard of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from deepinfer.block_manager import BlockIds, BlockManager
from deepinfer.free_list import Ids
from deepinfer.observer import Observer
from deepinfer.prefix_cache import CachingBlockManager, Key


def observed(blocks: BlockManager, observer: Observer | None) -> BlockManager:
    """The block manager to use instead of `blocks`, so that `observer` is told, if there is one."""
    if observer is None:
        return blocks
    kind = ObservedCache if isinstance(blocks, CachingBlockManager) else ObservedBlocks
    return cast(BlockManager, kind(blocks, observer))


class ObservedBlocks:
    """`inner`, with an observer told of every block that changes hands."""

    def __init__(self, inner: BlockManager, observer: Observer) -> None:
        self.inner = inner
        self._observer = observer

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    else:

        def __getattr__(self, name):
            return getattr(self.inner, name)

    def allocate(self, count: int) -> Ids:
        """As the manager's."""
        ids = self.inner.allocate(count)
        self._observer.allocated(ids)
        return ids

    def allocate_one(self) -> int:
        """As the manager's."""
        block_id = self.inner.allocate_one()
        self._observer.allocated([block_id])
        return block_id

    def pin(self, block_ids: BlockIds) -> None:
        """As the manager's."""
        self.inner.pin(block_ids)
        self._observer.pinned(block_ids)

    def release(self, table: BlockIds, *, fenced: bool = False) -> BlockIds:
        """As the manager's."""
        ids = self.inner.release(table, fenced=fenced)
        self._observer.released(table, ids, fenced)
        return ids

    def lift(self, block_ids: BlockIds) -> None:
        """As the manager's."""
        self.inner.lift(block_ids)
        self._observer.lifted(block_ids)


class ObservedCache(ObservedBlocks):
    """The same of a pool that keeps keys."""

    inner: CachingBlockManager

    def take_hits(self, block_ids: Sequence[int]) -> None:
        """As the manager's."""
        self.inner.take_hits(block_ids)
        self._observer.hit(block_ids)

    def publish(self, block_id: int, key: Key, parent: Key | None = None) -> bool:
        """As the manager's; a key that another block has is not heard of."""
        has_key = self.inner.publish(block_id, key, parent)
        if has_key:
            self._observer.published(block_id)
        return has_key
