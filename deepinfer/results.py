"""What the result of a step changes: committed rows, tokens, and who has reached the end.

Writes the sequence table and nothing else; whoever has ended still has its row. Invariant: a
sequence that lost its row since the plan was made is left alone, and so is the row's new owner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.plan import Float32, Int32, StepPlan, StepResult
from deepinfer.sequence import Sequence, SequenceTable


@dataclass(frozen=True, slots=True)
class Commit:
    """What a result changed.

    Attributes:
        sequences: object [M], the `Sequence`s that got a token, in plan order.
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
    reasons = ((index, "stop" if stopped[index] else "length") for index in ended.tolist())
    finished = [(sequences[index], reason) for index, reason in reasons]
    return Commit(sequences, token_ids, logprobs, finished)
