"""Plans: a right one passes, and each thing made wrong in it is one contradiction."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer.checks.plans import PlanCheck, what_ran
from deepinfer.sequence import SamplingParams, Sequence, SequenceTable
from tests.deepinfer.step_plans import Run, step_plan

SIZE = 4
RUNS = [Run(range(6), [1, 2], computed=5), Run(range(9), [3, 4, 5], computed=6, scheduled=3)]


@pytest.fixture
def seqs():
    """Two running requests: `r0` with 5 committed rows in blocks 1 and 2, `r1` with 6 in 3 to 5."""
    table = SequenceTable(4, 16, SIZE)
    for index, run in enumerate(RUNS):
        tokens = np.array(run.tokens, np.int32)
        seq = Sequence(f"r{index}", index, tokens, len(tokens), SamplingParams())
        seq.num_computed_tokens = run.computed
        table.add(seq, np.array(run.table, np.int32))
    return table


def found(seqs, plan, refs=None, filled=None):
    refs = np.ones(8, np.int32) if refs is None else np.array(refs)
    filled = None if filled is None else np.array(filled)
    return [m for _, m in PlanCheck(plan, seqs, refs, filled, "r{}".format).contradictions()]


def with_entry(values, index, value):
    changed = values.copy()
    changed[index] = value
    return changed


@pytest.mark.parametrize("padding", [0, 3])
def test_a_right_plan_has_no_contradiction(seqs, padding):
    """Padded columns and a copy included."""
    seqs.replace_block(0, 1, 6)
    runs = [replace(RUNS[0], table=[1, 6]), RUNS[1]]
    plan = step_plan(runs, SIZE, padding=padding, copies=[(2, 6)])
    assert found(seqs, plan, filled=[0, 4, 1, 4, 2, 0, 0, 0]) == []


def test_a_stale_table_is_found(seqs):
    """The plan's table is not the request's of now."""
    plan = step_plan([replace(RUNS[0], table=[1, 7]), RUNS[1]], SIZE)
    assert found(seqs, plan) == ["the plan has table [1, 7] for r0, which has [1, 2]"]


def test_padding_that_is_not_zero_is_found(seqs):
    """A padded column names nobody's block."""
    plan = step_plan(RUNS, SIZE)
    plan = replace(plan, block_tables=with_entry(plan.block_tables, (0, 2), 7))
    assert found(seqs, plan) == ["the plan has table [1, 2, 7] for r0, which has [1, 2]"]


def test_an_id_outside_the_pool_is_found(seqs):
    """Even if the request's own table has it."""
    seqs.replace_block(0, 1, 8)
    plan = step_plan([replace(RUNS[0], table=[1, 8]), RUNS[1]], SIZE)
    assert found(seqs, plan) == ["the table of r0 is [1, 8]; ids run from 1 to 7"]


def test_a_table_one_block_short_is_found(seqs):
    """At a block's end the next position needs a new block."""
    seqs.shrink(1, 2)
    plan = step_plan([RUNS[0], replace(RUNS[1], table=[3, 4, 0])], SIZE)
    assert found(seqs, plan) == ["r1 has 2 blocks for 9 positions of 4 a block"]


def test_a_plan_that_does_not_go_on_where_the_rows_end_is_found(seqs):
    """A stale computed count would leave a gap, or write twice."""
    seqs.num_computed_tokens[1] = 5
    assert found(seqs, step_plan(RUNS, SIZE)) == [
        "r1 has 5 committed rows, and the plan computes from position 6 to 8"
    ]


def test_a_slot_outside_its_own_place_is_found(seqs):
    """Also if it is in a block of the same request."""
    plan = step_plan(RUNS, SIZE)
    plan = replace(plan, slot_mapping=with_entry(plan.slot_mapping, 0, 7))
    assert found(seqs, plan) == ["position 5 of r0 goes to slot 7; by its table it is slot 9"]


