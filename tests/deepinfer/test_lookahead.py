"""Planning beyond what is known: who goes on, with how many drafts, and what that holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer.lookahead import BlocksAhead, blocks_ahead, ready_rows, set_out, wanted_drafts
from deepinfer.plan import LookAhead
from deepinfer.sequence import SamplingParams, Sequence, SequenceTable
from tests.deepinfer.step_plans import Run, step_plan


def ids(*values):
    return np.array(values, np.int32)


def decoding(*lengths, last=20, blocks=1):
    """Rows that have computed all but their last token, and the rows."""
    seqs = SequenceTable(6, 40, 4)
    for index, length in enumerate(lengths):
        tokens = np.arange(length, dtype=np.int32)
        seq = Sequence(f"r{index}", index, tokens, length, SamplingParams(last - length))
        row = seqs.add(seq, np.arange(1, 1 + blocks, dtype=np.int32))
        seqs.num_computed_tokens[row] = length - 1
    return seqs, np.arange(len(lengths))


def wanted(seqs, rows, max_drafts=5, budget=100):
    return wanted_drafts(seqs, rows, seqs.gather_ahead(rows), max_drafts, budget).tolist()


def test_a_request_that_is_sure_to_end_by_its_length_is_not_planned_again():
    """Sure are the tokens that steps in flight bring without drafts: one each."""
    seqs, rows = decoding(10, 10, 10, 10, last=12)
    seqs.num_pending_tokens[:4] = 1, 2, 2, 6
    seqs.num_in_flight_drafts[:4] = 0, 0, 1, 5
    assert ready_rows(seqs, rows).tolist() == [0, 2, 3]


def test_where_all_go_on_the_array_is_the_same():
    """A new one would make the planner lay out everything again."""
    seqs, rows = decoding(3, 4)
    assert ready_rows(seqs, rows) is rows


def test_what_waits_on_the_device_is_verified():
    """No more than was proposed; with a step in flight that will propose, as many as there may."""
    seqs, rows = decoding(3, 3, 3)
    seqs.num_proposed_drafts[:3] = 0, 2, 4
    seqs.num_pending_tokens[:3] = 0, 0, 1
    seqs.num_in_flight_tokens[:3] = 0, 0, 1
    assert wanted(seqs, rows) == [0, 2, 5]
    assert wanted(seqs, rows, max_drafts=3) == [0, 2, 3]


@pytest.mark.parametrize(("last", "drafts"), [(20, 5), (15, 4), (12, 1), (11, 0)])
def test_no_draft_lies_at_a_requests_last_position_or_behind(last, drafts):
    """Of ten tokens, the last one is never written: last - 1 - 10 positions are left."""
    seqs, rows = decoding(10, last=last)
    seqs.num_proposed_drafts[0] = 5
    assert wanted(seqs, rows) == [drafts]


def test_a_prompt_has_no_drafts():
    """Nor has one whose last chunk is planned now: its first token is not known."""
    seqs, rows = decoding(3, 9)
    seqs.num_computed_tokens[1] = 4
    seqs.num_proposed_drafts[:2] = 5
    assert wanted(seqs, rows) == [5, 0]


def test_a_budget_goes_to_the_first_rows_once_each_has_its_token():
    """Ten tokens for three decodes: seven drafts."""
    seqs, rows = decoding(3, 3, 3)
    seqs.num_proposed_drafts[:3] = 5
    assert wanted(seqs, rows, budget=10) == [5, 2, 0]
    assert wanted(seqs, rows, budget=3) == [0, 0, 0]


def test_a_plan_set_out_is_in_flight():
    """Rows, the tokens it brings at most and its drafts are counted; nothing is reserved twice."""
    seqs, _ = decoding(3, 3)
    seqs.num_lookahead_slots[:2] = 2, 0
    plan = step_plan([Run([1] * 9, [1, 2], 2, 3), Run([1] * 9, [3], 2, 1)], 4)
    ahead = LookAhead(
        slots=ids(1, 2),
        is_open=np.array([True, True]),
        num_known=ids(3, 3),
        num_drafts=ids(2, 0),
        num_unsure=ids(0, 0),
        num_pending=ids(3, 1),
        starts=(),
        most_room=5,
    )
    for times in (1, 2):
        set_out(seqs, replace(plan, ahead=ahead))
        assert seqs.num_in_flight_tokens[:2].tolist() == [3 * times, times]
        assert seqs.num_pending_tokens[:2].tolist() == [3 * times, times]
        assert seqs.num_in_flight_drafts[:2].tolist() == [2 * times, 0]
        assert seqs.num_lookahead_slots[:2].tolist() == [0, 0]


def test_a_plan_that_does_not_look_ahead_counts_its_rows_only():
    """Nobody asks what it brings: its result comes first."""
    seqs, _ = decoding(3)
    set_out(seqs, step_plan([Run([1] * 3, [1], 2)], 4))
    assert seqs.num_in_flight_tokens[0] == 1
    assert seqs.num_pending_tokens[0] == 0


@pytest.mark.parametrize(
    ("pending", "drafts", "expected"),
    [
        (0, 0, BlocksAhead(2, 2)),  # three blocks for four tokens: two too many, whatever comes
        (1, 0, BlocksAhead(2, 2)),  # the token that comes needs no place before its own step
        (2, 0, BlocksAhead(2, 1)),
        (7, 5, BlocksAhead(2, 1)),
        (6, 5, BlocksAhead(2, 2)),
    ],
)
def test_blocks_held_ahead_are_told_apart_from_those_for_drafts(pending, drafts, expected):
    """Four tokens, three blocks of four: what known tokens, and what sure ones, do not need."""
    seqs, rows = decoding(4, blocks=3)
    seqs.num_pending_tokens[0], seqs.num_in_flight_drafts[0] = pending, drafts
    assert blocks_ahead(seqs, rows) == expected


def test_a_reservation_is_not_held_ahead():
    """It was granted at admission, whatever is in flight."""
    seqs, rows = decoding(4, blocks=3)
    seqs.num_reserved_blocks[0] = 3
    assert blocks_ahead(seqs, rows) == BlocksAhead(0, 0)
