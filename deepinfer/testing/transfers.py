"""Loads and saves: a client of the block pool beside the engine, on a stream of its own.

The engine orders its own work: a step waits for the copies before it, and copies for the step
before them. A transfer between the KV pool and somewhere else does not: it runs on `load`, and
nothing puts it behind the steps but what the release policy promises about the blocks it gets.

    load_in   takes blocks   writes them on `load`      use: a reader on `compute` waits for that
    save_out  pins blocks    reads them on `load`       and gives the pins up behind its fence

What is in the rows is the `Rows`' business. Knows no release policy. Invariant: it does what a
writer must do under a safe policy and no more: asks for room, waits on its own stream for the
fences of the blocks it got, and gives up whatever it held behind a fence of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from deepinfer.device.base import COMPUTE, Event
from deepinfer.engine import LLMEngine
from deepinfer.observer import KV, NO_STEP, Access
from deepinfer.plan import Int32
from deepinfer.release import Fence
from deepinfer.sequence import blocks_for


class Rows(Protocol):
    """Reads and writes what is in the rows of blocks."""

    def committed(self, request_id: str, num_rows: int) -> Any:
        """On the host, as a save is queued: what the request's first rows are to be found as."""
        ...

    def write(self, block_ids: Int32, num_rows: int, content: Any) -> None:
        """Inside submitted work: fill the first `num_rows` rows; a load's `content` is its name."""
        ...

    def read(self, block_ids: Int32, num_rows: int, content: Any) -> int:
        """Inside submitted work: how many of the first `num_rows` rows do not hold `content`."""
        ...


@dataclass(slots=True)
class _Load:
    block_ids: Int32
    num_rows: int
    written: Event
    fence: Fence


class Transfers:
    """Loads into, and saves out of, the block pool of one engine.

    Args:
        engine: whose blocks, device and release queue they use.
        rows: what they move.
        stream: on which they run.

    Attributes:
        wrong_rows: rows found different from what they should have been.
    """

    def __init__(self, engine: LLMEngine, rows: Rows, *, stream: str = "load") -> None:
        self.wrong_rows = 0
        self._engine = engine
        self._rows = rows
        self._stream = engine.device.stream(stream)
        self._compute = engine.device.stream(COMPUTE)
        self._copy = engine.device.stream("copy")
        self._block_size = engine.config.block_size
        self._loads: dict[str, _Load] = {}
        self._open: list[tuple[Fence, Event]] = []
        engine.add_holder(lambda: self.held.values())

    @property
    def held(self) -> dict[str, Int32]:
        """The blocks of every load that has not been given up."""
        return {name: load.block_ids for name, load in self._loads.items()}

    def load_in(self, name: str, num_rows: int) -> bool:
        """Take blocks for `num_rows` rows and fill them; False, and nothing done, without room."""
        release, count = self._engine.release, blocks_for(num_rows, self._block_size)
        if not release.make_room(count):
            return False
        block_ids = self._engine.blocks.allocate(count)
        if release.observer is not None:
            release.observer.took(name, block_ids, "load")
        for fence in release.fences_before_writing(block_ids):
            fence.hold(self._stream)
        self._stream.submit(
            lambda: self._rows.write(block_ids, num_rows, name),
            writes=(self._access(block_ids, num_rows),),
            label=f"load {name}",
        )
        written = self._engine.device.event()
        self._stream.record(written)
        fence = Fence(NO_STEP, written)
        self._loads[name] = _Load(block_ids, num_rows, written, fence)
        self._open.append((fence, written))
        return True

    def use(self, name: str) -> None:
        """Read a load's rows on `compute`, behind its writing, and give its blocks up."""
        load = self._loads.pop(name)
        self._compute.wait(load.written)
        self._read(self._compute, f"use {name}", load.block_ids, load.num_rows, name)
        self._give_up(name, load.block_ids, self._fence(self._compute), "load")

    def drop(self, name: str) -> None:
        """Give a load's blocks up unread, behind its writing."""
        load = self._loads.pop(name)
        self._give_up(name, load.block_ids, load.fence, "load")

    def save_out(self, name: str, request_id: str) -> Fence:
        """Read a running request's committed rows, of which there must be some.

        Returns the fence behind which its pins are given up.
        """
        scheduler = self._engine.scheduler
        row = scheduler.find(request_id).row
        num_rows = int(scheduler.seqs.num_computed_tokens[row])
        assert row >= 0, "not running"
        assert num_rows > 0, "nothing committed"
        block_ids = scheduler.seqs.table(row)[: blocks_for(num_rows, self._block_size)]
        content = self._rows.committed(request_id, num_rows)
        self._engine.blocks.pin(block_ids)
        if self._engine.release.observer is not None:
            self._engine.release.observer.took(name, block_ids, "save")
        copied = self._engine.device.event()  # committed rows of a fork may be on their way
        self._copy.record(copied)
        self._stream.wait(copied)
        self._engine.device.recycle(copied)
        self._read(self._stream, f"save {name}", block_ids, num_rows, content)
        fence = self._fence(self._stream)
        self._give_up(name, block_ids, fence, "save")
        return fence

    def tidy(self) -> None:
        """Give the events of finished transfers back to the device; looks at each of them."""
        still_open = []
        for fence, event in self._open:
            if fence.query():
                self._engine.device.recycle(event)
            else:
                still_open.append((fence, event))
        self._open = still_open

    # -- inside ----------------------------------------------------------------------------------

    def _read(self, stream: Any, label: str, block_ids: Int32, num_rows: int, content: Any) -> None:
        def read() -> None:
            self.wrong_rows += self._rows.read(block_ids, num_rows, content)

        stream.submit(read, reads=(self._access(block_ids, num_rows),), label=label)

    def _fence(self, stream: Any) -> Fence:
        event = self._engine.device.event()
        stream.record(event)
        fence = Fence(NO_STEP, event)
        self._open.append((fence, event))
        return fence

    def _give_up(self, name: str, block_ids: Int32, fence: Fence, path: str) -> None:
        self._engine.release.give_up(block_ids, fence, owner=name, path=path)

    def _access(self, block_ids: Int32, num_rows: int) -> Access:
        starts = np.arange(len(block_ids), dtype=np.int32) * self._block_size
        ends = np.minimum(num_rows - starts, self._block_size)
        return Access(KV, block_ids, np.zeros(len(block_ids), np.int32), ends)
