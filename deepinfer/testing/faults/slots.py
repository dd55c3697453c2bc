"""Faults of state slots: whose state a fork starts from, and who gives which slot back.

They sit in the calls of `StateSlots` and in the copies of a step. Knows no checker. Invariant:
blocks, tables and KV rows are all right; what is wrong concerns slots alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from deepinfer.device.base import Event
from deepinfer.engine import LLMEngine
from deepinfer.models.hybrid.cache import HybridCache
from deepinfer.models.hybrid.geometry import OPEN, OPEN_INDEX
from deepinfer.plan import Int32, StepPlan
from deepinfer.release import Fence
from deepinfer.sequence import Sequence
from deepinfer.state_slots import StateSlots
from deepinfer.testing.faults.plant import FaultList, around

SLOTS = FaultList()
FEW = 7  # slots of the pool: as many to hand out as requests may run
GROUPS = OPEN, OPEN_INDEX
Call = Callable[..., Any]


@SLOTS.add("book 4.3.6", num_state_slots=FEW)
def slot_not_copied(engine: LLMEngine) -> None:
    """A fork gets a state slot, and nothing is copied into it."""

    def submit_copies(inner: Call, plan: StepPlan) -> None:
        inner(replace(plan, state_copies=plan.state_copies[:0]))

    around(engine.worker, "submit_copies", submit_copies)


@SLOTS.add("book 4.3.6", num_state_slots=FEW)
def slot_released_before_its_copy(engine: LLMEngine) -> None:
    """A fork does not keep its parent's slot until the copy is done."""
    states = _states(engine)

    def fork(inner: Call, seq: Sequence, parent: Sequence) -> None:
        inner(seq, parent)
        states.release.give_up([parent.state_id], owner=seq.request_id, path="unpin")

    def give_up_sources(inner: Call, plan: StepPlan) -> list[Event]:
        events: list[Event] = inner(
            replace(plan, state_copies=plan.state_copies[:0], state_owners=())
        )
        return events

    around(states, "fork", fork)
    around(engine, "_give_up_sources", give_up_sources)


@SLOTS.add("vllm#15296", num_state_slots=FEW)
def slot_leaked_when_idle(engine: LLMEngine) -> None:
    """The slot of the last running request stays behind: no step follows that would return it."""
    states, scheduler = _states(engine), engine.scheduler

    def give_up(inner: Call, seq: Sequence, fence: Fence | None, path: str) -> None:
        if scheduler.num_running or path == "unpin":
            inner(seq, fence, path)
        seq.state_id = 0

    around(states, "give_up", give_up)


@SLOTS.add("vllm#47728", num_state_slots=FEW)
def state_gone_on_too_far(engine: LLMEngine) -> None:
    """A fork of a short prefix starts from a state whose window has moved on since."""
    states = _states(engine)
    around(states, "can_fork", lambda inner, num_written, num_computed: states.has_room())


@SLOTS.add("none public (I10)", num_state_slots=FEW)
def open_group_of_the_last_owner(engine: LLMEngine) -> None:
    """A fork's slot has the rings of its parent, and open groups of whoever had the slot before."""
    cache = engine.cache
    assert isinstance(cache, HybridCache), "planted in a model that has open groups"
    groups = [
        cache.region(part.kind, part.layer) for part in cache.geometry.slot if part.kind in GROUPS
    ]
    if cache.tags is not None:  # they lie beside the rows, and are copied with them
        groups += [tags for (kind, _), tags in cache.tags.beside.items() if kind in GROUPS]

    @torch.inference_mode()
    def copy_states(inner: Call, pairs: Int32) -> None:
        slots = torch.from_numpy(pairs[:, 1]).long()
        before = [group[slots] for group in groups]
        inner(pairs)
        for group, rows in zip(groups, before, strict=True):
            group[slots] = rows

    around(engine.worker.runner, "copy_states", copy_states)


def _states(engine: LLMEngine) -> StateSlots:
    assert engine.states is not None, "planted in a model whose requests have state"
    return engine.states
