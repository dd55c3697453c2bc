"""Plans: rows and token counts become positions, slots and tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.lookahead import set_out
from deepinfer.plan import PLACEHOLDER
from deepinfer.planning import PlanBuilder, StepCopies, behind_drafts, in_order, split_budget
from deepinfer.sequence import SamplingParams, Sequence, SequenceTable


def ids(*values):
    return np.array(values, np.int32)


def table_of(*sequences, block_size=4, max_num_seqs=8):
    """A table with (tokens, computed, blocks, seed) in rows; the rows in that order."""
    seqs = SequenceTable(max_num_seqs, 40, block_size)
    rows = []
    for index, (tokens, computed, table) in enumerate(sequences):
        sampling = SamplingParams(temperature=index / 2, seed=100 + index)
        seq = Sequence(f"r{index}", index, ids(*tokens), len(tokens), sampling)
        row = seqs.add(seq, ids(*table))
        seqs.num_computed_tokens[row] = computed
        rows.append(row)
    return seqs, np.array(rows, np.intp)


def build(seqs, rows, scheduled, builder=None):
    builder = builder or PlanBuilder(seqs)
    return builder.build(1, rows, seqs.gather(rows), ids(*scheduled), StepCopies())


@pytest.mark.parametrize(
    ("uncomputed", "budget", "split"),
    [
        ([1, 5, 1], 9, [1, 5, 1]),
        ([1, 5, 1], 5, [1, 3, 1]),
        ([5, 1, 7], 8, [5, 1, 2]),
        ([5, 6, 1], 4, [3, 0, 1]),
        ([5, 1], 1, [0, 1]),
    ],
)
def test_decodes_come_first_then_chunks_in_order(uncomputed, budget, split):
    """No running decode is starved by a long prompt, whatever the order."""
    assert split_budget(ids(*uncomputed), budget).tolist() == split


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(12, 200))
def test_a_budget_is_used_up_and_never_exceeded(uncomputed, budget):
    """The split sums to the smaller of what is wanted and what is allowed."""
    split = split_budget(ids(*uncomputed), budget)
    assert split.dtype == np.int32
    assert int(split.sum()) == min(sum(uncomputed), budget)
    assert (split >= 0).all()
    assert (split <= ids(*uncomputed)).all()


def test_a_mixed_step_is_laid_out_one_sequence_after_the_other():
    """A chunk, a decode and a last chunk share a step; only those at their last token sample."""
    seqs, rows = table_of(
        ([10, 11, 12, 13, 14, 15], 0, [5, 2]),
        ([20, 21, 22], 2, [3]),
        ([30, 31, 32, 33, 34], 3, [7, 4]),
    )
    plan = build(seqs, rows, [5, 1, 2])
    assert plan.query_start.tolist() == [0, 5, 6, 8]
    assert plan.token_ids.tolist() == [10, 11, 12, 13, 14, 22, 33, 34]
    assert plan.positions.tolist() == [0, 1, 2, 3, 4, 2, 3, 4]
    assert plan.slot_mapping.tolist() == [20, 21, 22, 23, 8, 14, 31, 16]
    assert plan.context_lens.tolist() == [5, 3, 5]
    assert plan.block_tables.tolist() == [[5, 2], [3, 0], [7, 4]]
    assert plan.sample_seq.tolist() == [1, 2]
    assert plan.sample_positions.tolist() == [3, 5]
    assert plan.temperature.tolist() == [0.5, 1.0]
    assert plan.seeds.tolist() == [101, 102]


def test_dtypes_are_those_the_device_was_promised():
    """Slots and seeds are int64, everything else the plan's int32."""
    seqs, rows = table_of(([1, 2], 1, [1]))
    plan = build(seqs, rows, [1])
    assert plan.rows.dtype == np.intp
    assert plan.slot_mapping.dtype == plan.seeds.dtype == np.int64
    for name in ("epochs", "num_scheduled", "query_start", "context_lens", "token_ids"):
        assert getattr(plan, name).dtype == np.int32
    for name in ("positions", "block_tables", "sample_seq", "sample_positions", "block_copies"):
        assert getattr(plan, name).dtype == np.int32
    assert plan.temperature.dtype == np.float32