def test_a_slot_written_twice_is_found(seqs):
    """Two tokens never share a row."""
    plan = step_plan(RUNS, SIZE)
    plan = replace(plan, slot_mapping=with_entry(plan.slot_mapping, 1, 9))
    assert found(seqs, plan)[-1] == "slots [9] are written twice in one step"


def test_sizes_that_differ_are_found(seqs):
    """One slot for each token."""
    plan = step_plan(RUNS, SIZE)
    plan = replace(plan, slot_mapping=plan.slot_mapping[:-1])
    assert found(seqs, plan) == ["[3, 4] tokens, positions and slots in one plan"]


@pytest.mark.parametrize("refs", [0, 2])
def test_a_written_block_has_one_owner(seqs, refs):
    """Neither shared nor nobody's."""
    assert found(seqs, step_plan(RUNS, SIZE), refs=[0, 1, refs, 1, 1, 1, 0, 0]) == [
        f"r0 writes block 2 of {refs} owners, 0 of which only await their copy"
    ]


def test_owners_that_only_await_their_copy_do_not_count(seqs):
    """The parent writes on while the fork's copy of the old rows is queued before it."""
    plan = step_plan(RUNS, SIZE, copies=[(2, 6)])
    assert found(seqs, plan, refs=[0, 1, 2, 1, 1, 1, 1, 0]) == []


@pytest.mark.parametrize(
    ("copies", "owned", "problem"),
    [
        ([(2, 6), (1, 6)], True, "blocks [6] are copied to twice in one step"),
        ([(7, 6), (6, 1)], True, "blocks [6] are copied from and to in one step"),
        ([(2, 8)], True, "[[2, 8]] are copied; ids run from 1 to 7"),
        ([(7, 6)], False, "block 7 is copied, and nobody holds it until the copy is done"),
    ],
)
def test_a_wrong_copy_is_found(seqs, copies, owned, problem):
    """Destinations are distinct and no sources; sources stay owned."""
    plan = step_plan(RUNS, SIZE, copies=copies)
    plan = plan if owned else replace(plan, copy_sources=())
    assert problem in found(seqs, plan)


def test_a_copy_to_a_shared_block_is_found(seqs):
    """Nobody else may see it change."""
    plan = step_plan(RUNS, SIZE, copies=[(2, 6)])
    assert found(seqs, plan, refs=[0, 1, 2, 1, 1, 1, 2, 0]) == ["block 6 of 2 owners is copied to"]


def test_rows_that_nobody_wrote_are_found(seqs):
    """A fork that skipped the copy of its tail, or a count kept from before a preemption."""
    assert found(seqs, step_plan(RUNS, SIZE), filled=[0, 4, 1, 4, 1, 0, 0, 0]) == [
        "r1 reads 2 rows of block 4; 1 were written since it was handed out"
    ]


def ran(seqs, plan):
    return [message for _, message in what_ran(plan, seqs, "r{}".format)]


def test_a_step_that_went_on_where_its_requests_are_is_right(seqs):
    """Drafts may be any tokens; a row that has changed hands is left out."""
    tokens = [*range(6), 77]
    plan = step_plan([Run(tokens, [1, 2], computed=5, scheduled=2), RUNS[1]], SIZE)
    assert ran(seqs, plan) == []
    seqs.epochs[0] += 1
    assert ran(seqs, replace(plan, positions=with_entry(plan.positions, 0, 9))) == []


def test_a_step_that_ran_from_somewhere_else_is_found(seqs):
    """As a count of accepted drafts would have it that is one too high."""
    plan = step_plan([replace(RUNS[0], computed=4), RUNS[1]], SIZE)
    assert ran(seqs, plan) == ["r0 has 5 committed rows, and the step computed from position 4 on"]


def test_a_step_that_ran_with_another_token_is_found(seqs):
    """As a placeholder that nobody replaced."""
    plan = step_plan(RUNS, SIZE)
    plan = replace(plan, token_ids=with_entry(plan.token_ids, 1, 0))
    assert ran(seqs, plan) == ["position 6 of r1 was computed with token 0; its token there is 6"]
