"""Faults of a store's copies: what waits for what, and who may have blocks and buffers meanwhile.

They sit between the step that is queued and the copies beside it, in what a request starts from,
and in when an entry can be found. Knows no checker. Invariant: planted in an engine that has no
store, each would change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from deepinfer.block_manager import BlockIds
from deepinfer.engine import LLMEngine
from deepinfer.entry_bytes import Bytes
from deepinfer.plan import Int32, Rows
from deepinfer.release import Fence
from deepinfer.sequence import RowCounters
from deepinfer.sequence import Sequence as Request
from deepinfer.store_reuse import STORE, Load, Save, StoreReuse
from deepinfer.testing.faults.ahead import LOOKS_AHEAD
from deepinfer.testing.faults.plant import FaultList, around
from deepinfer.testing.faults.scenario import WITH_STORE
from deepinfer.transfers import Transfers

TRANSFERS = FaultList()
FEW: dict[str, Any] = {"num_state_slots": 7}  # as many to hand out as requests may run
Call = Callable[..., Any]


# -- saves -----------------------------------------------------------------------------------------


@TRANSFERS.add("vllm#45704", **WITH_STORE, **FEW, **LOOKS_AHEAD)
def state_saved_beside_its_step(engine: LLMEngine) -> None:
    """A state is copied out without waiting for the step in flight that is still writing it."""
    transfers, scheduler = _transfers(engine), engine.scheduler
    around(engine, "_keep_states", lambda inner: transfers.save_states(scheduler.states_to_keep))


@TRANSFERS.add("vllm#57128", **WITH_STORE, **FEW, **LOOKS_AHEAD)
def state_kept_that_has_gone_on(engine: LLMEngine) -> None:
    """A state is kept for the last boundary behind it, however far it has gone on since."""
    reuse = _reuse(engine)

    def cut_at_boundary(inner: Call, rows: Rows, first: Int32, counts: Int32) -> Int32:
        return counts

    def states_to_keep(
        inner: Call, rows: Rows, ahead: RowCounters, unsure: Int32
    ) -> Sequence[Save]:
        states = reuse._states
        assert states is not None, "planted in a model whose requests have state"
        rewind, states.max_rewind = states.max_rewind, engine.config.max_model_len
        saves: list[Save] = inner(rows, ahead, unsure)
        states.max_rewind = rewind
        return saves

    around(reuse, "cut_at_boundary", cut_at_boundary)
    around(reuse, "states_to_keep", states_to_keep)


@TRANSFERS.add("DingoCache#76", **WITH_STORE)
def blocks_unpinned_before_their_save(engine: LLMEngine) -> None:
    """A save gives up its pins when it is queued, and the blocks are free under its copy."""

    def give_up(
        inner: Call, table: BlockIds, fence: Fence | None = None, *, owner: str, path: str
    ) -> None:
        inner(table, None if owner == STORE else fence, owner=owner, path=path)

    around(engine.release, "give_up", give_up)


@TRANSFERS.add("none public (I7)", **WITH_STORE)
def entry_found_before_its_bytes(engine: LLMEngine) -> None:
    """An entry can be found as soon as its copy is queued, and is loaded before it has come."""
    transfers = _transfers(engine)

    def save(inner: Call, *args: Any) -> Fence | None:
        fence: Fence | None = inner(*args)
        if fence is not None:
            copy = transfers._copies[-1]
            copy.ended()
            copy.ended = lambda: None
        return fence

    around(transfers, "_save", save)


# -- loads -----------------------------------------------------------------------------------------


@TRANSFERS.add("TensorRT-LLM#9056", **WITH_STORE, release="ordered")
def load_into_blocks_still_in_use(engine: LLMEngine) -> None:
    """A load does not wait for the work that is open on the blocks it fills."""

    def begin(inner: Call, load: Load) -> None:
        load.waits = []
        inner(load)

    around(_transfers(engine), "begin", begin)


@TRANSFERS.add("none public (I7)", **WITH_STORE)
def runs_before_its_load(engine: LLMEngine) -> None:
    """A request runs once its load is queued, beside the copy that fills its blocks."""
    loading = engine.scheduler._held

    def poll(inner: Call) -> tuple[list[Load], list[Load]]:
        _, failed = inner()
        return [load for load in loading.loading if load.fence is not None], failed

    around(_transfers(engine), "poll", poll)


@TRANSFERS.add("vllm#45357", **WITH_STORE)
def blocks_of_a_load_free_at_once(engine: LLMEngine) -> None:
    """A request that is aborted while it loads returns its blocks with the load still open."""
    held = engine.scheduler._held

    def leave(inner: Call, seq: Request) -> Fence | None:
        loads = any(load.seq is seq for load in held.loading)
        fence: Fence | None = inner(seq)
        return None if loads else fence

    around(held, "_leave", leave)


@TRANSFERS.add("vllm#47926", **WITH_STORE, **FEW)
def state_not_loaded(engine: LLMEngine) -> None:
    """Of what was kept the rows of blocks are loaded, and the state behind them is not."""

    def begin(inner: Call, load: Load) -> None:
        for part in load.parts:
            if part.is_state:
                part.fetch.close()
        load.parts = [part for part in load.parts if not part.is_state]
        inner(load)

    around(_transfers(engine), "begin", begin)


class _Recycling:
    """Host memory that hands out again what it was given back, as a pool of pinned buffers does."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []

    def allocate(self, num_bytes: int) -> Bytes:
        for number, buffer in enumerate(self._free):
            if len(buffer) == num_bytes:
                return self._free.pop(number)
        return np.empty(num_bytes, np.uint8)

    def free(self, buffer: Bytes) -> None:
        self._free.append(buffer)


@TRANSFERS.add("LMCache#4830", **WITH_STORE | {"store_bytes": 20_000})  # one segment
def buffer_reused_under_its_load(engine: LLMEngine) -> None:
    """A load lets go of its host buffers when it is queued, and the next save writes over them."""
    transfers, store = _transfers(engine), engine.store
    assert store is not None, "planted in an engine with a store"
    store.host._memory = _Recycling()

    def submit(inner: Call, load: Load) -> None:
        inner(load)
        for part in load.parts:
            part.fetch.close()
        copy = transfers._copies[-1]
        copy.ended = lambda: transfers._came.append(load)

    around(transfers, "_submit", submit)


# -- parts -----------------------------------------------------------------------------------------


def _transfers(engine: LLMEngine) -> Transfers:
    assert engine.transfers is not None, "planted in an engine with a store"
    return engine.transfers


def _reuse(engine: LLMEngine) -> StoreReuse:
    assert engine.scheduler.store_reuse is not None, "planted in an engine with a store"
    return engine.scheduler.store_reuse
