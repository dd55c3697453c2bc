"""A results file made of round numbers, for tests of what is computed and printed from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.samples import (
    CellRecord,
    EndRecord,
    FailureRecord,
    RequestRecord,
    RoundRecord,
    RunRecord,
    Samples,
    SampleWriter,
    StepRecord,
    VerificationRecord,
    read_samples,
)

DEFERRED = {"release": "deferred", "free_order": "reverse"}
COUNTERS = {
    "num_block_copies": 4,
    "num_later": 0,
    "num_preemptions": 0,
    "withheld_peak": 8,
    "withheld_block_ms": 12.5,
}
MEMORY = {
    "nvml_used_bytes": None,
    "torch_peak_allocated_bytes": None,
    "process_rss_bytes": 512 * 2**20,
    "reasons": {"nvml": "no usable NVIDIA driver", "allocator": "torch is not loaded"},
}


class SyntheticRun:
    """Writes a results file record by record, with defaults for what a test does not care about."""

    def __init__(self, folder: Path, **run: Any) -> None:
        self.folder = folder
        self._writer = SampleWriter(folder)
        self._num_cells = 0
        settings = {
            "workload": "fork-batch",
            "profile": "cpu-tiny",
            "command": ("deepinfer-bench", "compare"),
            "started_at": "2026-01-02T03:04:05+00:00",
            "environment": {"host": "test"},
            "config": {"block_size": 16},
            "config_hash": "abc",
            "axes": {"release": ["deferred"], "free_order": ["reverse"]},
            "seed": 1,
            "rounds": 1,
        }
        self._writer.write(RunRecord(**{**settings, **run}))

    def cell(self, axes: dict[str, Any] | None = None, **flags: bool) -> int:
        """Declare a cell and give its id."""
        number = self._num_cells
        self._num_cells += 1
        self._writer.write(CellRecord(number, axes or DEFERRED, **flags))
        return number

    def round(
        self,
        cell: int,
        number: int = 0,
        *,
        requests: Sequence[tuple[float, Sequence[float], str]] = (
            (0.0, (0.1, 0.2, 0.4), "length"),
        ),
        host_us: Sequence[float] = (100.0,),
        wait_us: float = 10.0,
        wall_s: float = 1.0,
        warmup: bool = False,
        wrong: int | None = 0,
        max_logprob_diff: float | None = 1e-6,
        near_ties: int = 0,
        counters: dict[str, Any] | None = None,
        memory: dict[str, Any] | None = None,
        elapsed_s: float | None = None,
    ) -> None:
        """A round of requests (arrival, token times, finish reason); `wrong=None` is unverified."""
        for index, (arrival_s, times, reason) in enumerate(requests):
            self._writer.write(
                RequestRecord(
                    cell=cell,
                    round=number,
                    request_id=f"r{index}",
                    arrival_s=arrival_s,
                    first_scheduled_s=arrival_s if times else None,
                    token_times_s=tuple(times),
                    num_prompt_tokens=10,
                    num_output_tokens=len(times),
                    finish_reason=reason,
                    num_preemptions=0,
                )
            )
        for index, host in enumerate(host_us):
            self._writer.write(step_record(cell, number, index, host, wait_us))
        self._writer.write(
            RoundRecord(
                cell=cell,
                round=number,
                warmup=warmup,
                wall_s=wall_s,
                num_output_tokens=sum(len(times) for _, times, _ in requests),
                num_prompt_tokens=10 * len(requests),
                counters={**COUNTERS, **(counters or {})},
                memory=MEMORY if memory is None else memory,
                elapsed_s=elapsed_s,
            )
        )
        if wrong is not None:
            wrong_ids = tuple(f"r{i}" for i in range(wrong))
            self._writer.write(
                VerificationRecord(
                    cell,
                    number,
                    len(requests),
                    wrong,
                    near_ties,
                    max_logprob_diff,
                    1e-3,
                    wrong_ids,
                )
            )

    def fail(self, cell: int, number: int = 0, reason: str = "RuntimeError: no") -> None:
        """A round that raised."""
        self._writer.write(FailureRecord(cell, number, reason))

    def end(self, status: str = "complete", reason: str = "") -> Samples:
        """Write the last line and read the file."""
        self._writer.write(EndRecord(status, reason))
        return self.read()

    def read(self) -> Samples:
        """The file as it stands, with no end if none was written."""
        return read_samples(self.folder)


def step_record(
    cell: int = 0, number: int = 0, step: int = 0, host_us: float = 100.0, wait_us: float = 10.0
) -> StepRecord:
    """A step whose host time is split over two phases and whose tokens are waited for 390 us."""
    return StepRecord(
        cell=cell,
        round=number,
        step=step,
        end_s=step * 1e-3,
        num_tokens=16,
        num_running=16,
        num_waiting=0,
        blocks_free=100,
        blocks_held=28,
        blocks_withheld=0,
        num_copies=0,
        host_us={"schedule": 0.75 * host_us, "commit": 0.25 * host_us},
        wait_us=wait_us,
        result_wait_us=390.0,
        device_ms=None,
    )


@pytest.fixture
def synthetic(tmp_path: Path) -> Callable[..., SyntheticRun]:
    """Start a results file in a fresh folder: `synthetic(rounds=3, notes=(...))`."""

    def start(name: str = "run", **run: Any) -> SyntheticRun:
        return SyntheticRun(tmp_path / name, **run)

    return start


@pytest.fixture
def make_step() -> Callable[..., StepRecord]:
    """A step record of round numbers."""
    return step_record


@pytest.fixture
def comparison(synthetic: Callable[..., SyntheticRun]) -> Samples:
    """Three cells, three rounds: a baseline, an unsafe one with wrong answers, a faster one."""
    run = synthetic(
        rounds=3,
        axes={"release": ["deferred", "early", "polled"], "free_order": ["reverse"]},
        notes=("lengths scaled by 0.1",),
    )
    cells = [
        run.cell(DEFERRED, baseline=True),
        run.cell({"release": "early", "free_order": "reverse"}, unsafe=True),
        run.cell({"release": "polled", "free_order": "reverse"}),
    ]
    for number, drift in enumerate((1.0, 1.5, 2.0)):  # the machine gets slower, pairs do not
        for cell, wall_s, wrong in zip(cells, (1.0, 1.0, 0.5), (0, 1, 0), strict=True):
            run.round(cell, number, wall_s=wall_s * drift, wrong=wrong)
    return run.end()
