"""Who of those that wait starts: by arrival, with what budget, rows, blocks and slots are left.

    queue     OK, LATER, or NEVER: refused, because it could not even finish alone
    admit     hits and shared blocks taken over, new blocks, slots, a row; it joins the running, or
              first those that load what the store has of their rows

Knows no running table but those it starts. Invariants: whoever waits can run in the end, and nobody
overtakes; a request starts with all it needs, or with nothing taken.
"""

from __future__ import annotations

import numpy as np

from deepinfer.block_manager import Verdict
from deepinfer.block_tables import BlockTables
from deepinfer.config import EngineConfig
from deepinfer.fork import ForkSplit, split_fork
from deepinfer.holdings import Holdings
from deepinfer.plan import Int32, Rows
from deepinfer.policies import ADMISSION, lifetime_blocks
from deepinfer.prefix_reuse import NO_BLOCKS, PrefixReuse
from deepinfer.sequence import Sequence
from deepinfer.store_reuse import Found, Load, StoreReuse


class Admission:
    """The way from the queue to a row.

    Args:
        reuse, store: find rows that a request need not compute, in the pool and beyond; None
            without.

    Attributes:
        started: whom the step that is being planned admitted, or found loaded.
        loads: begun for those whom it admitted to load.
    """

    def __init__(
        self,
        config: EngineConfig,
        held: Holdings,
        tables: BlockTables,
        reuse: PrefixReuse | None,
        store: StoreReuse | None = None,
    ) -> None:
        self.started: list[Sequence] = []
        self.loads: list[Load] = []
        self._loaded: list[Sequence] = []  # since the last step
        self._config = config
        self._held = held
        self._tables = tables
        self._reuse = reuse
        self._store = store
        self._blocks = held.release.blocks

    def begin_step(self) -> None:
        """A new step is being planned."""
        self.started, self._loaded = self._loaded, []
        self.loads = []

    def loaded(self, load: Load) -> None:
        """The rows of a request have come from the store: it runs with the next step."""
        assert self._store is not None, "it was loaded from there"
        self._store.done(load)
        self._held.loaded(load)
        self._loaded.append(load.seq)

    def queue(self, seq: Sequence) -> Verdict:
        """Let a request wait, unless it can never fit; OK if it would start now, were it next."""
        held, config = self._held, self._config
        longest = lifetime_blocks(seq.num_tokens, seq.max_total_tokens, config.block_size)
        too_long = seq.max_total_tokens > config.max_model_len
        if too_long or self._blocks.can_allocate(longest) is Verdict.NEVER:
            held.counters.num_never += 1
            return Verdict.NEVER
        held.waiting.add(seq)
        if held.states is not None and not held.states.slots.num_free:
            return Verdict.LATER
        reserved, split, found = self._reservation(seq), self._split(seq), self._find(seq)
        return self._blocks.can_allocate(self._num_new(reserved, split, found.hits))

    def admit(self, rows: Rows, scheduled: Int32, budget: int) -> tuple[Rows, Int32]:
        """Start waiting sequences while budget, rows and blocks last.

        Args:
            rows, scheduled: intp and int32 [S], who goes on, and with how many tokens each.
            budget: tokens of the whole step.

        Returns:
            `rows` and `scheduled` with those behind that start; the same arrays if nobody does.
        """
        held = self._held
        budget -= int(scheduled.sum())
        new_rows, new_scheduled = [], []
        while held.waiting and budget > 0 and held.seqs.num_free_rows:
            seq = held.waiting.head
            if not self._start(seq):
                break
            if self.loads and self.loads[-1].seq is seq:
                continue
            count = min(seq.num_tokens - int(held.seqs.num_computed_tokens[seq.row]), budget)
            budget -= count
            new_rows.append(seq.row)
            new_scheduled.append(count)
        if not new_rows:
            return rows, scheduled
        admitted = np.array(new_rows, np.intp)
        all_ran = rows is held.running
        held.running = np.concatenate((held.running, admitted))
        rows = held.running if all_ran else np.concatenate((rows, admitted))
        return rows, np.concatenate((scheduled, np.array(new_scheduled, np.int32)))

    # -- inside ----------------------------------------------------------------------------------

    def _start(self, seq: Sequence) -> bool:
        """Give a waiting sequence its blocks, its slots and a row, whole or not at all."""
        held, reuse = self._held, self._reuse
        reserved, split, found = self._reservation(seq), self._split(seq), self._find(seq)
        hits = found.hits
        if not self._make_room(reserved, split, hits):
            held.counters.num_later_blocks += 1
            return False
        pools = [pool for pool in held.slots if not pool.holds_one(seq)]
        if not all(pool.has_room() for pool in pools):
            held.counters.num_later_slots += 1
            return False
        num_waits = len(self._tables.waits)
        for pool in pools:
            self._tables.waits += pool.take(seq)
        keeps_reserve = self._config.admission == "lifetime"
        if reuse is not None and len(hits):
            reuse.take(seq, hits)
            split = ForkSplit(hits, NO_BLOCKS, copies_tail=False)
            held.counters.num_hit_blocks += len(hits)
        self._tables.start(seq, split, reserved, reserved if keeps_reserve else 0)
        held.waiting.remove(seq)
        held.admitted(seq)
        load = None
        if self._store is not None:
            load = self._store.begin(seq, found, self._tables.waits[num_waits:])
        if load is None:
            self.started.append(seq)
        else:
            self.loads.append(load)
            held.loading.append(load)
        return True

    def _reservation(self, seq: Sequence) -> int:
        reserve = ADMISSION[self._config.admission]
        return reserve(seq.num_tokens, seq.max_total_tokens, self._config.block_size)

    def _split(self, seq: Sequence) -> ForkSplit:
        decodes_at_once = seq.num_tokens - seq.num_computed_tokens == 1
        return split_fork(
            seq.forked_table,
            seq.num_computed_tokens,
            self._config.block_size,
            copy_full_tail=decodes_at_once and self._config.fork_copy == "last",
        )

    def _find(self, seq: Sequence) -> Found:
        """What a waiting request need not compute: published by others, or kept in the store."""
        hits = NO_BLOCKS if self._reuse is None else self._reuse.match(seq)
        return Found(hits) if self._store is None else self._store.match(seq, hits)

    def _make_room(self, reserved: int, split: ForkSplit, hits: Int32) -> bool:
        """Whether the blocks that a request takes are free now, after the policy had a look.

        A look may free hits that were withheld, and they are taken from the free list then: they
        count only from there on.
        """
        counted = -1
        while counted != (count := self._num_new(reserved, split, hits)):
            if not self._held.release.make_room(count):
                return False
            counted = count
        return True

    def _num_new(self, reserved: int, split: ForkSplit, hits: Int32) -> int:
        """Free blocks that a request takes: new ones, and hits that nobody owns."""
        num_blocks = reserved - len(split.shared)
        return num_blocks if self._reuse is None else self._reuse.num_needed(num_blocks, hits)
