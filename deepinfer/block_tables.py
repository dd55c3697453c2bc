"""Every block that enters or leaves the table of a running request, and the copies that go with it.

Does what the scheduler has decided: room was made, or is asked for here and refused. Knows no
order of requests and no plug-in but the release queue. Invariant: a block gets into a table owned
for it, with the copies that fill it and the fences its writers wait for noted until the plan is
made; it leaves through the release queue.
"""

from __future__ import annotations

import numpy as np

from deepinfer.block_manager import BlockManager
from deepinfer.fork import ForkSplit, take_fork_blocks
from deepinfer.plan import Int32, Rows
from deepinfer.planning import StepCopies
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.sequence import Sequence, SequenceTable


class BlockTables:
    """The block tables in `seqs`, over one pool.

    Attributes:
        copies: of the step that is being planned.
        waits: fences that its copies and writes must come behind (`ordered` only), until they are
            taken: also those of a step that came to nothing, whose blocks have owners.
    """

    def __init__(self, seqs: SequenceTable, blocks: BlockManager, release: ReleaseQueue) -> None:
        self.copies = StepCopies()
        self.waits: list[Fence] = []
        self._seqs = seqs
        self._blocks = blocks
        self._release = release
        self._observer = release.observer

    def begin_step(self) -> None:
        """A new step is being planned."""
        self.copies = StepCopies()

    def start(self, seq: Sequence, split: ForkSplit, num_blocks: int, num_reserved: int) -> int:
        """Give `seq` a row with `num_blocks` blocks, those that `split` shares among them.

        Raises OutOfBlocksError, with nothing changed, if the others are not free.
        """
        num_shared, is_fork = len(split.shared), len(split.shared) + len(split.sources) > 0
        forked = take_fork_blocks(self._blocks, split, num_blocks)
        new = forked.table[num_shared:]
        self.waits += self._release.fences_before_writing(new)
        self.copies.blocks += forked.copies
        if len(forked.sources):
            self._let_go(forked.sources, seq.request_id)
        if self._observer is not None:
            self._observer.took(seq.request_id, new, "fork" if is_fork else "admit")
        return self._seqs.add(seq, forked.table, num_reserved)

    def grow(self, rows: Rows, counts: Int32) -> None:
        """Append new blocks to the tables, `counts[i]` of them to `rows[i]`."""
        ids = self._allocate(int(counts.sum()))
        self._seqs.grow(rows, counts, ids)
        if self._observer is not None and len(rows):  # of nothing, split makes one part
            parts = np.split(ids, np.cumsum(counts)[:-1])
            for row, part in zip(rows.tolist(), parts, strict=True):
                self._observer.took(self._seqs.at(row).request_id, part, "append")

    def shrink(self, row: int, num_blocks: int, fence: Fence | None) -> None:
        """Cut a table to `num_blocks`."""
        surplus = self._seqs.shrink(row, num_blocks)
        owner = self._seqs.at(row).request_id
        self._release.give_up(surplus, fence, owner=owner, path="shrink")

    def replace(self, row: int, column: int) -> None:
        """Give a row a block of its own, filled from the one it shares, in that one's place."""
        source, owner = int(self._seqs.block_tables[row, column]), self._seqs.at(row).request_id
        new = int(self._allocate(1)[0])
        self._seqs.replace_block(row, column, new)
        self.copies.blocks.append((source, new))
        self._let_go(np.array([source], np.int32), owner)
        if self._observer is not None:
            self._observer.took(owner, [new], "copy-on-write")

    def is_shared(self, block_id: int) -> bool:
        """Whether others own the block, apart from those of this step who only await their copy."""
        leaving = sum(int(np.count_nonzero(ids == block_id)) for ids in self.copies.sources)
        return self._blocks.ref_count(block_id) - leaving > 1

    # -- inside ----------------------------------------------------------------------------------

    def _allocate(self, count: int) -> Int32:
        ids = self._blocks.allocate(count)
        self.waits += self._release.fences_before_writing(ids)
        return ids

    def _let_go(self, sources: Int32, owner: str) -> None:
        self.copies.sources.append(sources)
        self.copies.owners.append(owner)
