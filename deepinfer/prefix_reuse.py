"""Rows computed once and read by all whose tokens begin alike: hits at admission, keys at commit.

A block is published under the chained hash of its tokens when all its rows are committed, and a
request that is admitted takes over the blocks of the longest prefix it finds, but never all of its
tokens: the last one is computed, because its successor is sampled from it.

    commit     block 2 of A is full           publish(5, key of A's tokens 0 ... 11)
    admit B    the same 13 tokens and more    takes 3 hits over, computes from token 12 on
    commit     C computed the same block 2    its table is pointed at block 5, its copy given up

Knows no order of requests and no device. Invariants: nothing is published whose rows are not
committed; a table that is pointed elsewhere holds the same rows as before.
"""

from __future__ import annotations

import numpy as np

from deepinfer.plan import Int32, Rows
from deepinfer.prefix_cache import CachingBlockManager, block_keys
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.sequence import Sequence, SequenceTable

NO_BLOCKS = np.empty(0, np.int32)


class PrefixReuse:
    """Finds and publishes blocks of the requests in `seqs`.

    Attributes:
        num_repointed: blocks given up because another request had published the same.
    """

    def __init__(
        self, seqs: SequenceTable, blocks: CachingBlockManager, release: ReleaseQueue
    ) -> None:
        self.num_repointed = 0
        self._seqs = seqs
        self._blocks = blocks
        self._release = release

    @property
    def num_evictions(self) -> int:
        """Blocks that were handed out while they could be found."""
        return self._blocks.counters.num_evictions

    def match(self, seq: Sequence) -> Int32:
        """The blocks a waiting request could take over now, int32; none for a fork with pins."""
        if len(seq.forked_table):
            return NO_BLOCKS
        most = (seq.num_tokens - 1) // self._seqs.block_size
        keys = block_keys(seq.block_keys, seq.token_ids, most, self._seqs.block_size)
        return np.array(self._blocks.match(keys, most), np.int32)

    def num_needed(self, num_blocks: int, hits: Int32) -> int:
        """Free blocks that `num_blocks`, `hits` among them, take from the free list."""
        return num_blocks - len(hits) + self._blocks.num_free_among(hits.tolist())

    def take(self, seq: Sequence, hits: Int32) -> None:
        """Make a request that is admitted an owner of its hits; its rows there are computed."""
        self._take(seq, hits)
        seq.num_computed_tokens = len(hits) * self._seqs.block_size

    def publish(self, rows: Rows, fence: Fence | None) -> None:
        """Publish what is full and committed of `rows`, and share what others have published.

        Args:
            fence: passes when no step in flight reads a block that is given up here.
        """
        seqs = self._seqs
        num_full = seqs.num_computed_tokens[rows] // seqs.block_size
        for index in np.flatnonzero(num_full > seqs.num_published_blocks[rows]).tolist():
            row, count = int(rows[index]), int(num_full[index])
            self._publish(seqs.at(row), row, count, fence)
            seqs.num_published_blocks[row] = count

    # -- inside ----------------------------------------------------------------------------------

    def _publish(self, seq: Sequence, row: int, count: int, fence: Fence | None) -> None:
        seqs = self._seqs
        keys = block_keys(seq.block_keys, seqs.token_ids[row], count, seqs.block_size)
        for column in range(int(seqs.num_published_blocks[row]), count):
            block_id, parent = int(seqs.block_tables[row, column]), keys[column - 1]
            if self._blocks.publish(block_id, keys[column], parent if column else None):
                continue
            other = np.array(self._blocks.match(keys[column : column + 1], 1), np.int32)
            self._take(seq, other)
            seqs.replace_block(row, column, int(other[0]))
            self._release.give_up([block_id], fence, owner=seq.request_id, path="same rows")
            self.num_repointed += 1

    def _take(self, seq: Sequence, hits: Int32) -> None:
        if not len(hits):
            return
        self._release.withheld_block_ns()  # up to here, with what is withheld now
        self._blocks.take_hits(hits.tolist())
        if self._release.observer is not None:
            self._release.observer.took(seq.request_id, hits, "hit")
