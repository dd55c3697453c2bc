"""Planning beyond what is known: which rows have a next step, and how many drafts it verifies.

While a step runs, the host knows of its result only what it brings at least (a token for each
sequence that samples) and at most (its drafts too). A row is planned as if all came true: that is
the most room it can need. Knows no pool and no device. Invariant: a row that is sure to end by its
length is not planned again, and no draft lies at a position that its request can never write.
"""

from __future__ import annotations

import numpy as np

from deepinfer.plan import Int32, Rows, StepPlan
from deepinfer.planning import in_order
from deepinfer.sequence import RowCounters, SequenceTable


def ready_rows(seqs: SequenceTable, running: Rows) -> Rows:
    """Those of `running` that go on after what is in flight; `running` itself if all do."""
    sure = seqs.num_tokens + seqs.num_pending_tokens - seqs.num_in_flight_drafts
    ready = (sure < seqs.max_total_tokens)[running]
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
    seqs.num_in_flight_tokens[rows] += plan.num_scheduled
    if plan.ahead is not None:
        seqs.num_pending_tokens[rows] += plan.ahead.num_pending
        seqs.num_in_flight_drafts[rows] += plan.ahead.num_drafts
        seqs.num_lookahead_slots[rows] = 0
