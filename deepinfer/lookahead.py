"""Planning beyond what is known: which rows have a next step, and how many drafts it verifies.

While a step runs, the host knows of its result only what it brings at least (a token for each
sequence that samples) and at most (its drafts too). A row is planned as if all came true: that is
the most room it can need. Knows no pool and no device. Invariant: a row that is sure to end by its
length is not planned again, and no draft lies at a position that its request can never write.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deepinfer.plan import Int32, Rows, StepPlan
from deepinfer.planning import in_order
from deepinfer.sequence import RowCounters, SequenceTable


class BlocksAhead(NamedTuple):
    """Blocks that running requests hold for positions whose tokens the host does not know.

    Attributes:
        blocks_ahead: all of them: beyond what the known tokens need, or the reservation.
        blocks_for_drafts: those of them that no token is sure to need: without drafts the requests
            would not hold them.
    """

    blocks_ahead: int = 0
    blocks_for_drafts: int = 0


def blocks_ahead(seqs: SequenceTable, rows: Rows) -> BlocksAhead:
    """What `rows` hold ahead of what is known, as soon as a step was queued.

    A token is known once its step is committed, and needs a place in the cache only in the step
    that computes it: so a step in flight is sure to bring one token for each row it samples, and
    needs no place for the last of them.
    """
    size, held, known = seqs.block_size, seqs.num_blocks[rows], seqs.num_tokens[rows]
    reserved = seqs.num_reserved_blocks[rows]
    with_sure = np.maximum(seqs.num_sure_tokens(rows) - 1, known)
    beyond_known = held - np.maximum(-(-known // size), reserved)
    beyond_sure = held - np.maximum(-(-with_sure // size), reserved)
    return BlocksAhead(int(beyond_known.clip(0).sum()), int(beyond_sure.clip(0).sum()))


def ready_rows(seqs: SequenceTable, running: Rows) -> Rows:
    """Those of `running` that go on after what is in flight; `running` itself if all do."""
    ready = seqs.num_sure_tokens(running) < seqs.max_total_tokens[running]
    return running if np.count_nonzero(ready) == len(running) else running[ready]


def wanted_drafts(
    seqs: SequenceTable, rows: Rows, counters: RowCounters, max_drafts: int, budget: int
) -> Int32:
    """Drafts that the next step of each of `rows` verifies, int32 [S].

    Rows that decode get drafts: as many as wait on the device, or may wait there when what is in
    flight is done; the first rows first where the budget of tokens does not go round.

    Args:
        counters: of `SequenceTable.gather_ahead`.
        max_drafts: most of one row.
        budget: tokens of the step.
    """
    decodes = counters.num_tokens - counters.num_computed_tokens == 1
    some = np.where(seqs.num_pending_tokens[rows] > 0, max_drafts, seqs.num_proposed_drafts[rows])
    room = counters.max_total_tokens - 1 - counters.num_tokens
    asked = np.where(decodes, np.minimum(some, room).clip(0, max_drafts), 0)
    return in_order(asked, budget - int(np.count_nonzero(decodes))).astype(np.int32)


def set_out(seqs: SequenceTable, plan: StepPlan) -> None:
    """The rows of a plan are in flight."""
    rows = plan.rows
    if plan.ahead is None:  # nothing else is in flight
        seqs.num_in_flight_tokens[rows] = plan.num_scheduled
    else:
        seqs.num_in_flight_tokens[rows] += plan.num_scheduled
        seqs.num_pending_tokens[rows] += plan.ahead.num_pending
        seqs.num_in_flight_drafts[rows] += plan.ahead.num_drafts
        seqs.num_lookahead_slots[rows] = 0
