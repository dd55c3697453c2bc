"""Which blocks a fork shares, which it copies and which it only lets go: the rule, ids only.

The fork has pinned the blocks that hold its parent's committed rows. Complete blocks are read by
both and written by neither, so they stay shared. The partial tail will be written, so the fork gets
a copy of it and lets the original go once the copy is done:

    block_size 4, 10 committed rows         pinned    [1, 2, 3]
                                            shared    [1, 2]
    [0 1 2 3][4 5 6 7][8 9 . .]             table     [1, 2, 4]    copies [(3, 4)]
        1        2        3                 sources   [3]

Invariant: the sources stay owned by the fork until whoever queued the copies gives them up behind
their fence; a copy is never lost and never done twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer.block_manager import BlockManager
from deepinfer.errors import UserError, is_int
from deepinfer.plan import Int32


def num_taken_over(asked: int | None, num_tokens: int, parent_id: str) -> int:
    """How many of its parent's `num_tokens` tokens a fork takes over: all (None), or as asked.

    Raises UserError for a number that is none of 1 to `num_tokens`.
    """
    count = num_tokens if asked is None else asked
    if not is_int(count) or not 0 < count <= num_tokens:
        raise UserError(f"num_shared_tokens: {count!r} of {num_tokens} tokens of {parent_id!r}")
    return count


@dataclass(frozen=True, slots=True)
class ForkSplit:
    """A pinned table taken apart.

    Attributes:
        shared: int32, complete blocks the fork keeps sharing.
        sources: int32, blocks it lets go, in table order.
        copies_tail: whether the first source is copied into a new block.
    """

    shared: Int32
    sources: Int32
    copies_tail: bool


def split_fork(
    pinned: Int32, num_computed_tokens: int, block_size: int, *, copy_full_tail: bool = False
) -> ForkSplit:
    """Take a pinned table apart at its last committed row.

    With `copy_full_tail` the last block with committed rows is copied even if it is complete, as
    the engine of the book does for forks that go straight to decoding.
    """
    num_complete, partial_rows = divmod(num_computed_tokens, block_size)
    copies_tail = partial_rows > 0
    if copy_full_tail and not partial_rows and num_complete:
        num_complete, copies_tail = num_complete - 1, True
    return ForkSplit(pinned[:num_complete], pinned[num_complete:], copies_tail)


@dataclass(frozen=True, slots=True)
class ForkedTable:
    """What a fork has once it owns its blocks.

    Attributes:
        table: int32, shared blocks, then the tail's copy and new blocks.
        copies: (source, destination) pairs to queue.
        sources: int32, blocks to give up behind the copies' fence.
    """

    table: Int32
    copies: list[tuple[int, int]]
    sources: Int32


def take_fork_blocks(blocks: BlockManager, split: ForkSplit, num_blocks: int) -> ForkedTable:
    """Allocate what the fork needs beyond its shared blocks, up to `num_blocks` in all.

    Raises OutOfBlocksError, with nothing changed, if they are not free.
    """
    new = blocks.allocate(num_blocks - len(split.shared))
    copies = [(int(split.sources[0]), int(new[0]))] if split.copies_tail else []
    return ForkedTable(np.concatenate((split.shared, new)), copies, split.sources)