def test_a_plan_does_not_change_when_the_host_goes_on():
    """The device may run behind: growth, commits and new rows leave a made plan as it was."""
    seqs, rows = table_of(([1, 2, 3], 2, [1]), ([4, 5], 1, [2]))
    builder = PlanBuilder(seqs)
    plan = build(seqs, rows, [1, 1], builder)
    before = [np.copy(a) for a in (plan.token_ids, plan.positions, plan.block_tables)]
    seqs.token_ids[:] = 9
    seqs.num_computed_tokens[:] = 7
    seqs.temperature[:] = 3
    seqs.grow(rows, ids(1, 1), ids(5, 6))
    build(seqs, rows, [1, 1], builder)
    for old, new in zip(before, (plan.token_ids, plan.positions, plan.block_tables), strict=True):
        assert old.tolist() == new.tolist()
    assert plan.temperature.tolist() == [0.0, 0.5]


def test_a_changed_table_is_seen_by_the_next_plan():
    """What is laid out once and shared is laid out again when a table or the rows change."""
    seqs, rows = table_of(([1, 2, 3], 2, [1]), ([4, 5], 1, [2]))
    builder = PlanBuilder(seqs)
    build(seqs, rows, [1, 1], builder)
    seqs.replace_block(int(rows[1]), 0, 6)
    assert build(seqs, rows, [1, 1], builder).block_tables.tolist() == [[1], [6]]
    swapped = build(seqs, rows[::-1].copy(), [1, 1], builder)
    assert swapped.block_tables.tolist() == [[6], [1]]
    assert swapped.seeds.tolist() == [101, 100]


class WideTable:
    """Has the shape of a table of 2^32 entries, and gives back the flat indices it is asked for."""

    shape = (2, 2**31)

    def ravel(self):
        return self

    def take(self, flat):
        return flat


