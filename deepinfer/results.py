"""What the result of a step changes: committed rows, tokens, and who has reached the end.

Writes the sequence table and nothing else; whoever has ended still has its row. Invariant: a
sequence that lost its row since the plan was made is left alone, and so is the row's new owner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.plan import Float32, Int32, Rows, StepPlan, StepResult
from deepinfer.sequence import Sequence, SequenceTable


@dataclass(frozen=True, slots=True)
class Commit:
    """What a result changed.

    Attributes:
        sequences: object [M], the `Sequence`s that got a token, in plan order, once for each.
        token_ids: int32 [M], their new tokens.
        logprobs: float32 [M].
        finished: (sequence, "length" or "stop") of those that ended.
    """

    sequences: NDArray[np.object_]
    token_ids: Int32
    logprobs: Float32
    finished: list[tuple[Sequence, str]]


def write_back(seqs: SequenceTable, plan: StepPlan, result: StepResult) -> Commit:
    """Make the rows of a collected step part of the committed prefix, and append its tokens."""
    rows, sampled = plan.rows, plan.sample_seq
    token_ids, logprobs = result.token_ids, result.logprobs
    if plan.ahead is not None:
        return _write_back_ahead(seqs, plan, result)
    alive = seqs.epochs[rows] == plan.epochs
    context_lens = plan.context_lens
    if np.count_nonzero(alive) < len(rows):
        kept = alive[sampled]
        sampled = (np.cumsum(alive) - 1)[sampled[kept]]  # renumbered among the alive
        token_ids, logprobs = token_ids[kept], logprobs[kept]
        rows, context_lens = rows[alive], context_lens[alive]
    seqs.num_computed_tokens[rows] = context_lens
    seqs.num_in_flight_tokens[rows] = 0
    if len(sampled) < len(rows):
        rows = rows[sampled]
    lengths = seqs.num_tokens[rows]
    ends = rows * seqs.token_ids.shape[1] + lengths  # where each row's next token goes
    seqs.token_ids.ravel()[ends] = token_ids
    seqs.logprobs.ravel()[ends] = logprobs
    lengths += 1
    seqs.num_tokens[rows] = lengths
    stopped = token_ids == seqs.stop_token_ids[rows]
    ended = (stopped | (lengths >= seqs.max_total_tokens[rows])).nonzero()[0]
    sequences = seqs.sequences[rows]
    finished = _finished(sequences, stopped, ended) if len(ended) else []
    return Commit(sequences, token_ids, logprobs, finished)


def _write_back_ahead(seqs: SequenceTable, plan: StepPlan, result: StepResult) -> Commit:
    """The same for a plan with open sequences: what was accepted of what was in flight."""
    ahead, found = plan.ahead, result.ahead
    assert ahead is not None, "the plan looked ahead"
    assert found is not None, "the device says what became of it"
    alive = seqs.epochs[plan.rows] == plan.epochs
    kept = alive.repeat(found.num_new)
    token_ids, logprobs = result.token_ids[kept], result.logprobs[kept]
    rows, num_new, is_open = plan.rows[alive], found.num_new[alive], ahead.is_open[alive]
    seqs.num_in_flight_tokens[rows] -= plan.num_scheduled[alive]
    seqs.num_pending_tokens[rows] -= ahead.num_pending[alive]
    seqs.num_in_flight_drafts[rows] -= ahead.num_drafts[alive]
    seqs.num_proposed_drafts[rows] = found.num_proposed[alive]
    # Of an open sequence the rows behind the accepted ones are bytes and nothing else.
    before = seqs.num_computed_tokens[rows]
    written = before + 1 + found.num_verified[alive]
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
    return Commit(seqs.sequences[each], token_ids, logprobs, finished)


def _finished(
    sequences: NDArray[np.object_], stopped: NDArray[np.bool_], ended: Rows
) -> list[tuple[Sequence, str]]:
    """Who has reached the end, and how, by the indices `ended`."""
    return [(sequences[i], "stop" if stopped[i] else "length") for i in ended.tolist()]
