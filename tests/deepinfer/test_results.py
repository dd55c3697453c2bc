"""A result written back: counters, tokens, and who has ended; of drafts what was accepted."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.lookahead import set_out
from deepinfer.plan import AheadResult, StepResult
from deepinfer.planning import PlanBuilder, StepCopies
from deepinfer.results import ResultWriter, committed_rows
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


def write_back(seqs, plan, result):
    return ResultWriter(seqs).write_back(plan, result)


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


def test_one_writer_follows_the_set_of_rows():
    """What it looked up for one set is not used for another, nor for a part of it."""
    seqs, plan = planned(4, 2, 4)
    writer = ResultWriter(seqs)
    writer.write_back(plan, result(5, 6, 7))

    def step(rows, *tokens):
        rows = np.array(rows)
        counts = np.ones(len(rows), np.int32)
        after = PlanBuilder(seqs).build(2, rows, seqs.gather(rows), counts, StepCopies())
        commit = writer.write_back(after, result(*tokens))
        return [seq.request_id for seq in commit.sequences], [why for _, why in commit.finished]

    assert step([0, 1, 2], 5, 6, 7) == (["r0", "r1", "r2"], ["length"])
    seqs.remove(seqs.at(1))
    assert step([0, 2], 5, 9) == (["r0", "r2"], ["stop"])
    assert step([2, 0], 3, 4) == (["r2", "r0"], ["length", "length"])
    assert seqs.token_ids[[0, 2], 2:6].tolist() == [[5, 5, 5, 4], [7, 7, 9, 3]]


# -- plans that look ahead -------------------------------------------------------------------------


def ids(*values):
    return np.array(values, np.int32)


def in_flight(*drafts, depth=1, stop=9):
    """Sequences of five tokens, four computed, and plans that verify so many drafts of each."""
    seqs = SequenceTable(4, 40, 4)
    for index in range(len(drafts)):
        sampling = SamplingParams(max_tokens=12, stop_token_id=stop)
        seq = Sequence(f"r{index}", index, ids(1, 2, 3, 4, 5), 5, sampling)
        seq.draft_slot = index + 1
        seqs.add(seq, ids(2 * index + 1, 2 * index + 2))
        seqs.num_computed_tokens[index] = 4
    rows, builder, plans = np.arange(len(drafts)), PlanBuilder(seqs, looks_ahead=True), []
    for step in range(1, depth + 1):
        counters = seqs.gather_ahead(rows)
        plan = builder.build(step, rows, counters, ids(*drafts) + 1, StepCopies(), ids(*drafts))
        set_out(seqs, plan)
        plans.append(plan)
    return seqs, plans


def verified(plan, tokens, num_new, num_verified, num_proposed):
    """The result of a plan that looked ahead."""
    ahead = AheadResult(ids(*num_new), ids(*num_verified), ids(*num_proposed))
    return StepResult(
        plan.step, ids(*tokens), -np.arange(len(tokens), dtype=np.float32), None, ahead
    )


COUNTERS = ("num_in_flight_tokens", "num_pending_tokens", "num_in_flight_drafts")


def test_what_was_accepted_is_committed_and_nothing_is_left_in_flight():
    """Two of three drafts, none of two, no draft at all: as many rows computed as tokens came."""
    seqs, (plan,) = in_flight(3, 2, 0)
    result = verified(plan, [6, 7, 8, 16, 26], [3, 1, 1], [3, 2, 0], [1, 0, 3])
    commit = write_back(seqs, plan, result)
    assert seqs.num_computed_tokens[:3].tolist() == [7, 5, 5]
    assert seqs.num_tokens[:3].tolist() == [8, 6, 6]
    assert seqs.token_ids[0, 5:9].tolist() == [6, 7, 8, 0]
    assert seqs.token_ids[1:3, 5].tolist() == [16, 26]
    assert seqs.logprobs[0, 5:8].tolist() == [0, -1, -2]
    assert seqs.num_proposed_drafts[:3].tolist() == [1, 0, 3]
    for counter in COUNTERS:
        assert not getattr(seqs, counter).any(), counter
    assert [seq.request_id for seq in commit.sequences] == ["r0", "r0", "r0", "r1", "r2"]
    assert commit.token_ids.tolist() == [6, 7, 8, 16, 26]
    assert commit.finished == []


def test_what_is_still_in_flight_stays_counted():
    """Of two steps the first is collected: the second may bring four tokens, three drafts."""
    seqs, (first, second) = in_flight(3, depth=2)
    assert [int(getattr(seqs, counter)[0]) for counter in COUNTERS] == [8, 8, 6]
    write_back(seqs, first, verified(first, [6], [1], [3], [3]))
    assert [int(getattr(seqs, counter)[0]) for counter in COUNTERS] == [4, 4, 3]
    write_back(seqs, second, verified(second, [7, 8], [2], [3], [0]))
    assert [int(getattr(seqs, counter)[0]) for counter in COUNTERS] == [0, 0, 0]
    assert seqs.token_ids[0, 5:8].tolist() == [6, 7, 8]
    assert seqs.num_computed_tokens[0] == 7


def test_rejected_drafts_count_for_how_far_the_state_was_written():
    """All rows planned were written, whether there was a draft or not; nothing takes that back."""
    seqs, (first, second) = in_flight(3, depth=2)
    write_back(seqs, first, verified(first, [6], [1], [2], [0]))
    assert seqs.num_written_tokens[0] == 8
    write_back(seqs, second, verified(second, [7], [1], [0], [0]))
    assert (seqs.num_written_tokens[0], seqs.num_computed_tokens[0]) == (9, 6)
    assert seqs.state_end(0) == 9


@pytest.mark.parametrize(("stop", "kept"), [(6, 1), (7, 2), (8, 3), (5, 3)])
def test_what_the_device_accepted_behind_a_stop_token_is_dropped(stop, kept):
    """It knows nothing of stop tokens. The sequence beside has one of its own."""
    seqs, (plan,) = in_flight(3, 3, 0, stop=stop)
    seqs.stop_token_ids[1] = 17
    result = verified(plan, [6, 7, 8, stop, 17, 18, 26], [3, 3, 1], [3, 3, 0], [1, 2, 3])
    commit = write_back(seqs, plan, result)
    assert seqs.num_tokens[:3].tolist() == [5 + kept, 7, 6]
    assert seqs.num_computed_tokens[:3].tolist() == [4 + kept, 6, 5]
    assert seqs.token_ids[0, 5 : 5 + kept + 1].tolist() == [*[6, 7, 8][:kept], 0]
    assert commit.token_ids.tolist() == [*[6, 7, 8][:kept], stop, 17, 26]
    ended = [(seq.request_id, why) for seq, why in commit.finished]
    assert ended == [("r0", "stop")] * (stop != 5) + [("r1", "stop")]
    for counter in COUNTERS:
        assert not getattr(seqs, counter).any(), counter


def test_a_stop_token_of_a_sequence_that_got_nothing_ends_nobody():
    """The first one has ended already; its neighbour's token is its own stop token."""
    seqs, (plan,) = in_flight(3, 0, stop=16)
    seqs.stop_token_ids[1] = 9
    commit = write_back(seqs, plan, verified(plan, [16], [0, 1], [0, 0], [0, 0]))
    assert [seq.request_id for seq in commit.sequences] == ["r1"]
    assert commit.finished == []


