"""Faults of steps planned ahead and of drafts: what is in flight, counted or put in wrongly.

They sit where a plan meets what the device found: in what steps carry on, in what a result changes,
and in what a rejection gives back. Knows no checker. Invariant: planned in an engine that neither
overlaps steps nor verifies drafts, each would change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from deepinfer.engine import LLMEngine
from deepinfer.models.hybrid.layer_plan import HybridConfig
from deepinfer.plan import Int32, Rows, StepPlan, StepResult
from deepinfer.results import Commit
from deepinfer.runners import load_model, make_runner
from deepinfer.step_inputs import StepInputs
from deepinfer.testing.faults.plant import FaultList, around

AHEAD = FaultList()
LOOKS_AHEAD: dict[str, Any] = {"overlap": "2", "drafts": 3}
FEW = 7  # state slots of the pool: as many to hand out as requests may run
Call = Callable[..., Any]


@AHEAD.add("none public (I6)", **LOOKS_AHEAD)
def draft_row_read_after_rejection(engine: LLMEngine) -> None:
    """The context of a step reaches to the end of the last one's drafts, rejected or not."""
    size, ends = engine.config.block_size, dict[tuple[int, int], int]()

    def forward(inner: Call, inputs: StepInputs) -> Any:
        plan = inputs.plan
        keys = list(zip(plan.rows.tolist(), plan.epochs.tolist(), strict=True))
        held = np.count_nonzero(plan.block_tables, axis=1) * size
        ended = np.array([ends.get(key, 0) for key in keys], np.int32)
        context_lens = np.maximum(plan.context_lens, np.minimum(ended, held)).astype(np.int32)
        ends.update(zip(keys, plan.context_lens.tolist(), strict=True))
        tags = plan.tags
        if tags is not None and (more := int(context_lens.max()) - tags.shape[1]) > 0:
            tags = np.pad(tags, ((0, 0), (0, more)))
        longer = replace(plan, context_lens=context_lens, tags=tags)
        return inner(replace(inputs, plan=longer))

    around(engine.worker.runner, "forward", forward)


class _ExactWindow(HybridConfig):
    """A network whose rings have rows for the window and for nothing that may be rejected."""

    @property
    def ring_len(self) -> int:
        """As many rows as a query sees."""
        return self.sliding_window


@AHEAD.add("mlx-lm#1109", num_state_slots=FEW, **LOOKS_AHEAD)
def ring_without_room_for_drafts(engine: LLMEngine) -> None:
    """A ring has as many rows as the window, so rejected drafts have overwritten rows in use."""
    model = engine.model
    assert isinstance(model, HybridConfig), "planted in a model that has rings"
    short = _ExactWindow(**{name: getattr(model, name) for name in model.__dataclass_fields__})
    weights = engine.device.run(lambda: load_model(model, engine.device))
    engine.worker.runner = make_runner(short, engine.config, weights, engine.device, tags=True)


# Steps in flight write at least as far as the rejected drafts did, so there are none here.
@AHEAD.add("none public (I6)", num_state_slots=FEW, drafts=LOOKS_AHEAD["drafts"])
def state_overwritten_by_rejected_drafts(engine: LLMEngine) -> None:
    """A fork starts from a state of which rejected drafts have overwritten what it still needs."""
    seqs = engine.scheduler.seqs

    def state_end(inner: Call, row: int) -> int:
        return int(seqs.num_computed_tokens[row] + seqs.num_in_flight_tokens[row])

    around(seqs, "state_end", state_end)


