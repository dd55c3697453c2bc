"""The tables of running requests, brought to the length of their next step with what is free.

With too few blocks for all, in this order:

    drafts           give way: the step is planned without any
    the one in need  sits this step out, if enough is withheld that comes back by itself, or if all
                     others that could give way still load
    somebody else    gives way: the policy's victim loses its row; where that would be the one in
                     need, the newest waiting fork loses its pins first

Knows no budget, and nothing of how a request starts. Invariant: a row that `fit` returns owns all
the blocks that its next step writes, and one that `copy_on_write` does not hold back owns them
alone; nobody gives way while what is withheld would do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer.block_tables import BlockTables
from deepinfer.config import EngineConfig
from deepinfer.holdings import Holdings
from deepinfer.lookahead import ready_rows, wanted_drafts
from deepinfer.plan import Int32, Rows, StepPlan
from deepinfer.policies import PREEMPTION
from deepinfer.sequence import RowCounters


class TableFitting:
    """Fits the tables of whoever runs, over one pool.

    Attributes:
        gather: the counters of rows, as they will be when their next step is computed.
    """

    def __init__(self, config: EngineConfig, held: Holdings, tables: BlockTables) -> None:
        self._config = config
        self._held = held
        self._tables = tables
        self._seqs = seqs = held.seqs
        self._release = held.release
        self._blocks = held.release.blocks
        self.gather = seqs.gather_ahead if config.looks_ahead else seqs.gather

    def fit(self) -> tuple[Rows, RowCounters, bool]:
        """Grow and shrink every running table.

        Returns:
            The rows that can run, by admission, with their counters, and whether every request that
            goes on is among them.
        """
        seqs, config = self._seqs, self._config
        running = rows = self._held.running
        if self._held.in_flight is not None:
            rows = ready_rows(seqs, rows)
        if config.drafts:
            seqs.num_lookahead_slots[running] = 0
            budget = config.max_num_batched_tokens
            wanted = wanted_drafts(seqs, rows, self.gather(rows), config.drafts, budget)
            seqs.num_lookahead_slots[rows] = wanted
        counters = self.gather(rows)
        change = counters.blocks_needed(config.block_size) - counters.num_blocks
        if not np.count_nonzero(change):
            return rows, counters, True
        self._cut_back(rows, change)
        if config.drafts and not self._release.make_room(int(change.clip(0).sum())):
            seqs.num_lookahead_slots[rows] = 0  # drafts give way before anybody else does
            counters = self.gather(rows)
            change = counters.blocks_needed(config.block_size) - counters.num_blocks
            self._cut_back(rows, change)
        growing = (change > 0).nonzero()[0]
        counts = change[growing]
        if self._release.make_room(int(counts.sum())):
            self._tables.grow(rows[growing], counts)
            return rows, counters._replace(num_blocks=counters.num_blocks + change), True
        rows, all_fit = self._grow_one_by_one(rows, rows[growing], counts)
        return rows, self.gather(rows), all_fit

    def copy_on_write(self, rows: Rows, counters: RowCounters) -> NDArray[np.bool_]:
        """Give a row its own copy of the block it writes first, if somebody else owns it too.

        Returns bool [S]: the rows that must sit this step out because no block is left for a copy.
        """
        tables = self._tables
        starts = counters.num_computed_tokens
        if self._config.looks_ahead:  # drafts in flight may be rejected
            starts = starts - self._seqs.num_unsure(rows, counters)
        columns, offsets = np.divmod(starts, self._config.block_size)
        first = self._seqs.block_tables[rows, columns]
        stuck = np.zeros(len(rows), bool)
        shared = (self._blocks.ref_counts(first) > 1) & (offsets > 0)
        for index in np.flatnonzero(shared).tolist():
            while tables.is_shared(int(first[index])) and not stuck[index]:
                if self._release.make_room(1):
                    tables.replace(int(rows[index]), int(columns[index]))
                    break
                if self._blocks.num_withheld or not self._held.unfork_newest():
                    stuck[index] = True
                    self._held.counters.num_held_back += 1
        return stuck

    def committed(self, plan: StepPlan) -> None:
        """Give up what was held for drafts of a committed plan that were rejected."""
        if plan.ahead is None or not self._config.drafts:
            return
        alive = self._seqs.epochs[plan.rows] == plan.epochs
        rows = plan.rows[alive & (plan.ahead.num_drafts > 0)]
        counters = self.gather(rows)
        change = counters.blocks_needed(self._config.block_size) - counters.num_blocks
        self._held.counters.num_blocks_shrunk += self._cut_back(rows, change)

    # -- inside ----------------------------------------------------------------------------------

    def _cut_back(self, rows: Rows, change: Int32) -> int:
        """Give up what the tables of `rows` have beyond their need; returns the blocks cut off.

        Args:
            change: int32 [S], what each table lacks; below 0 what it has too much.
        """
        shrinking = (change < 0).nonzero()[0]
        if not len(shrinking):
            return 0
        for row, surplus in zip(rows[shrinking].tolist(), change[shrinking].tolist(), strict=True):
            num_blocks = int(self._seqs.num_blocks[row]) + surplus
            self._tables.shrink(row, num_blocks, self._held.in_flight)
        return -int(change[shrinking].sum())

    def _grow_one_by_one(self, rows: Rows, growing: Rows, counts: Int32) -> tuple[Rows, bool]:
        """Too few blocks for all: serve the oldest first, take back from others where needed."""
        held, seqs = self._held, self._seqs
        held_back, num_running = [], len(held.running)
        some_end = len(rows) < num_running
        for row, count in zip(growing.tolist(), counts.tolist(), strict=True):
            seq = seqs.sequences[row]
            if seq is None:
                continue  # preempted for an older one
            while seq.row == row and not self._release.make_room(count):
                comes_back = self._blocks.num_free + self._blocks.num_withheld
                if some_end or count <= comes_back or not self._take_back(row):
                    held_back.append(row)
                    held.counters.num_held_back += 1
                    break
            else:
                if seq.row == row:
                    self._tables.grow(np.array([row]), np.array([count], np.int32))
        running = ready_rows(seqs, held.running) if some_end else held.running
        if held_back:
            running = running[~np.isin(running, held_back)]
        return running, not held_back and len(held.running) == num_running

    def _take_back(self, needy_row: int) -> bool:
        """Make one holder of blocks give way: the policy's victim, or a waiting fork's pins.

        Returns False if that left only the one in need while others load, who can give way as soon
        as they run.
        """
        victim = PREEMPTION[self._config.preemption](self._seqs, self._held.running)
        if victim == needy_row:
            if self._held.unfork_newest():
                return True
            if self._held.loading:
                return False
        self._held.preempt(victim)
        return True
