"""Faults of ownership: who gives up which block, how often, and when it may be handed out again.

They sit in the calls of the release queue and the block manager, where an engine's own code would
have them. Knows no checker. Invariant: each breaks one rule (conservation, owners,
fences, one release per owner) and touches no plan and no device call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from deepinfer.block_manager import BlockIds, Verdict
from deepinfer.engine import LLMEngine
from deepinfer.fork_sources import FORK_SOURCE
from deepinfer.plan import StepPlan
from deepinfer.release import Fence
from deepinfer.sequence import Sequence
from deepinfer.testing.faults.plant import FaultList, around

OWNERSHIP = FaultList()
Call = Callable[..., Any]


# -- when a block may be handed out again ----------------------------------------------------------


@OWNERSHIP.add("book 4.2", of_client=True, release="early")
def early_with_unordered_writer(engine: LLMEngine) -> None:
    """The policy `early` beside a client that writes blocks on a stream of its own."""


@OWNERSHIP.add("book 4.2")
def release_before_copy(engine: LLMEngine) -> None:
    """The source of a tail copy is free as soon as the copy is queued."""
    _without_fence(engine, FORK_SOURCE)


@OWNERSHIP.add("vllm#45357", release="step")
def release_with_step_in_flight(engine: LLMEngine) -> None:
    """A request that ends returns its blocks with a step in flight that still writes them."""
    _without_fence(engine, "abort")


@OWNERSHIP.add("vllm#45704", release="polled")
def fence_passed_by_host_order(engine: LLMEngine) -> None:
    """The result of a step counts as proof that every other stream is done as well."""

    def collected(inner: Call, step: int) -> None:
        for entry in engine.release._entries:
            entry.fence.passed = True
        inner(step)

    around(engine.release, "collected", collected)


@OWNERSHIP.add("vllm#49674", release="polled")
def withheld_counted_as_free(engine: LLMEngine) -> None:
    """Where blocks are short, those that a fence withholds are handed out too."""
    release = engine.release

    def make_room(inner: Call, count: int) -> bool:
        if count > release.blocks.num_free:
            for entry in release._entries:
                entry.fence.passed = True
        return bool(inner(count))

    around(release, "make_room", make_room)


@OWNERSHIP.add("vllm-ascend#10843", release="polled")
def withheld_for_ever(engine: LLMEngine) -> None:
    """A release is put off, but behind nothing that will ever pass."""

    def withhold(inner: Call, table: BlockIds, fence: Fence) -> None:
        engine.blocks.release(table, fenced=True)

    around(engine.release, "withhold", withhold)


@OWNERSHIP.add("none public (I3)", release="polled")
def second_fence_dropped(engine: LLMEngine) -> None:
    """A block that is behind a fence already gets no second one, and is free with the first."""

    def withhold(inner: Call, table: BlockIds, fence: Fence) -> None:
        fences = engine.blocks._fence_counts
        ids = np.asarray(table, np.int32)
        first = np.array([not fences[i] for i in ids.tolist()], bool)
        engine.blocks.release(ids[~first])
        inner(ids[first], fence)

    around(engine.release, "withhold", withhold)


@OWNERSHIP.add("vllm#51482")
def free_order_lost_when_withheld(engine: LLMEngine) -> None:
    """Withheld blocks join the free list in another order than those freed at once."""

    def withhold(inner: Call, table: BlockIds, fence: Fence) -> None:
        inner(table, fence)
        entry = engine.release._entries[-1]
        entry.ids = entry.ids[::-1]

    around(engine.release, "withhold", withhold)


@OWNERSHIP.add("TensorRT-LLM#9056", release="ordered")
def ordered_without_wait(engine: LLMEngine) -> None:
    """Blocks are handed out at once, and no stream waits for who had them before."""

    def take_waits(inner: Call) -> list[Fence]:
        inner()
        return []

    around(engine.scheduler, "take_waits", take_waits)


# -- how often -------------------------------------------------------------------------------------


@OWNERSHIP.add("book 4.3.8")
def double_release(engine: LLMEngine) -> None:
    """A finished request drops its owners twice: of shared blocks it takes another's too."""
    _once_more(engine, "finish")


@OWNERSHIP.add("LMCache#1130")
def fork_unpinned_twice(engine: LLMEngine) -> None:
    """A fork that is aborted while it waits drops its pins twice."""
    _once_more(engine, "unpin")


@OWNERSHIP.add("LMCache#5090")
def abort_after_finish(engine: LLMEngine) -> None:
    """Aborting a request that has just finished drops its owners a second time."""
    last: dict[str, BlockIds] = {}

    def give_up(inner: Call, table: BlockIds, *args: Any, owner: str, path: str) -> None:
        if path == "finish":
            last[owner] = table
        inner(table, *args, owner=owner, path=path)

    def abort(inner: Call, request_id: str) -> Sequence:
        _drop(engine, last.pop(request_id, []), owner=request_id, path="abort")
        result = inner(request_id)
        assert isinstance(result, Sequence)
        return result

    around(engine.release, "give_up", give_up)
    around(engine.scheduler, "abort", abort)