@AHEAD.add("none public (I3)", **LOOKS_AHEAD)
def shrunk_under_a_step_in_flight(engine: LLMEngine) -> None:
    """At a commit a table is cut to what its known tokens need, and the rest is free at once."""
    seqs, tables = engine.scheduler.seqs, engine.scheduler._tables

    def commit(inner: Call, plan: StepPlan, result: StepResult) -> Commit:
        done = inner(plan, result)
        assert isinstance(done, Commit)
        alive = seqs.epochs[plan.rows] == plan.epochs
        for row in plan.rows[alive].tolist():
            needed = -(-int(seqs.num_tokens[row]) // seqs.block_size)
            if needed < seqs.num_blocks[row]:
                tables.shrink(row, needed, None)
        return done

    around(engine.scheduler, "commit", commit)


@AHEAD.add("none public (I6)", **LOOKS_AHEAD)
def optimistic_count_never_corrected(engine: LLMEngine) -> None:
    """Rejected drafts go on counting as tokens that steps in flight will bring."""
    seqs = engine.scheduler.seqs

    def commit(inner: Call, plan: StepPlan, result: StepResult) -> Commit:
        done = inner(plan, result)
        assert isinstance(done, Commit)
        ahead, found = plan.ahead, result.ahead
        if ahead is not None and found is not None:
            alive = seqs.epochs[plan.rows] == plan.epochs
            rejected = (ahead.num_pending - found.num_new)[alive]
            seqs.num_pending_tokens[plan.rows[alive]] += rejected
        return done

    around(engine.scheduler, "commit", commit)


@AHEAD.add("vllm#47900", **LOOKS_AHEAD)
def stale_frame_applied(engine: LLMEngine) -> None:
    """A late result counts for whoever has the row by now, be it the same request come back."""
    seqs = engine.scheduler.seqs

    def commit(inner: Call, plan: StepPlan, result: StepResult) -> Commit:
        has_owner = seqs.num_blocks[plan.rows] > 0
        epochs = np.where(has_owner, seqs.epochs[plan.rows], plan.epochs)
        done = inner(replace(plan, epochs=epochs), result)
        assert isinstance(done, Commit)
        return done

    around(engine.scheduler, "commit", commit)


@AHEAD.add("none public (I6)", **LOOKS_AHEAD)
def accepted_draft_forgotten(engine: LLMEngine) -> None:
    """The device's own length leaves out the last of several tokens that a step has brought."""
    carry = engine.worker._carry
    assert carry is not None, "planted where steps look ahead"

    @torch.inference_mode()
    def verify(inner: Call, planned: Int32, slots: Any, lengths: Any, sampled: Any) -> Any:
        num_new, verified = inner(planned, slots, lengths, sampled)
        carry._num_tokens.index_copy_(0, slots, lengths + num_new - (num_new > 1).long())
        return num_new, verified

    around(carry, "_verify", verify)


@AHEAD.add("none public (I6)", **LOOKS_AHEAD)
def moved_one_too_few(engine: LLMEngine) -> None:
    """Sequences of which drafts were rejected begin a position behind where they are."""
    carry = engine.worker._carry
    assert carry is not None, "planted where steps look ahead"

    @torch.inference_mode()
    def put_in(inner: Call, plan: StepPlan) -> Any:
        ahead = plan.ahead
        assert ahead is not None, "every plan is made ahead"
        moved = np.flatnonzero(ahead.is_open & (ahead.num_unsure > 0))
        slots = ahead.slots[moved].tolist()
        most = (plan.context_lens - plan.num_scheduled + 1)[moved].tolist()
        true = [int(carry._num_tokens[slot]) for slot in slots]
        for slot, longest, count in zip(slots, most, true, strict=True):
            carry._num_tokens[slot] = min(count + 1, max(longest, count))
        inputs = inner(plan)
        for slot, count in zip(slots, true, strict=True):
            carry._num_tokens[slot] = count
        return inputs

    around(carry, "put_in", put_in)


@AHEAD.add("vllm#46066", **LOOKS_AHEAD)
def placeholder_after_a_skipped_step(engine: LLMEngine) -> None:
    """The newest token comes from the step right before: who sat it out computes a placeholder."""
    carry, last = engine.worker._carry, list[Rows]()

    def put_in(inner: Call, plan: StepPlan) -> StepInputs:
        inputs = inner(plan)
        assert isinstance(inputs, StepInputs)
        before = last.pop() if last else plan.rows
        last.append(plan.rows)
        if plan.ahead is None:
            return inputs
        sat_out = np.flatnonzero(plan.ahead.is_open & ~np.isin(plan.rows, before))
        newest, token_ids = plan.query_start[sat_out], inputs.plan.token_ids.copy()
        token_ids[newest] = np.where(token_ids[newest] == 0, 1, 0)
        runs = replace(inputs.plan, token_ids=token_ids)
        return replace(inputs, plan=runs, token_ids=engine.device.upload(token_ids))

    around(carry, "put_in", put_in)
