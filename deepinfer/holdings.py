"""What each request holds, running or waiting, and every way in which it gives that up.

    running     a row, the blocks of its table, a slot of each pool of slots
    loading     the same, but it does not run before rows of it have come from the store
    waiting     nothing; a fork: pins on blocks of its parent, and a state slot

A request ends, is aborted, or is made to give way: preempted, so that it waits again, or, as a fork
that waits, parted from its pins, so that it computes its prompt itself.

Knows no budget and no plan, and does not choose who gives way. Invariant: what a request gives up
goes back through the release queue of its pool, behind the last step in flight or, of one that is
loading, behind its load.
"""

from __future__ import annotations

import numpy as np

from deepinfer.checks.prefix_tags import PrefixTags
from deepinfer.outputs import SchedulerCounters
from deepinfer.plan import Int32, Rows
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.sequence import Sequence, SequenceTable
from deepinfer.slots import Slots
from deepinfer.state_slots import StateSlots
from deepinfer.store_reuse import Load
from deepinfer.waiting import WaitingQueue

NO_ROWS = np.empty(0, np.intp)


class Holdings:
    """Rows, queue and pools of one scheduler.

    Args:
        prefix_tags: told when a row changes hands; None where rows are not tagged.

    Attributes:
        seqs: the rows.
        release: the queue through which blocks go back.
        states, drafts: the pools of slots; None where there are none.
        counters: of what was decided.
        waiting: the requests without a row, by arrival.
        running: intp [S], the rows of the others, by admission; a new array for every new set of
            rows, never written.
        loading: who has a row and waits for rows from the store.
        in_flight: passes behind the last step that was submitted and not committed.
    """

    def __init__(
        self,
        seqs: SequenceTable,
        release: ReleaseQueue,
        states: StateSlots | None,
        drafts: Slots | None,
        prefix_tags: PrefixTags | None,
    ) -> None:
        self.seqs = seqs
        self.release = release
        self.states = states
        self.drafts = drafts
        self.counters = SchedulerCounters()
        self.waiting = WaitingQueue()
        self.running: Rows = NO_ROWS
        self.loading: list[Load] = []
        self.in_flight: Fence | None = None
        self._prefix_tags = prefix_tags
        self._num_admitted = 0

    @property
    def slots(self) -> list[Slots]:
        """The pools of slots there are."""
        return [pool for pool in (self.states, self.drafts) if pool is not None]

    @property
    def comes_back(self) -> bool:
        """Whether blocks or slots come back by themselves: a fence keeps them, or a step runs."""
        pools = self.release.blocks, *(pool.slots for pool in self.slots)
        if self.loading or self.in_flight is not None:
            return True
        return any(pool.num_withheld for pool in pools)

    def end(self, seq: Sequence, path: str) -> None:
        """Take from a request all it has; `path` says why it ends."""
        if seq.row < 0:
            self._give_up_pins(seq, self.waiting.remove(seq))
        else:
            self._give_up_row(seq, path)

    def preempt(self, row: int) -> None:
        """Take from a running request all it has; it waits again, in its old place."""
        seq = self.seqs.at(row)
        self.counters.num_preemptions += 1
        self.counters.num_recomputed_tokens += int(self.seqs.num_computed_tokens[row])
        self._give_up_row(seq, "preempt")
        seq.num_preemptions += 1
        self.waiting.add(seq)

    def admitted(self, seq: Sequence) -> None:
        """A request got its row, after all others that have one."""
        seq.admission = self._num_admitted
        self._num_admitted += 1

    def loaded(self, load: Load) -> None:
        """A load has come: its request runs, in the place that its admission gives it."""
        self.loading.remove(load)
        seqs = self.seqs
        before = [seqs.at(row).admission < load.seq.admission for row in self.running.tolist()]
        self.running = np.insert(self.running, sum(before), load.seq.row)

    def load_failed(self, load: Load) -> None:
        """A load came to nothing: its request waits again, in its old place."""
        load.seq.num_failed_loads += 1
        self._give_up_row(load.seq, "load")
        self.waiting.add(load.seq)

    def unfork_newest(self) -> bool:
        """Part the newest waiting fork from what it holds; False if none holds anything."""
        seq = self.waiting.newest_fork
        if seq is None:
            return False
        self._give_up_pins(seq, self.waiting.unpin(seq))
        self.counters.num_unforked += 1
        return True

    # -- inside ----------------------------------------------------------------------------------

    def _give_up_pins(self, seq: Sequence, pinned: Int32) -> None:
        self.release.give_up(pinned, self.in_flight, owner=seq.request_id, path="unpin")
        if self.states is not None:
            self.states.give_up(seq, self.in_flight, "unpin")
        seq.num_computed_tokens = seq.num_written_tokens = 0

    def _give_up_row(self, seq: Sequence, path: str) -> None:
        fence = self._leave(seq)
        if self._prefix_tags is not None:
            self._prefix_tags.ended(seq.row, seq.request_id)
        table = self.seqs.remove(seq)
        self.release.give_up(table, fence, owner=seq.request_id, path=path)
        for pool in self.slots:
            pool.give_up(seq, fence, path)

    def _leave(self, seq: Sequence) -> Fence | None:
        """A request with a row neither runs nor loads any more; what its blocks must wait for."""
        for load in self.loading:
            if load.seq is seq:
                self.loading.remove(load)
                load.given_up = True
                return load.fence
        self.running = self.running[self.running != seq.row]
        return self.in_flight
