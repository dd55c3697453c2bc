"""Where a result comes from: machine, versions, GPU, commit.

Knows the operating system, package metadata, NVML and git; imports no torch. Invariant: collecting
never fails; what could not be found out is None and its dotted name stands in `reasons`.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from bench.collect.nvml import close_nvml, default_gpu, gpu_handle, open_nvml
from bench.collect.reading import one_line

PACKAGES = (
    "deepinfer-bench",
    "torch",
    "numpy",
    "safetensors",
    "transformers",
    "nvidia-ml-py",
    "pydantic",
)
CHECKOUT = Path(__file__).resolve().parents[2]
GIT_TIMEOUT_S = 10


def collect_environment(checkout: Path = CHECKOUT) -> dict[str, Any]:
    """What a result must record of its surroundings, ready for JSON.

    Keys: time (UTC, ISO 8601), host, os, python, cpu {model, cores, logical_cores, memory_bytes},
    versions, gpu {name, uuid, memory_bytes, driver, cuda, clocks in MHz, power_limit_w} or None,
    git {commit, dirty}, reasons {dotted name: why it is None}. `checkout` is the folder whose
    commit is told, if it is the top of a git work tree.
    """
    reasons: dict[str, str] = {}
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": platform.node(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu(reasons),
        "versions": _versions(reasons),
        "gpu": _gpu(reasons),
        "git": _git(checkout, reasons),
        "reasons": reasons,
    }


def _cpu(reasons: dict[str, str]) -> dict[str, Any]:
    model = _cpu_model()
    if model is None:
        reasons["cpu.model"] = "the system does not name it"
    cores = psutil.cpu_count(logical=False)
    if cores is None:
        reasons["cpu.cores"] = "the system does not count physical cores"
    return {
        "model": model,
        "cores": cores,
        "logical_cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _cpu_model() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor() or None


def _versions(reasons: dict[str, str]) -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
            reasons[f"versions.{package}"] = "not installed"
    return versions


def _gpu(reasons: dict[str, str]) -> dict[str, Any] | None:
    nvml, reason = open_nvml()
    if nvml is None:
        reasons["gpu"] = reason
        return None
    try:
        handle = gpu_handle(nvml, default_gpu())
        return _gpu_facts(nvml, handle, reasons)
    except nvml.NVMLError as error:
        reasons["gpu"] = one_line(error)
        return None
    finally:
        close_nvml(nvml)


def _gpu_facts(nvml: ModuleType, handle: Any, reasons: dict[str, str]) -> dict[str, Any]:
    def cuda_version() -> str:
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()  # 12040 is 12.4
        return f"{version // 1000}.{version % 1000 // 10}"

    questions: dict[str, Callable[[], Any]] = {
        "name": lambda: nvml.nvmlDeviceGetName(handle),
        "uuid": lambda: nvml.nvmlDeviceGetUUID(handle),
        "memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
        "driver": nvml.nvmlSystemGetDriverVersion,
        "cuda": cuda_version,
        "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "sm_clock_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        # NVML speaks of milliwatts.
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
    }
    facts: dict[str, Any] = {}
    for name, ask in questions.items():
        try:
            answer = ask()
        except nvml.NVMLError as error:
            facts[name] = None
            reasons[f"gpu.{name}"] = one_line(error)
        else:
            facts[name] = answer.decode() if isinstance(answer, bytes) else answer
    return facts


def _git(checkout: Path, reasons: dict[str, str]) -> dict[str, Any]:
    try:
        top = Path(_run_git(checkout, "rev-parse", "--show-toplevel"))
        # Installed below somebody else's work tree, its commit would say nothing of this code.
        if top.resolve() != checkout.resolve():
            raise OSError("not run from a checkout")
        commit = _run_git(checkout, "rev-parse", "--verify", "HEAD")
        changes = _run_git(checkout, "--no-optional-locks", "status", "--porcelain")
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        reasons["git.commit"] = reasons["git.dirty"] = one_line(said)
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(changes)}


def _run_git(folder: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *args],
        capture_output=True,
        check=True,
        env={**os.environ, "LC_ALL": "C"},  # reasons in English wherever the result was made
        encoding="utf-8",
        errors="replace",
        timeout=GIT_TIMEOUT_S,
    )
    return done.stdout.strip()
