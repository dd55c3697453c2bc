"""Faults of planning: a plan or a counter that says something else than what is so.

Tables, slots, copies and computed counts as a wrong scheduler would make them. Knows no checker.
Invariant: owners, fences and device calls are right for what was planned; the plan is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine import LLMEngine
from deepinfer.fork import ForkSplit
from deepinfer.plan import Int32, Int64, Rows, StepPlan, StepResult
from deepinfer.results import Commit
from deepinfer.sequence import RowCounters, Sequence
from deepinfer.testing.faults.plant import FaultList, around, change_plans
from deepinfer.worker import InFlightStep

PLANNED = FaultList()
Call = Callable[..., Any]
NO_BLOCKS = np.empty(0, np.int32)


# -- tables and slots ------------------------------------------------------------------------------


class _OneShort(RowCounters):
    """Counters by which a row that has filled its blocks needs no new one."""

    def blocks_needed(self, block_size: int) -> Int32:
        needed = super().blocks_needed(block_size)
        just_begun = self.num_tokens % block_size == 1
        return np.where(just_begun, np.minimum(needed, self.num_blocks), needed)


@PLANNED.add("MinivLLM#85")
def table_one_short(engine: LLMEngine) -> None:
    """At k * B rows the new block is not taken: the next row is written past the table."""

    def gather(inner: Call, rows: Rows) -> RowCounters:
        return _OneShort(*inner(rows))

    around(engine.scheduler._fitting, "gather", gather)


@PLANNED.add("vllm#16370")
def reservation_rounded_down(engine: LLMEngine) -> None:
    """A request is admitted with the blocks that its prompt fills, without the one it begins."""

    def reservation(inner: Call, seq: Sequence) -> int:
        count = int(inner(seq))
        begins_one = seq.num_tokens % engine.config.block_size > 0
        return count - 1 if begins_one and count > 1 and not len(seq.forked_table) else count

    around(engine.scheduler._admission, "_reservation", reservation)


@PLANNED.add("lmdeploy#4569")
def stale_table(engine: LLMEngine) -> None:
    """A table that grew is not laid out anew: the step reads by the table of the step before."""
    seqs = engine.scheduler.seqs

    def grow(inner: Call, rows: Rows, counts: Int32, ids: Int32) -> None:
        inner(rows, counts, ids)
        seqs.tables_version -= 1

    around(seqs, "grow", grow)


@PLANNED.add("vllm#46066")
def placeholder_computed(engine: LLMEngine) -> None:
    """Every third step has a placeholder where the newest token of its first request belongs."""

    def change(plan: StepPlan) -> StepPlan:
        if plan.step % 3:
            return plan
        token_ids = plan.token_ids.copy()
        newest = int(plan.query_start[1]) - 1
        token_ids[newest] = 0 if token_ids[newest] else 1
        return replace(plan, token_ids=token_ids)

    change_plans(engine, change)


@PLANNED.add("text-generation-inference#2711")
def slot_after_slot(engine: LLMEngine) -> None:
    """A row goes to the slot behind the row before it, also where the table says another block."""
    block_size = engine.config.block_size

    def change(plan: StepPlan) -> StepPlan:
        slots = plan.slot_mapping.copy()
        for i, (start, position) in enumerate(
            zip(plan.query_start.tolist(), plan.positions[plan.query_start[:-1]], strict=False)
        ):
            if position and position % block_size == 0:
                before = int(plan.block_tables[i, (position - 1) // block_size])
                slots[start] = (before + 1) * block_size
        return replace(plan, slot_mapping=slots)

    change_plans(engine, change)


@PLANNED.add("vllm#43810")
def padding_in_last_block(engine: LLMEngine) -> None:
    """The slot of a padded row is -1, which is the last row of the last block."""
    _pad_steps(engine, engine.config.num_blocks * engine.config.block_size - 1)


@PLANNED.add("rvllm#32")
def padding_in_live_slot(engine: LLMEngine) -> None:
    """A padded row writes the first row behind block 0, which is somebody's."""
    _pad_steps(engine, engine.config.block_size)


# -- forks and copies ------------------------------------------------------------------------------


@PLANNED.add("book 4.2")
def tail_not_copied(engine: LLMEngine) -> None:
    """A fork gets a block for its tail, and nothing is copied into it."""
    change_plans(engine, lambda plan: replace(plan, block_copies=plan.block_copies[:0]))


@PLANNED.add("book 4.3.6")
def partial_tail_shared(engine: LLMEngine) -> None:
    """A fork keeps its parent's partial block, and both write the rows behind it."""

    def split(inner: Call, seq: Sequence) -> ForkSplit:
        return ForkSplit(seq.forked_table, NO_BLOCKS, False)

    around(engine.scheduler._admission, "_split", split)
    _never_copy_on_write(engine)


@PLANNED.add("book 4.2")
def written_while_shared(engine: LLMEngine) -> None:
    """A parent writes on into the partial block that a waiting fork has pinned."""
    _never_copy_on_write(engine)


