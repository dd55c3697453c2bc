"""Small workloads on the profile cpu-tiny, for tests that run the real engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.arrivals import RequestSpec, build_requests
from bench.catalog import find_profile
from bench.matrix import Cell, Matrix
from bench.runner import Round, RoundResult, Target
from bench.samples import RoundRecord, Samples, SampleWriter, read_samples
from bench.schema import Profile, Workload
from bench.spec import Flags, Resolved, load_profile, parse_axes, resolve, resolve_cells
from bench.verify import RequestVerdict

ROOT = Path(__file__).resolve().parents[2]
PLAIN = {"count": 4, "prompt_tokens": 40, "output_tokens": 12}
AZURE_ROWS = (
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:17:03.9799600,374,44",
    "2023-11-16 18:17:04.0319600,396,109",
    "2023-11-16 18:17:04.0781000,879,55",
)
MOONCAKE_ROWS = (
    '{"timestamp": 0, "input_length": 1200, "output_length": 90, "hash_ids": [0, 1, 2]}',
    '{"timestamp": 90, "input_length": 1536, "output_length": 60, "hash_ids": [0, 1, 3]}',
    '{"timestamp": 90, "input_length": 40, "output_length": 200, "hash_ids": [9]}',
)


def workload(*groups: Mapping[str, Any], **keys: Any) -> Workload:
    """A workload of these request groups."""
    given = {"name": "test", "description": "test", "requests": [dict(g) for g in groups], **keys}
    return Workload.model_validate(given)


def load_profile_tiny() -> Profile:
    """The profile cpu-tiny."""
    return load_profile(find_profile("cpu-tiny"))


def tiny(work: Workload, seed: int = 0, **engine: Any) -> Resolved:
    """`work` on cpu-tiny with these engine settings."""
    return resolve(load_profile_tiny(), work, Flags(engine={"seed": seed, **engine}))


def requests_of(resolved: Resolved, index: int = 0) -> list[RequestSpec]:
    """The requests of a round; -1 is the warm-up before it is shortened."""
    return build_requests(resolved.workload, resolved.seed, resolved.model.vocab_size, index)


def run_round(
    resolved: Resolved, target: Target, requests: Sequence[RequestSpec] | None = None
) -> RoundResult:
    """Round 0 of cell 0, on its own requests unless others are given."""
    specs = requests_of(resolved) if requests is None else requests
    return Round(resolved, target, specs, cell=0, index=0, warmup=False).run()


def verdicts(resolved: Resolved, target: Target, result: RoundResult) -> dict[str, RequestVerdict]:
    """What the dense reference says of each request that emitted tokens."""
    judged = target.verify(list(result.emissions.values()), resolved.verify)
    return dict(zip(result.emissions, judged, strict=True))


def silent(text: str) -> None:
    """A progress callback that says nothing."""


def cells_of(work: Workload, *axes: str, seed: int = 0) -> list[Cell]:
    """The cells of `release=a,b`-like axes on cpu-tiny."""
    pairs = resolve_cells(load_profile_tiny(), work, Flags(seed=seed), parse_axes(axes))
    return [Cell(index, values, resolved) for index, (values, resolved) in enumerate(pairs)]


def run_matrix(
    folder: Path,
    cells: list[Cell],
    rounds: int = 1,
    progress: Callable[[str], None] = silent,
) -> tuple[bool, Samples]:
    """Whether the run completed, and its results file."""
    with (
        Matrix(cells, rounds=rounds, axes={}, progress=progress) as matrix,
        SampleWriter(folder) as writer,
    ):
        complete = matrix.run(writer)
    return complete, read_samples(folder)


def measured(samples: Samples) -> list[RoundRecord]:
    """The rounds that count."""
    return [record for record in samples.rounds if not record.warmup]


def run_cli(*args: object, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, with `cwd` as its working directory."""
    return subprocess.run(
        cli_command(*args), cwd=cwd, capture_output=True, text=True, timeout=120, **options
    )


def cli_command(*args: object) -> list[str]:
    """argv of the command line, as from a checkout."""
    return [sys.executable, os.fspath(ROOT / "cli.py"), *map(str, args)]
