"""What the result of a step changes: committed rows, tokens, and who has reached the end.

Writes the sequence table and nothing else; whoever has ended still has its row. Invariant: a
sequence that lost its row since the plan was made is left alone, and so is the row's new owner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.observer import KV, Access
from deepinfer.plan import Float32, Int32, LookAhead, Rows, StepPlan, StepResult, firsts_of
from deepinfer.sequence import Sequence, SequenceTable

# numpy would make an array of a Python number anew in every call
ZERO, ONE = np.array(0, np.int32), np.array(1, np.int32)


@dataclass(frozen=True, slots=True)
class Commit:
    """What a result changed.

    Attributes:
        sequences: object [M], the `Sequence`s that got a token, in plan order, once for each; to be
            read only.
        token_ids: int32 [M], their new tokens.
        logprobs: float32 [M].
        finished: (sequence, "length" or "stop") of those that ended.
        num_new: int32 [S], of a plan that looked ahead how many of the tokens each of its sequences
            got; 0 where the frame is stale.
    """

    sequences: NDArray[np.object_]
    token_ids: Int32
    logprobs: Float32
    finished: list[tuple[Sequence, str]]
    num_new: Int32 | None = None


class ResultWriter:
    """Writes results into one sequence table.

    What does not change from step to step, whose rows these are and where they end, is looked up
    once for an unchanged set of rows.
    """

    def __init__(self, seqs: SequenceTable) -> None:
        self._seqs = seqs
        self._rows: Rows | None = None  # of which the following is known
        self._starts: Rows = np.empty(0, np.intp)  # where the tokens of each begin
        self._stop_token_ids: Int32 = np.empty(0, np.int32)
        self._max_total_tokens: Int32 = np.empty(0, np.int32)
        self._sequences: NDArray[np.object_] = np.empty(0, object)

    def write_back(self, plan: StepPlan, result: StepResult) -> Commit:
        """Make the rows of a collected step part of the committed prefix, and append its tokens."""
        if plan.ahead is not None:
            return self._write_back_ahead(plan, plan.ahead, result)
        seqs, rows, sampled = self._seqs, plan.rows, plan.sample_seq
        token_ids, logprobs = result.token_ids, result.logprobs
        context_lens = plan.context_lens
        alive = seqs.epochs[rows] == plan.epochs
        if np.count_nonzero(alive) < len(rows):
            kept = alive[sampled]
            sampled = (np.cumsum(alive) - 1)[sampled[kept]]  # renumbered among the alive
            token_ids, logprobs = token_ids[kept], logprobs[kept]
            rows, context_lens = rows[alive], context_lens[alive]
        seqs.num_computed_tokens[rows] = context_lens
        seqs.num_in_flight_tokens[rows] = ZERO
        if len(sampled) < len(rows):
            rows = rows[sampled]
        self._look_up(rows)
        lengths = seqs.num_tokens[rows]
        ends = self._starts + lengths  # where each row's next token goes
        seqs.token_ids.ravel()[ends] = token_ids
        seqs.logprobs.ravel()[ends] = logprobs
        lengths += ONE
        seqs.num_tokens[rows] = lengths
        stopped = token_ids == self._stop_token_ids
        ended = (stopped | (lengths >= self._max_total_tokens)).nonzero()[0]
        finished = _finished(self._sequences, stopped, ended) if len(ended) else []
        return Commit(self._sequences, token_ids, logprobs, finished)

    def _look_up(self, rows: Rows) -> None:
        if rows is not self._rows:  # the scheduler makes a new array for every new set of rows
            seqs = self._seqs
            self._starts = rows * seqs.token_ids.shape[1]
            self._stop_token_ids = seqs.stop_token_ids[rows]
            self._max_total_tokens = seqs.max_total_tokens[rows]
            self._sequences = seqs.sequences[rows]
            self._rows = rows

    def _write_back_ahead(self, plan: StepPlan, ahead: LookAhead, result: StepResult) -> Commit:
        """The same for a plan with open sequences: what was accepted of what was in flight."""
        seqs, found = self._seqs, result.ahead
        assert found is not None, "the device says what became of it"
        alive = seqs.epochs[plan.rows] == plan.epochs
        rows, is_open = plan.rows[alive], ahead.is_open[alive]
        num_new, kept = self._until_stop(plan.rows, found.num_new, result.token_ids)
        kept &= alive.repeat(found.num_new)
        token_ids, logprobs, num_new = result.token_ids[kept], result.logprobs[kept], num_new[alive]
        seqs.num_in_flight_tokens[rows] -= plan.num_scheduled[alive]
        seqs.num_pending_tokens[rows] -= ahead.num_pending[alive]
        seqs.num_in_flight_drafts[rows] -= ahead.num_drafts[alive]
        seqs.num_proposed_drafts[rows] = found.num_proposed[alive]
        # Of an open sequence the rows behind the accepted ones are bytes and nothing else.
        before = seqs.num_computed_tokens[rows]
        written = before + plan.num_scheduled[alive]
        seqs.num_written_tokens[rows] = np.maximum(seqs.num_written_tokens[rows], written)
        computed = before + num_new
        seqs.num_computed_tokens[rows] = np.where(is_open, computed, plan.context_lens[alive])
        each = rows.repeat(num_new)
        starts = np.cumsum(num_new) - num_new
        places = seqs.num_tokens[each] + np.arange(len(each)) - starts.repeat(num_new)
        seqs.token_ids[each, places] = token_ids
        seqs.logprobs[each, places] = logprobs
        seqs.num_tokens[rows] += num_new
        got, last = rows[num_new > 0], token_ids[(starts + num_new - 1)[num_new > 0]]
        stopped = last == seqs.stop_token_ids[got]
        ended = (stopped | (seqs.num_tokens[got] >= seqs.max_total_tokens[got])).nonzero()[0]
        finished = _finished(seqs.sequences[got], stopped, ended)
        got_by_seq = np.zeros(plan.num_seqs, np.int32)
        got_by_seq[alive] = num_new
        return Commit(seqs.sequences[each], token_ids, logprobs, finished, got_by_seq)

    def _until_stop(
        self, rows: Rows, num_new: Int32, token_ids: Int32
    ) -> tuple[Int32, NDArray[np.bool_]]:
        """Of each row's new tokens those up to its stop token: how many, and which of all."""
        stops = token_ids == self._seqs.stop_token_ids[rows].repeat(num_new)
        if not np.count_nonzero(stops):
            return num_new, np.ones(len(token_ids), bool)
        # The first stop token at or behind each row's first token; a row without tokens has none.
        last = np.append(np.flatnonzero(stops), len(token_ids))
        begins = np.cumsum(num_new) - num_new
        first = last[np.searchsorted(last, begins)]
        counts = np.minimum(first + 1 - begins, num_new).astype(np.int32)
        return counts, firsts_of(num_new, counts)


