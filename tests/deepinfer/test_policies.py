"""Admission and preemption plug-ins: numbers in, a number out."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.policies import lifetime_blocks, most_blocks, newest, prompt_blocks
from deepinfer.sequence import SamplingParams, Sequence, SequenceTable


def table_with(*sizes):
    seqs = SequenceTable(8, 64, 4)
    rows = [
        seqs.add(
            Sequence(f"r{size}", 0, np.zeros(1, np.int32), 1, SamplingParams()),
            np.arange(1, size + 1, dtype=np.int32),
        )
        for size in sizes
    ]
    return seqs, np.array(rows, np.intp)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_prompt_reserves_the_blocks_of_the_tokens_there_are(tokens, blocks):
    """Rounded up, also at exact multiples of the block size."""
    assert prompt_blocks(tokens, 100, 4) == blocks


@pytest.mark.parametrize(
    ("tokens", "longest", "blocks"), [(4, 5, 1), (4, 6, 2), (4, 9, 2), (4, 10, 3), (9, 9, 3)]
)
def test_lifetime_leaves_out_the_last_sampled_token(tokens, longest, blocks):
    """The last token is never written to the cache, so it needs no position."""
    assert lifetime_blocks(tokens, longest, 4) == blocks


def test_newest_is_the_last_admitted():
    """Running rows are in order of admission."""
    seqs, rows = table_with(3, 1, 2)
    assert newest(seqs, rows) == rows[2]
    assert newest(seqs, rows[::-1]) == rows[0]


def test_most_blocks_breaks_ties_by_admission():
    """Of equally large tables the last admitted gives way."""
    seqs, rows = table_with(3, 3, 2)
    assert most_blocks(seqs, rows) == rows[1]
