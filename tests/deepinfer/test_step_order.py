"""One step of the engine, in order: what an observer is told, with steps planned ahead and without.

plan -> copies queued -> clone event recorded -> forward and sampling queued
     -> pre-sampler point: deferred releases -> collect N-1 -> commit
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.engine import LLMEngine
from deepinfer.observer import Access, BlockIds, Observer
from deepinfer.plan import StepPlan, StepResult
from deepinfer.results import Commit
from deepinfer.sequence import SamplingParams
from deepinfer.testing.faults.plant import around
from deepinfer.testing.faults.scenario import CONFIG, MODEL

FEW_TOKENS = replace(MODEL, vocab_size=4)  # so that what follows was there before: there are drafts
PROMPT = [0, 1, 2, 3, 3, 2, 1, 0, 2, 0]


class Log(Observer):
    """What happens, one line each, between two calls of `take`."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._copied: set[int] = set()  # events recorded behind copies

    def watch(self, engine: LLMEngine) -> None:
        """Note plans and commits too, of which no observer is told."""
        around(engine.scheduler, "schedule", self._schedule)
        around(engine.scheduler, "commit", self._commit)

    def take(self) -> list[str]:
        """The lines since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def _schedule(self, inner: Callable[[], StepPlan | None]) -> StepPlan | None:
        plan = inner()
        if plan is not None:
            self._lines.append(f"plan {plan.step}")
        return plan

    def _commit(self, inner: Callable[..., Commit], plan: StepPlan, result: StepResult) -> Commit:
        self._lines.append(f"commit {plan.step}")
        return inner(plan, result)

    def submitted(
        self, stream: str, label: str, reads: Sequence[Access], writes: Sequence[Access]
    ) -> None:
        self._lines.append(f"{stream}: {label}")

    def recorded(self, stream: str, event: int) -> None:
        if stream == "copy":
            self._lines.append("copy: event")
            self._copied.add(event)

    def giving_up(
        self, table: BlockIds, step: int | None, owner: str, path: str, event: object = None
    ) -> None:
        self._lines.append(f"{owner} gives up {len(table)} ({path}) behind step {step}")

    def release_point(self) -> None:
        self._lines.append("release point")

    def synchronized(self, event: int | None) -> None:
        if event in self._copied:
            self._lines.append("host waits for the clone event")

    def lifted(self, ids: BlockIds) -> None:
        self._lines.append(f"fence of {len(ids)} lifted")

    def on_host(self, label: str, reads: Sequence[Access], writes: Sequence[Access]) -> None:
        self._lines.append(f"{label} {', '.join(str(int(access.ids[0])) for access in reads)}")

    def collected(self, step: int) -> None:
        self._lines.append(f"result of {step} on the host")


def engine_of(device: SteppedCpuDevice, **settings: Any) -> tuple[LLMEngine, Log]:
    """An engine with policy `deferred` and one request, one step on, and what is logged of it."""
    log = Log()
    config = replace(CONFIG, checks="order+conservation", **settings)
    engine = LLMEngine(FEW_TOKENS, config, device=device, observers=(log,))
    log.watch(engine)
    engine.add_request("a", np.array(PROMPT), SamplingParams(max_tokens=12))
    engine.step()
    return engine, log


def test_a_step_planned_ahead(device: SteppedCpuDevice) -> None:
    """Step 3 is on the device, its fork copied and verified drafts in it, when 2 is collected."""
    engine, log = engine_of(device, overlap="on", drafts=3)
    engine.fork("a", "b", SamplingParams(max_tokens=6), num_shared_tokens=10)
    log.take()
    output = engine.step()
    assert output is not None
    assert (output.stats.step, engine.scheduler.num_steps) == (2, 3)
    assert output.stats.drafts is not None
    assert sum(output.stats.drafts.proposed) > 0
    lines = log.take()
    shrunk = [line for line in lines if "(shrink)" in line]
    assert [line for line in lines if line not in shrunk] == [
        "plan 3",
        "copy: copy_blocks step 3",
        "copy: event",  # the step's own, for its forward
        "copy: event",  # that of the clone, for who gives the source up
        "b gives up 1 (fork source) behind step 3",
        "compute: forward step 3",
        "release point",
        "host waits for the clone event",
        "fence of 1 lifted",
        "collect 2",
        "result of 2 on the host",
        "commit 2",
    ]
    assert lines.index("commit 2") + len(shrunk) == len(lines) - 1  # commit gives the surplus back
    assert not engine.findings.first


def test_a_step_whose_predecessor_is_known(device: SteppedCpuDevice) -> None:
    """Without overlap a step is collected before the next one is planned, in the same order."""
    engine, log = engine_of(device)
    engine.fork("a", "b", SamplingParams(max_tokens=6))
    log.take()
    engine.step()
    assert log.take() == [
        "plan 2",
        "copy: copy_blocks step 2",
        "copy: event",
        "copy: event",
        "b gives up 1 (fork source) behind step 2",
        "compute: forward step 2",
        "release point",
        "host waits for the clone event",
        "fence of 1 lifted",
        "collect 2",
        "result of 2 on the host",
        "commit 2",
    ]
