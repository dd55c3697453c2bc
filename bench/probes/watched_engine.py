"""An engine that is watched: the notes of each step, and every time a block changed hands.

Knows the engine's public moments and its block pool; knows no format. Invariant: it decides
nothing, so a watched engine emits the tokens of an unwatched one.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench.arrivals import RequestSpec, build_requests
from bench.probes.watch import Annotate, Notes, Operation, Span, WatchedDevice, no_annotation
from bench.runner import Round, RoundResult, Target
from bench.spec import Resolved
from deepinfer.block_manager import BlockIds, BlockManager
from deepinfer.engine import LLMEngine
from deepinfer.errors import UserError
from deepinfer.outputs import StepOutput, StepStats

ALLOCATE, RELEASE, LIFT = "allocate", "release", "lift"


class PoolChange(NamedTuple):
    """Blocks that changed hands in one call, and the pool behind it.

    Attributes:
        verb: `allocate`; `release` (of the last owner); `lift` (of the last fence).
        block_ids: those that changed their state, in order.
        withheld: of a release: whether a fence keeps some of them.
    """

    verb: str
    start_ns: int
    end_ns: int
    block_ids: tuple[int, ...]
    withheld: bool
    num_free: int
    num_held: int
    num_withheld: int


class WatchedBlocks(BlockManager):
    """A block manager that keeps a list of its changes."""

    def __init__(self, num_blocks: int, **settings: Any) -> None:
        super().__init__(num_blocks, **settings)
        self.changes: list[PoolChange] = []

    def allocate(self, count: int) -> Any:
        """As `BlockManager.allocate`."""
        start_ns = time.perf_counter_ns()
        ids = super().allocate(count)
        self._note(ALLOCATE, start_ns, ids)
        return ids

    def allocate_one(self) -> int:
        """As `BlockManager.allocate_one`."""
        start_ns = time.perf_counter_ns()
        block_id = super().allocate_one()
        self._note(ALLOCATE, start_ns, [block_id])
        return block_id

    def release(self, table: BlockIds, *, fenced: bool = False) -> BlockIds:
        """As `BlockManager.release`."""
        start_ns = time.perf_counter_ns()
        ids = super().release(table, fenced=fenced)
        self._note(RELEASE, start_ns, [i for i in ids if not self.ref_count(int(i))])
        return ids

    def lift(self, block_ids: BlockIds) -> None:
        """As `BlockManager.lift`."""
        start_ns = time.perf_counter_ns()
        withheld = [i for i in block_ids if not self.ref_count(int(i))]
        super().lift(block_ids)
        self._note(LIFT, start_ns, [i for i in withheld if not self._fence_counts[int(i)]])

    def _note(self, verb: str, start_ns: int, ids: BlockIds) -> None:
        if len(ids):
            end_ns = time.perf_counter_ns()
            block_ids = tuple(dict.fromkeys(map(int, ids)))
            withheld = any(self._fence_counts[block_id] for block_id in block_ids)
            counts = (self.num_free, self.num_held, self.num_withheld)
            self.changes.append(PoolChange(verb, start_ns, end_ns, block_ids, withheld, *counts))


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """One step: its numbers, what its streams did, and where the host waited."""

    stats: StepStats
    operations: list[Operation]
    host_waits: list[Span]


@dataclass(frozen=True, slots=True)
class Watched:
    """All of one round; `ahead`: whether steps were planned while others ran."""

    device: WatchedDevice
    steps: list[WatchedStep]
    changes: list[PoolChange]
    result: RoundResult
    ahead: bool = False


class WatchedEngine(LLMEngine):
    """An engine on a `WatchedDevice`, with the notes of each step in `steps`."""

    def __init__(
        self,
        resolved: Resolved,
        target: Target,
        requests: list[RequestSpec],
        annotate: Annotate = no_annotation,
    ) -> None:
        self.watch = WatchedDevice(target.device_of(resolved), annotate)
        self.steps: list[WatchedStep] = []
        self._submitted: deque[Notes] = deque()  # of steps that are in flight
        super().__init__(
            resolved.model,
            resolved.engine,
            device=self.watch,
            weights=target.weights,
            block_manager=WatchedBlocks,
            drafter=target.drafter(resolved, requests),
        )

    def submit(self) -> bool:
        """As `LLMEngine.submit`."""
        submitted = super().submit()
        if submitted:
            self._submitted.append(self.watch.take_notes())
        return submitted

    def collect(self) -> StepOutput:
        """As `LLMEngine.collect`."""
        output = super().collect()
        first, then = self._submitted.popleft(), self.watch.take_notes()
        self.steps.append(
            WatchedStep(
                output.stats,
                first.operations + then.operations,
                first.host_waits + then.host_waits,
            )
        )
        return output

    @property
    def changes(self) -> list[PoolChange]:
        """The pool's changes so far."""
        assert isinstance(self.blocks, WatchedBlocks), "made with this class"
        return self.blocks.changes


def draw_requests(resolved: Resolved, index: int = 0) -> list[RequestSpec]:
    """The requests of a round, as every round of `run` has them."""
    return build_requests(resolved.workload, resolved.seed, resolved.model.vocab_size, index)


def run_plain(
    resolved: Resolved,
    target: Target,
    requests: list[RequestSpec],
    engine: LLMEngine | None = None,
) -> RoundResult:
    """A round of these requests, on a new engine unless one is given."""
    round_ = Round(resolved, target, requests, cell=0, index=0, warmup=False, engine=engine)
    return round_.run()


def run_watched(
    resolved: Resolved,
    target: Target,
    requests: list[RequestSpec],
    annotate: Annotate = no_annotation,
) -> Watched:
    """A round on a watched engine, its device times ready to be placed."""
    engine = WatchedEngine(resolved, target, requests, annotate)
    result = run_plain(resolved, target, requests, engine)
    engine.watch.stop()
    ahead = engine.max_in_flight > 1
    return Watched(engine.watch, engine.steps, engine.changes, result, ahead)


def nothing_ran(resolved: Resolved) -> UserError:
    """The error of a profile that has no step to show."""
    return UserError(
        f"workload {resolved.workload.name}: no step ran, every request was refused",
        hint="more of num_blocks or max_model_len, or shorter requests (--scale-lengths)",
    )


def num_wrong(resolved: Resolved, target: Target, result: RoundResult) -> int:
    """Requests of a round whose tokens the dense reference does not confirm."""
    verdicts = target.verify(list(result.emissions.values()), resolved.verify)
    wrong = {name for name, v in zip(result.emissions, verdicts, strict=True) if v.wrong}
    return len(wrong | result.problems.keys())
