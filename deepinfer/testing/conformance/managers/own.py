"""`deepinfer.BlockManager` under the kit: one class for each free order and discipline.

Invariant: `shuffled` promises no free order, all others promise what they are called.
"""

from __future__ import annotations

from typing import Any

from deepinfer.block_manager import BlockIds, BlockManager
from deepinfer.names import DISCIPLINES, FREE_ORDERS


class Own:
    """The block manager of this engine; `options` are set by the subclasses below."""

    options: dict[str, str]

    def __init__(self, num_blocks: int) -> None:
        self.blocks = BlockManager(num_blocks, **self.options)  # type: ignore[arg-type]

    def allocate(self, count: int) -> list[int]:
        if count == 1:
            return [self.blocks.allocate_one()]
        ids: list[int] = self.blocks.allocate(count).tolist()
        return ids

    def pin(self, table: list[int]) -> None:
        self.blocks.pin(table)

    def release(self, table: list[int]) -> None:
        self.blocks.release(table)

    def withhold(self, table: list[int]) -> BlockIds:
        return self.blocks.release(table, fenced=True)

    def lift(self, fence: BlockIds) -> None:
        self.blocks.lift(fence)

    def num_free(self) -> int:
        return self.blocks.num_free

    def free_ids(self) -> list[int]:
        return self.blocks.free_ids()

    def ref_count(self, block_id: int) -> int:
        return self.blocks.ref_count(block_id)

    def can_allocate(self, count: int) -> str:
        return self.blocks.can_allocate(count).value


def _variant(free_order: str, discipline: str) -> type[Own]:
    members: dict[str, Any] = {
        "options": {"free_order": free_order, "discipline": discipline},
        "discipline": discipline,
        "__doc__": f"`BlockManager` with free order {free_order} and discipline {discipline}.",
    }
    if free_order != "shuffled":
        members["free_order"] = free_order
    return type(f"Own_{free_order}_{discipline}", (Own,), members)


VARIANTS = tuple(_variant(order, kind) for kind in DISCIPLINES for order in FREE_ORDERS)
