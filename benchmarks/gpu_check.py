"""What a machine with an NVIDIA GPU proves and measures, in under five minutes: `make gpu-check`.

    1. the tests marked `cuda`
    2. tokens and log-probabilities of the CUDA device against the CPU's, float32
    3. `compare fork-batch` on profile h200 with all six release policies
    4. the NVML and allocator columns of that table are filled
    5. `profile step decode-overlap` on profile h200, without drafts and with three: the host gap,
       smaller with `overlap`
    6. `check power` on profile h200: faults planted in bfloat16 requests are seen, clean ones pass

Prints a summary, one line a check, and writes the samples, the table and the summary to
docs/results/GPU-DATE/, to be committed. Exit code 0 if all passed, 1 if one failed, 2 without GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.catalog import find_profile, find_workload  # noqa: E402 -- after the path is set
from bench.commands import main as deepinfer_bench  # noqa: E402
from bench.report import build_table, write_report  # noqa: E402
from bench.samples import read_samples  # noqa: E402
from bench.spec import load_profile, load_workload, resolve  # noqa: E402
from deepinfer.engine import LLMEngine  # noqa: E402
from deepinfer.names import RELEASE_POLICIES  # noqa: E402
from deepinfer.sequence import SamplingParams  # noqa: E402

LOGPROB_TOLERANCE = 1e-3  # float32 on both sides, other orders of summation
Check = Callable[[Path], str]


def cuda_tests(folder: Path) -> str:
    """The tests marked `cuda` pass."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "--durations=0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    (folder / "cuda-tests.txt").write_text(run.stdout + run.stderr, encoding="utf-8")
    last = run.stdout.strip().splitlines()[-1] if run.stdout.strip() else run.stderr.strip()[-200:]
    assert run.returncode == 0, last
    return last


def same_as_cpu(folder: Path) -> str:
    """The CUDA engine emits the CPU engine's tokens, with its log-probabilities."""
    workload = load_workload(find_workload("fork-batch"))
    resolved = resolve(load_profile(find_profile("cpu-small")), workload)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, resolved.model.vocab_size, size) for size in (40, 127, 128, 129)]
    samplings = [SamplingParams(16, float(i % 2), seed=i) for i in range(len(prompts))]
    config = replace(resolved.engine, max_num_batched_tokens=96)  # so that prompts are chunked
    outputs = {}
    for device in ("cpu", "cuda"):
        with LLMEngine(resolved.model, config, device=device) as engine:
            outputs[device] = engine.generate(prompts, samplings)
    diff = 0.0
    for cpu, cuda in zip(outputs["cpu"], outputs["cuda"], strict=True):
        assert np.array_equal(cpu.token_ids, cuda.token_ids), f"other tokens: {cpu.request_id}"
        diff = max(diff, float(np.abs(cpu.logprobs - cuda.logprobs).max()))
    assert diff <= LOGPROB_TOLERANCE, f"log-probabilities differ by {diff:.2g}"
    return f"64 tokens equal, log-probabilities within {diff:.2g}"


def compare_policies(folder: Path) -> str:
    """All six policies on profile h200 give right answers."""
    code = deepinfer_bench(
        [
            "compare",
            "fork-batch",
            "--profile",
            "h200",
            "--release",
            ",".join(RELEASE_POLICIES),
            "-r",
            "3",
            "-o",
            str(folder / "fork-batch"),
        ]
    )
    write_report(build_table(read_samples(folder / "fork-batch")), "md", folder / "fork-batch.md")
    assert code == 0, f"compare ended with exit code {code}"
    return f"{len(RELEASE_POLICIES)} policies, no wrong request"


def columns_filled(folder: Path) -> str:
    """NVML and allocator figures are there."""
    rows = build_table(read_samples(folder / "fork-batch")).rows
    for key in ("nvml_used_mib", "torch_peak_mib"):
        missing = [row.undefined.get(key, "") for row in rows if row.values[key] is None]
        assert not missing, f"{key}: {missing[0]}"
    first = rows[0].values
    return f"NVML {first['nvml_used_mib']:.0f} MiB, torch peak {first['torch_peak_mib']:.0f} MiB"


def host_gap(folder: Path) -> str:
    """With overlap the device waits less for the host between two steps."""
    return _host_gap(folder / "step.json")


def host_gap_with_drafts(folder: Path) -> str:
    """So it does where the host knows neither tokens nor positions."""
    settings = ("drafts=3", "drafter=replay", "acceptance=0.7")
    # `deferred` would wait for the newest step wherever a rejection gives a block back.
    flags = ("--release", "polled", *(flag for item in settings for flag in ("-s", item)))
    return _host_gap(folder / "step-drafts.json", *flags)


def _host_gap(path: Path, *flags: str) -> str:
    workload = ("profile", "step", "decode-overlap", "--profile", "h200", "--format", "json")
    printed = _printed(path, *workload, *flags)
    gaps = {gap["overlap"]: gap for gap in json.loads(printed)["gaps"]}
    text = ", ".join(
        f"overlap {name} {gap['median_us']:.1f} us = {gap['median_percent']:.2f} % of the step"
        for name, gap in gaps.items()
    )
    assert gaps["on"]["median_us"] < gaps["off"]["median_us"], text
    return text


def faults_are_flagged(folder: Path) -> str:
    """The verification sees faults in bfloat16, within its tolerances for clean requests."""
    _printed(folder / "power.txt", "check", "power", "--profile", "h200", "--trials", "32")
    return "32 requests of each kind; see power.txt"


def _printed(path: Path, *arguments: str) -> str:
    """What the command line prints, which is kept in `path`."""
    run = subprocess.run(
        [sys.executable, "cli.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    path.write_text(run.stdout, encoding="utf-8")
    assert run.returncode == 0, run.stdout.strip() or run.stderr.strip()[-200:]
    return run.stdout


CHECKS: tuple[Check, ...] = (
    cuda_tests,
    same_as_cpu,
    compare_policies,
    columns_filled,
    host_gap,
    host_gap_with_drafts,
    faults_are_flagged,
)


def main() -> int:
    """Run every check, whatever the ones before it found."""
    if not torch.cuda.is_available():
        print("error: torch finds no NVIDIA GPU here", file=sys.stderr)
        return 2
    gpu = torch.cuda.get_device_name().replace(" ", "-").lower()
    folder = ROOT / "docs" / "results" / f"{gpu}-{date.today().isoformat()}"
    number = 2
    while folder.exists():
        folder = folder.with_name(f"{gpu}-{date.today().isoformat()}-{number}")
        number += 1
    folder.mkdir(parents=True)
    summary, began = [], time.monotonic()
    for check in CHECKS:
        start = time.monotonic()
        try:
            passed, text = True, check(folder)
        except (AssertionError, subprocess.TimeoutExpired, OSError, RuntimeError) as error:
            passed, text = False, " ".join(str(error).split())
        seconds = round(time.monotonic() - start, 1)
        summary.append(
            {"check": check.__name__, "passed": passed, "what": text, "seconds": seconds}
        )
        print(f"{'ok    ' if passed else 'FAILED'} {check.__name__} ({seconds} s): {text}")
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(f"{time.monotonic() - began:.0f} s in all; results in {folder.relative_to(ROOT)}")
    return 0 if all(entry["passed"] for entry in summary) else 1


if __name__ == "__main__":
    sys.exit(main())