def test_a_sequence_that_ends_among_its_drafts_is_named_once():
    """By the token that ends it, or by its length."""
    seqs, (plan,) = in_flight(3, 3)
    seqs.max_total_tokens[1] = 7
    result = verified(plan, [6, 9, 16, 17], [2, 2], [3, 3], [0, 0])
    commit = write_back(seqs, plan, result)
    assert [(seq.request_id, why) for seq, why in commit.finished] == [
        ("r0", "stop"),
        ("r1", "length"),
    ]


def test_a_sequence_that_the_device_left_out_gets_nothing():
    """It had ended by what the device knew, and its plan's rows are in flight no more."""
    seqs, (plan,) = in_flight(3, 0)
    commit = write_back(seqs, plan, verified(plan, [16], [0, 1], [0, 0], [0, 0]))
    assert [seq.request_id for seq in commit.sequences] == ["r1"]
    assert (seqs.num_tokens[0], seqs.num_computed_tokens[0]) == (5, 4)
    assert not seqs.num_in_flight_tokens.any()


def test_a_stale_frame_changes_no_counter_of_the_rows_new_owner():
    """Several tokens of the old owner are skipped, and those behind them reach their sequence."""
    seqs, (plan,) = in_flight(3, 3)
    old = seqs.at(0)
    seqs.remove(old)
    seqs.add(old, ids(7, 8))  # resumed in the same row
    seqs.num_in_flight_tokens[0], seqs.num_pending_tokens[0] = 5, 1
    before = seqs.gather(np.array([0]))
    commit = write_back(seqs, plan, verified(plan, [6, 7, 16], [2, 1], [3, 3], [2, 1]))
    assert [seq.request_id for seq in commit.sequences] == ["r1"]
    assert commit.token_ids.tolist() == [16]
    assert commit.logprobs.tolist() == [-2]
    assert [c.tolist() for c in seqs.gather(np.array([0]))] == [c.tolist() for c in before]
    assert (seqs.num_pending_tokens[0], seqs.num_proposed_drafts[0]) == (1, 0)
    assert (seqs.num_written_tokens[0], seqs.num_proposed_drafts[1]) == (0, 1)


def test_committed_rows_are_those_of_the_blocks_a_plan_wrote():
    """From the first position it may have written to the last one committed, with their holders."""
    seqs = SequenceTable(2, 20, 4)
    for index, table in enumerate(([3, 5, 7], [2, 4, 6])):
        seq = Sequence(f"r{index}", index, np.arange(10, dtype=np.int32), 10, SamplingParams())
        seqs.add(seq, np.array(table, np.int32))
    seqs.num_computed_tokens[:2] = 5
    rows = np.arange(2)
    counts = np.full(2, 5, np.int32)
    plan = PlanBuilder(seqs).build(1, rows, seqs.gather(rows), counts, StepCopies())
    write_back(seqs, plan, result(1, 1))
    committed = committed_rows(seqs, plan)
    assert committed.ids.tolist() == [5, 7, 4, 6]
    assert committed.start.tolist() == [0, 0, 0, 0]
    assert committed.end.tolist() == [4, 2, 4, 2]
    assert committed.holders.tolist() == [0, 0, 1, 1]
    seqs.remove(seqs.at(0))
    assert committed_rows(seqs, plan).ids.tolist() == [4, 6]


def test_committed_rows_begin_where_a_plan_made_ahead_may_have_begun():
    """Planned for 8 to 11, in the third block of four; three drafts before may all be rejected."""
    seqs, (first, second) = in_flight(3, depth=2)
    assert second.positions.tolist() == [8, 9, 10, 11]
    write_back(seqs, first, verified(first, [6], [1], [3], [3]))
    write_back(seqs, second, verified(second, [7], [1], [3], [3]))
    assert committed_rows(seqs, second).ids.tolist() == [2]  # positions 4 and 5