def test_a_table_of_more_than_2_31_tokens():
    """Row times width is computed in 64 bits: flat indices do not wrap around."""
    seqs, rows = table_of(([1], 0, [1]), ([1, 2], 1, [2]))
    seqs.token_ids = WideTable()
    plan = build(seqs, rows, [1, 1])
    assert plan.token_ids.tolist() == [0, 2**31 + 1]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_slots_agree_with_the_block_tables(data):
    """Whatever the chunks, each token lies where its table says, and no slot occurs twice."""
    block_size = data.draw(st.integers(1, 5))
    free = data.draw(st.permutations(range(1, 60)))
    sequences, scheduled = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.integers(1, 12))
        computed = data.draw(st.integers(0, length - 1))
        scheduled.append(data.draw(st.integers(1, length - computed)))
        count = -(-length // block_size)
        sequences.append((range(length), computed, free[:count]))
        free = free[count:]
    seqs, rows = table_of(*sequences, block_size=block_size)
    plan = build(seqs, rows, scheduled)
    expected = [
        table[p // block_size] * block_size + p % block_size
        for (_, computed, table), count in zip(sequences, scheduled, strict=True)
        for p in range(computed, computed + count)
    ]
    assert plan.slot_mapping.tolist() == expected
    assert len(set(expected)) == len(expected)


# -- plans that look ahead -------------------------------------------------------------------------


def build_ahead(seqs, rows, drafts, builder=None, step=1):
    """The next plan of rows that decode, each with so many drafts, and it is set out."""
    builder = builder or PlanBuilder(seqs, looks_ahead=True)
    counters, drafts = seqs.gather_ahead(rows), ids(*drafts)
    plan = builder.build(step, rows, counters, drafts + 1, StepCopies(), drafts)
    set_out(seqs, plan)
    return plan


def test_each_sampling_sequence_samples_behind_its_drafts_too():
    """Sequence 0 has two drafts, 1 does not sample, 2 has none, 3 has one."""
    behind, seq = behind_drafts(ids(2, 5, 0, 1), ids(0, 2, 3))
    assert behind.tolist() == [2, 1, 0, 0, 1, 0]
    assert seq.tolist() == [0, 0, 0, 2, 3, 3]
    assert behind.dtype == seq.dtype == np.int32


@pytest.mark.parametrize(
    ("left", "granted"),
    [(9, [3, 0, 5]), (8, [3, 0, 5]), (4, [3, 0, 1]), (2, [2, 0, 0]), (-1, [0] * 3)],
)
def test_what_is_left_goes_to_the_first(left, granted):
    """Each gets what it asked for as long as there is any."""
    assert in_order(ids(3, 0, 5), left).tolist() == granted


def test_drafts_and_unknown_tokens_are_placeholders():
    """The known last token of each row is there; where its drafts are the host does not see."""
    seqs, rows = table_of(([1, 2, 3], 2, [1, 2]), ([4, 5], 1, [3]))
    plan = build_ahead(seqs, rows, [2, 0])
    assert plan.token_ids.tolist() == [3, PLACEHOLDER, PLACEHOLDER, 5]
    assert plan.positions.tolist() == [2, 3, 4, 1]
    assert plan.context_lens.tolist() == [5, 2]
    assert plan.sample_seq.tolist() == [0, 0, 0, 1]
    assert plan.sample_tokens.tolist() == [0, 1, 2, 3]
    assert plan.sample_positions.tolist() == [3, 4, 5, 2]
    assert plan.seeds.tolist() == [100, 100, 100, 101]
    ahead = plan.ahead
    assert ahead is not None
    assert ahead.is_open.tolist() == [True, False]
    assert (ahead.num_known.tolist(), ahead.num_pending.tolist()) == ([3, 2], [3, 1])
    assert ahead.num_unsure.tolist() == [0, 0]


def test_the_next_plan_begins_where_all_in_flight_would_be_accepted():
    """With the first step's three tokens the second begins at position 5, or up to two before."""
    seqs, rows = table_of(([1, 2, 3], 2, [1, 2, 3]))
    builder = PlanBuilder(seqs, looks_ahead=True)
    build_ahead(seqs, rows, [2], builder)
    plan = build_ahead(seqs, rows, [1], builder, step=2)
    assert plan.positions.tolist() == [5, 6]
    assert plan.token_ids.tolist() == [PLACEHOLDER, PLACEHOLDER]
    assert plan.ahead is not None
    assert plan.ahead.num_unsure.tolist() == [2]
    assert plan.ahead.num_known.tolist() == [3]


def test_the_device_is_told_of_a_new_request_once():
    """With the first plan after it got its row; what it is told stays as it was."""
    seqs, rows = table_of(([1, 2, 3], 2, [1, 2]))
    builder, seq = PlanBuilder(seqs, looks_ahead=True), seqs.at(0)
    seq.draft_slot = 4
    builder.started(seq)
    first = build_ahead(seqs, rows, [0], builder).ahead
    second = build_ahead(seqs, rows, [0], builder, step=2).ahead
    assert first is not None
    assert second is not None
    (start,) = first.starts
    assert (start.slot, start.request_id, start.token_ids.tolist()) == (4, "r0", [1, 2, 3])
    assert (start.num_prompt_tokens, start.max_total_tokens) == (3, seq.max_total_tokens)
    assert second.starts == ()


def test_a_builder_that_does_not_look_ahead_tells_nothing():
    """Its plans are complete."""
    seqs, rows = table_of(([1, 2, 3], 2, [1]))
    builder = PlanBuilder(seqs)
    builder.started(seqs.at(0))
    assert build(seqs, rows, [1], builder).ahead is None
