"""vLLM's `BlockPool` (v1) under the kit, as vLLM's own KV cache manager uses it.

A table is freed last block first (`free_blocks(reversed(blocks))` in `SingleTypeKVCacheManager`),
and blocks without a hash join at the front with their order kept, so the first of a table joins
first in the sense of the kit: `forward`, `lifo`. Fences are not here: vLLM keeps freed blocks of a
step in flight in its scheduler (`deferred_frees`), outside of the pool.

Knows nothing of prefix hashes: no block gets one. Invariant: vllm is imported when a pool is made,
and not before; ImportError says that it is not installed.
"""

from __future__ import annotations

from typing import Any


class BlockPool:
    """`vllm.v1.core.block_pool.BlockPool` without prefix caching."""

    free_order = "forward"
    discipline = "lifo"
    enable_caching = False

    def __init__(self, num_blocks: int) -> None:
        from vllm.v1.core.block_pool import BlockPool  # type: ignore[import-not-found]

        self.pool = BlockPool(num_blocks, self.enable_caching, hash_block_size=16)

    def allocate(self, count: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(count)]

    def pin(self, table: list[int]) -> None:
        self.pool.touch(self._blocks(table))

    def release(self, table: list[int]) -> None:
        self.pool.free_blocks(reversed(self._blocks(table)))

    def num_free(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def free_ids(self) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]

    def ref_count(self, block_id: int) -> int:
        return int(self.pool.blocks[block_id].ref_cnt)

    def _blocks(self, table: list[int]) -> list[Any]:
        return [self.pool.blocks[block_id] for block_id in table]


class CachingBlockPool(BlockPool):
    """The same with prefix caching on; blocks are never full, so none is cached."""

    enable_caching = True


POOLS = (BlockPool, CachingBlockPool)