def _finished(
    sequences: NDArray[np.object_], stopped: NDArray[np.bool_], ended: Rows
) -> list[tuple[Sequence, str]]:
    """Who has reached the end, and how, by the indices `ended`."""
    return [(sequences[i], "stop" if stopped[i] else "length") for i in ended.tolist()]


def committed_rows(seqs: SequenceTable, plan: StepPlan) -> Access:
    """Of the blocks that a plan wrote, so many rows as are committed, for whoever watches.

    Of those sequences that still have their row: whoever has ended in this step is one of them.
    """
    alive = seqs.epochs[plan.rows] == plan.epochs
    rows = plan.rows[alive]
    first = plan.context_lens - plan.num_scheduled
    if plan.ahead is not None:
        first = first - plan.ahead.num_unsure
    starts = np.arange(seqs.block_tables.shape[1], dtype=np.int32) * seqs.block_size
    in_block = np.minimum(seqs.num_computed_tokens[rows][:, None] - starts, seqs.block_size)
    wrote = (in_block > 0) & (starts + seqs.block_size > first[alive][:, None])
    index, columns = wrote.nonzero()
    ends = in_block[index, columns]
    holders = rows[index]
    return Access(KV, seqs.block_tables[holders, columns], np.zeros_like(ends), ends, holders)
