"""A block manager that tells an observer what changes hands.

Stands in front of any manager and forwards what it does not watch. Invariant: the observer hears of
a change once it is made; a call the manager refuses is not heard of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from deepinfer.block_manager import BlockIds, BlockManager
from deepinfer.free_list import Ids
from deepinfer.observer import Observer


def observed(blocks: BlockManager, observer: Observer | None) -> BlockManager:
    """The block manager to use instead of `blocks`, so that `observer` is told, if there is one."""
    return blocks if observer is None else cast(BlockManager, ObservedBlocks(blocks, observer))


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