@PLANNED.add("vllm#417")
def copy_repeated(engine: LLMEngine) -> None:
    """The copies of a step are done again in the next one, over rows written since."""
    last = [np.empty((0, 2), np.int32)]

    def change(plan: StepPlan) -> StepPlan:
        copies = np.concatenate((last[0], plan.block_copies))
        last[0] = plan.block_copies
        return replace(plan, block_copies=copies)

    change_plans(engine, change)


@PLANNED.add("vllm#53505")
def copy_swapped(engine: LLMEngine) -> None:
    """A copy goes from the new block to the old one."""
    change_plans(engine, lambda plan: replace(plan, block_copies=plan.block_copies[:, ::-1]))


@PLANNED.add("TensorRT-LLM#12665")
def one_block_too_many_shared(engine: LLMEngine) -> None:
    """A fork counts a block more as computed than its parent has."""
    block_size = engine.config.block_size
    _count_as_computed(
        engine,
        lambda seq: seq.num_computed_tokens + block_size if seq.num_computed_tokens else 0,
    )


# -- counters --------------------------------------------------------------------------------------


@PLANNED.add("vllm#17305")
def computed_count_kept(engine: LLMEngine) -> None:
    """A preempted request comes back with new blocks and the old count of computed rows."""
    seqs, kept = engine.scheduler.seqs, dict[str, int]()

    def remove(inner: Call, seq: Sequence) -> Int32:
        kept[seq.request_id] = int(seqs.num_computed_tokens[seq.row])
        table: Int32 = inner(seq)
        return table

    around(seqs, "remove", remove)
    _count_as_computed(engine, lambda seq: kept.get(seq.request_id, seq.num_computed_tokens))


@PLANNED.add("vllm#46066")
def stale_result(engine: LLMEngine) -> None:
    """A late result sets the counters of a row that has changed hands since."""
    seqs, frames = engine.scheduler.seqs, list[StepPlan]()

    def commit(inner: Call, plan: StepPlan, result: StepResult) -> Commit:
        done = inner(plan, result)
        assert isinstance(done, Commit)
        for late in frames:
            changed = (seqs.epochs[late.rows] != late.epochs) & (seqs.num_tokens[late.rows] > 0)
            rows = late.rows[changed & (seqs.num_blocks[late.rows] > 0)]
            lengths = seqs.num_tokens[rows] - 1
            seqs.num_computed_tokens[rows] = np.minimum(
                late.context_lens[np.isin(late.rows, rows)], lengths
            )
        frames[:] = [plan]
        return done

    around(engine.scheduler, "commit", commit)


# -- parts -----------------------------------------------------------------------------------------


def _count_as_computed(engine: LLMEngine, count: Callable[[Sequence], int]) -> None:
    """Rows of a sequence that gets a row count as computed, as far as it has tokens."""
    seqs = engine.scheduler.seqs

    def add(inner: Call, seq: Sequence, *args: Any) -> int:
        row = int(inner(seq, *args))
        seqs.num_computed_tokens[row] = min(count(seq), seq.num_tokens - 1)
        return row

    around(seqs, "add", add)


def _never_copy_on_write(engine: LLMEngine) -> None:
    def copy_on_write(inner: Call, rows: Rows, counters: RowCounters) -> NDArray[np.bool_]:
        return np.zeros(len(rows), bool)

    around(engine.scheduler._fitting, "copy_on_write", copy_on_write)


def _pad_steps(engine: LLMEngine, slot: int) -> None:
    """Bring every step to a number of sequences that is even, the padded one writing `slot`."""

    def submit_forward(inner: Call, plan: StepPlan) -> InFlightStep:
        flight = inner(_padded(plan, slot) if plan.num_seqs % 2 else plan)
        assert isinstance(flight, InFlightStep)
        return flight

    around(engine.worker, "submit_forward", submit_forward)


def _padded(plan: StepPlan, slot: int) -> StepPlan:
    """The plan with a sequence more: one token at position 0, which samples nothing."""

    def with_one(array: NDArray[Any], value: int) -> NDArray[Any]:
        return np.append(array, np.array([value], array.dtype))

    slots: Int64 = with_one(plan.slot_mapping, slot)
    return replace(
        plan,
        rows=with_one(plan.rows, int(plan.rows[-1])),
        epochs=with_one(plan.epochs, int(plan.epochs[-1])),
        num_scheduled=with_one(plan.num_scheduled, 1),
        query_start=with_one(plan.query_start, plan.num_tokens + 1),
        context_lens=with_one(plan.context_lens, 1),
        token_ids=with_one(plan.token_ids, 0),
        positions=with_one(plan.positions, 0),
        slot_mapping=slots,
        block_tables=np.pad(plan.block_tables, ((0, 1), (0, 0))),
        tags=None if plan.tags is None else np.pad(plan.tags, ((0, 1), (0, 0))),
    )
