"""Faults of the device queue: work that is queued in the wrong order, or not ordered at all.

They drop, move or misplace single calls of streams and events, above whatever watches the device.
Knows no checker. Invariant: every plan and every owner is right; only what orders the work is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from deepinfer.block_manager import BlockIds
from deepinfer.device.base import COMPUTE, Event
from deepinfer.engine import LLMEngine
from deepinfer.fork_sources import FORK_SOURCE
from deepinfer.observer import RECORD, STAGING, Access
from deepinfer.plan import StepPlan, StepResult
from deepinfer.release import Fence
from deepinfer.testing.faults.plant import FaultList, around
from deepinfer.worker import InFlightStep

QUEUED = FaultList()
Call = Callable[..., Any]


@QUEUED.add("TensorRT-LLM#9056", release="step")
def forward_before_its_copies(engine: LLMEngine) -> None:
    """The forward pass does not wait for the copies of its step."""

    def wait(inner: Call, event: Event) -> None:
        if event is not engine.worker._copied:
            inner(event)

    around(engine.device.stream(COMPUTE), "wait", wait)


@QUEUED.add("book 4.3.7")
def event_before_copies(engine: LLMEngine) -> None:
    """The event that releases the sources is recorded before the copies are queued."""
    device, early = engine.device, list[Event]()

    def submit_copies(inner: Call, plan: StepPlan) -> None:
        if len(plan.block_copies):
            early[:] = [device.event()]
            device.stream("copy").record(early[0])
        inner(plan)

    around(engine.worker, "submit_copies", submit_copies)
    _change_source_fences(engine, lambda fence: Fence(fence.step, early[0]))


@QUEUED.add("none public (I3)")
def event_recycled_while_pending(engine: LLMEngine) -> None:
    """The event that releases the sources goes back to the pool before it has passed."""

    def give_up_sources(inner: Call, plan: StepPlan) -> list[Event]:
        for event in inner(plan):
            engine.device.recycle(event)
        return []

    around(engine, "_give_up_sources", give_up_sources)


@QUEUED.add("TensorRT-LLM#9056")
def fence_on_wrong_stream(engine: LLMEngine) -> None:
    """The event that releases the sources is recorded on a stream that does not copy."""
    device = engine.device

    def elsewhere(fence: Fence) -> Fence:
        event = device.event()
        device.stream("load").record(event)
        return Fence(fence.step, event)

    _change_source_fences(engine, elsewhere)


@QUEUED.add("TensorRT-LLM#9056", release="ordered")
def hold_on_wrong_stream(engine: LLMEngine) -> None:
    """The stream of copies waits for who had a new block before, and not the one that writes it."""

    def hold_streams(inner: Call, fence: Fence) -> None:
        fence.hold(engine.device.stream("copy"))

    around(engine, "_hold_streams", hold_streams)


@QUEUED.add("TensorRT-LLM#15546")
def staging_rewritten(engine: LLMEngine) -> None:
    """The host reuses the array of slots for the next step before the device has read it."""
    slots = engine.config.num_blocks * engine.config.block_size

    def submit_forward(inner: Call, plan: StepPlan) -> InFlightStep:
        flight = inner(plan)
        assert isinstance(flight, InFlightStep)
        plan.slot_mapping[:] = (plan.slot_mapping + engine.config.block_size) % slots
        engine.device.on_host("next plan", writes=(Access(STAGING, np.array([plan.step])),))
        return flight

    around(engine.worker, "submit_forward", submit_forward)


@QUEUED.add("none public (I16)")
def result_read_early(engine: LLMEngine) -> None:
    """The host reads the sampled tokens without waiting for the step."""

    def submit_forward(inner: Call, plan: StepPlan) -> InFlightStep:
        flight = inner(plan)
        assert isinstance(flight, InFlightStep)

        def collect(wait_and_read: Call, timeout_s: float | None = None) -> StepResult:
            is_there = flight.end.query()
            engine.device.on_host("collect", reads=(Access(RECORD, np.array([plan.step])),))
            result = wait_and_read(timeout_s)
            assert isinstance(result, StepResult)
            if is_there:
                return result
            nothing = np.zeros_like  # what a new buffer holds
            return StepResult(plan.step, nothing(result.token_ids), nothing(result.logprobs))

        around(flight, "collect", collect)
        return flight

    around(engine.worker, "submit_forward", submit_forward)


# -- of the client beside the engine ---------------------------------------------------------------


@QUEUED.add("vllm#45704", of_client=True, release="step")
def save_before_its_rows(engine: LLMEngine) -> None:
    """A save does not wait for the copies that fill the blocks it reads."""
    around(engine.device.stream("load"), "wait", lambda wait, event: None)


@QUEUED.add("TensorRT-LLM#9056", of_client=True)
def load_used_before_written(engine: LLMEngine) -> None:
    """Who reads a load does not wait for what fills it."""

    def wait(inner: Call, event: Event) -> None:
        if event is engine.worker._copied:
            inner(event)

    around(engine.device.stream(COMPUTE), "wait", wait)


# -- parts -----------------------------------------------------------------------------------------


def _change_source_fences(engine: LLMEngine, change: Callable[[Fence], Fence]) -> None:
    """Let the sources of a step's copies be given up behind what `change` makes of their fence."""

    def give_up(
        inner: Call, table: BlockIds, fence: Fence | None = None, *, owner: str, path: str
    ) -> None:
        if path == FORK_SOURCE and fence is not None:
            fence = change(fence)
        inner(table, fence, owner=owner, path=path)

    around(engine.release, "give_up", give_up)