@OWNERSHIP.add("vllm#42571")
def twice_in_one_release_list(engine: LLMEngine) -> None:
    """One release list names a block twice, and both count."""

    def give_up(inner: Call, table: BlockIds, *args: Any, **keys: Any) -> None:
        shared = [i for i in table if engine.blocks.ref_count(int(i)) > 1]
        inner(np.concatenate((table, shared[:1])).astype(np.int32), *args, **keys)

    around(engine.release, "give_up", give_up)


@OWNERSHIP.add("dynamo#13398")
def freed_twice(engine: LLMEngine) -> None:
    """A released block is appended to the free list twice."""

    def release(inner: Call, table: BlockIds, *, fenced: bool = False) -> BlockIds:
        ids: BlockIds = inner(table, fenced=fenced)
        free = [i for i in ids if not engine.blocks.ref_count(int(i)) and not fenced]
        engine.blocks._free.push(free[:1])
        return ids

    around(engine.blocks, "release", release)


@OWNERSHIP.add("TensorRT-LLM#699")
def leak_on_abort(engine: LLMEngine) -> None:
    """An aborted request returns nothing."""
    _not_at_all(engine, "abort")


@OWNERSHIP.add("vllm#49675")
def leak_on_preemption(engine: LLMEngine) -> None:
    """A preempted request returns nothing, so the next victim is taken, and the next."""
    _not_at_all(engine, "preempt")


@OWNERSHIP.add("LMCache#3884")
def fork_source_never_unpinned(engine: LLMEngine) -> None:
    """A fork keeps its pin on the block it has copied."""
    _not_at_all(engine, FORK_SOURCE)


# -- of which block --------------------------------------------------------------------------------


@OWNERSHIP.add("apache/tvm#16666")
def fork_not_counted(engine: LLMEngine) -> None:
    """A fork shares its parent's blocks without becoming their owner."""

    def fork(inner: Call, *args: Any, **keys: Any) -> Verdict:
        around(engine.blocks, "pin", lambda pin, ids: None)
        try:
            verdict = inner(*args, **keys)
        finally:
            del vars(engine.blocks)["pin"]
        assert isinstance(verdict, Verdict)
        return verdict

    around(engine.scheduler, "fork", fork)


@OWNERSHIP.add("DingoCache#76", of_client=True)
def save_not_pinned(engine: LLMEngine) -> None:
    """A save reads blocks without owning them, and its request gives them away."""

    def fork(inner: Call, *args: Any, **keys: Any) -> Verdict:
        no_pin = vars(engine.blocks).pop("pin")
        try:
            verdict = inner(*args, **keys)
        finally:
            vars(engine.blocks)["pin"] = no_pin
        assert isinstance(verdict, Verdict)
        return verdict

    around(engine.blocks, "pin", lambda pin, ids: None)
    around(engine.scheduler, "fork", fork)
    _not_at_all(engine, "save")


@OWNERSHIP.add("TensorRT-LLM#12648")
def wrong_block_unpinned(engine: LLMEngine) -> None:
    """After a copy its destination is released instead of its source."""
    copied: dict[int, int] = {}

    def submit_copies(inner: Call, plan: StepPlan) -> None:
        copied.clear()
        copied.update(plan.block_copies.tolist())
        inner(plan)

    def give_up(inner: Call, table: BlockIds, *args: Any, **keys: Any) -> None:
        if keys.get("path") == FORK_SOURCE:
            table = [copied.get(int(i), int(i)) for i in table]
        inner(table, *args, **keys)

    around(engine.worker, "submit_copies", submit_copies)
    around(engine.release, "give_up", give_up)


@OWNERSHIP.add("vllm-rbln#957")
def block_zero_in_the_pool(engine: LLMEngine) -> None:
    """Block 0 is handed out like any other."""
    engine.blocks._free.push([0])


@OWNERSHIP.add("vllm#39734")
def never_treated_as_later(engine: LLMEngine) -> None:
    """A request that can never fit is queued, and all behind it wait for ever."""

    def can_allocate(inner: Call, count: int) -> Verdict:
        verdict = inner(count)
        return Verdict.OK if verdict is Verdict.OK else Verdict.LATER

    around(engine.blocks, "can_allocate", can_allocate)


# -- parts -----------------------------------------------------------------------------------------


def _without_fence(engine: LLMEngine, wrong_path: str) -> None:
    def give_up(
        inner: Call, table: BlockIds, fence: Fence | None = None, *, owner: str, path: str
    ) -> None:
        inner(table, None if path == wrong_path else fence, owner=owner, path=path)

    around(engine.release, "give_up", give_up)


def _not_at_all(engine: LLMEngine, wrong_path: str) -> None:
    def give_up(inner: Call, table: BlockIds, *args: Any, owner: str, path: str) -> None:
        if path != wrong_path:
            inner(table, *args, owner=owner, path=path)

    around(engine.release, "give_up", give_up)


def _once_more(engine: LLMEngine, wrong_path: str) -> None:
    def give_up(inner: Call, table: BlockIds, *args: Any, owner: str, path: str) -> None:
        inner(table, *args, owner=owner, path=path)
        if path == wrong_path:
            _drop(engine, table, owner=owner, path="once more")

    around(engine.release, "give_up", give_up)


def _drop(engine: LLMEngine, table: BlockIds, *, owner: str, path: str) -> None:
    """Release those of `table` that others own: of a block without owner it would be refused."""
    owned = [int(i) for i in table if engine.blocks.ref_count(int(i))]
    engine.release.give_up(owned, owner=owner, path=path)
