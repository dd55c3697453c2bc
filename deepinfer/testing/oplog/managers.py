"""An adapter of the conformance kit as the block manager that a release queue works with.

Counts owners and fences itself, since an adapter need not; the ids, and the order in which they
come, are the adapter's. Knows no policy. Invariant: a member the adapter does not offer is refused
by name when it is needed, and nothing else is asked of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from deepinfer.block_manager import BlockManager
from deepinfer.errors import OutOfBlocksError, OwnershipError, UserError
from deepinfer.testing.conformance.adapters import AdapterClass, Family, Unavailable, find


class _Withheld(list[int]):
    """Ids in the order given, with what the adapter calls their fence."""

    fence: Any


class AdaptedBlocks:
    """What `ReleaseQueue` needs of a block manager, over one adapter.

    Raises OwnershipError where the adapter raises, and OutOfBlocksError where it refuses.
    """

    def __init__(self, adapter: AdapterClass, num_blocks: int) -> None:
        self._adapter: Any = adapter(num_blocks)
        self._name = adapter.__name__
        self._owners = [0] * num_blocks
        self._fences = [0] * num_blocks
        self.num_usable = num_blocks - 1
        self.num_held = 0
        self.num_withheld = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return self.num_usable - self.num_held - self.num_withheld

    def allocate(self, count: int) -> list[int]:
        """As the adapter's, ids as they come."""
        ids = self._call("allocate", count)
        if ids is None:
            raise OutOfBlocksError(f"{self._name} refuses {count} blocks; {self.num_free} are free")
        blocks = [int(i) for i in ids]
        for block in blocks:
            self.num_held += not self._owners[block]
            self._owners[block] = 1
        return blocks

    def pin(self, block_ids: Sequence[int]) -> None:
        """As the adapter's."""
        self._call("pin", list(block_ids))
        for block in block_ids:
            self._owners[block] += 1

    def in_free_order(self, table: Sequence[int]) -> Sequence[int]:
        """The order that the adapter promises; without a promise that of the table."""
        order = getattr(self._adapter, "free_order", "forward")
        return sorted(table) if order == "by_id" else table[:: -1 if order == "reverse" else 1]

    def release(self, table: Sequence[int], *, fenced: bool = False) -> Sequence[int]:
        """As the adapter's `release`, or with `fenced` its `withhold`."""
        ids = _Withheld(table)
        ids.fence = self._call("withhold" if fenced else "release", list(table))
        for block in table:
            self._owners[block] -= 1
            self._fences[block] += fenced
            if not self._owners[block]:
                self.num_held -= 1
                self.num_withheld += self._fences[block] > 0
        return ids

    def lift(self, block_ids: _Withheld) -> None:
        """As the adapter's, of what `release` gave back."""
        self._call("lift", block_ids.fence)
        for block in block_ids:
            self._fences[block] -= 1
            self.num_withheld -= not self._fences[block] and not self._owners[block]

    def _call(self, method: str, argument: Any) -> Any:
        offered = getattr(self._adapter, method, None)
        if offered is None:
            raise UserError(f"{self._name} does not offer {method!r}")
        try:
            return offered(argument)
        except Exception as error:  # what a refusal is made of is the adapter's choice
            raise OwnershipError(
                f"{self._name}.{method}: {error or type(error).__name__}"
            ) from error


def block_manager(name: str) -> Callable[..., BlockManager]:
    """What a replay makes its pool with: a registered manager's, or `module:Class`.

    Of a manager with variants, the one of the free order and discipline asked for, or the first. A
    class with the engine's own protocol is used as it is. Raises UserError if there is none of this
    name, or if it cannot be made here.
    """
    try:
        family = find(name)
    except Unavailable as reason:
        raise UserError(f"block manager {name!r}: not available here: {reason}") from None
    if all(hasattr(member, "in_free_order") for member in family):
        return cast(Callable[..., BlockManager], family[0])

    def make(num_blocks: int, *, free_order: str, discipline: str, **_: Any) -> BlockManager:
        member = _variant(family, free_order, discipline)
        return cast(BlockManager, AdaptedBlocks(member, num_blocks))

    return make


def _variant(family: Family, free_order: str, discipline: str) -> AdapterClass:
    wanted = {"free_order": free_order, "discipline": discipline}
    for member in family:
        if all(getattr(member, key, None) == value for key, value in wanted.items()):
            return member
    return family[0]
