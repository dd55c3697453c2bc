"""A result written back: counters, tokens, and who has ended."""

from __future__ import annotations

import numpy as np

from deepinfer.plan import StepResult
from deepinfer.planning import PlanBuilder, StepCopies
from deepinfer.results import write_back
from deepinfer.sequence import SamplingParams, Sequence, SequenceTable


def planned(*limits):
    """Sequences of two tokens that may sample that many, and the plan of their first step."""
    seqs = SequenceTable(4, 20, 4)
    for index, limit in enumerate(limits):
        sampling = SamplingParams(max_tokens=limit, stop_token_id=9)
        seq = Sequence(f"r{index}", index, np.array([1, 2], np.int32), 2, sampling)
        seqs.add(seq, np.array([index + 1], np.int32))
    rows = np.arange(len(limits))
    counts = np.full(len(limits), 2, np.int32)
    return seqs, PlanBuilder(seqs).build(1, rows, seqs.gather(rows), counts, StepCopies())


def result(*tokens):
    return StepResult(1, np.array(tokens, np.int32), np.zeros(len(tokens), np.float32))


def test_tokens_and_rows_are_committed_and_the_ended_named():
    """By length or by the stop token; whoever has ended keeps its row for the caller to take."""
    seqs, plan = planned(3, 1, 3)
    commit = write_back(seqs, plan, result(5, 6, 9))
    assert seqs.num_computed_tokens[:3].tolist() == [2, 2, 2]
    assert seqs.token_ids[:3, 2].tolist() == [5, 6, 9]
    assert [seq.request_id for seq in commit.sequences] == ["r0", "r1", "r2"]
    assert [(seq.request_id, why) for seq, why in commit.finished] == [
        ("r1", "length"),
        ("r2", "stop"),
    ]
    assert seqs.at(1).request_id == "r1"


def test_a_row_that_changed_hands_gets_nothing():
    """The other tokens still reach their own sequences."""
    seqs, plan = planned(3, 3, 3)
    seqs.remove(seqs.at(1))
    new = Sequence("new", 9, np.array([7], np.int32), 1, SamplingParams())
    assert seqs.add(new, np.array([4], np.int32)) == 1
    commit = write_back(seqs, plan, result(5, 6, 8))
    assert [seq.request_id for seq in commit.sequences] == ["r0", "r2"]
    assert commit.token_ids.tolist() == [5, 8]
    assert (seqs.num_tokens[1], seqs.num_computed_tokens[1]) == (1, 0)
    assert seqs.token_ids[2, 2] == 8
