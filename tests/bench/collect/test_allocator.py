"""Counters of torch's allocator where torch uses CUDA, a reason where it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from bench.collect.allocator import STATS, AllocatorCollector

ROOT = Path(__file__).resolve().parents[3]


def test_counters_are_read_and_peaks_start_with_the_context(monkeypatch):
    """Our names for torch's keys; what torch has not counted is 0; peaks are reset on entry."""
    log = []
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        reset_peak_memory_stats=lambda: log.append("reset"),
        memory_stats=lambda: {"allocated_bytes.all.peak": 7, "reserved_bytes.all.current": 9},
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    with AllocatorCollector() as collector:
        assert log == ["reset"]
        values = collector.read().values
    assert values["torch_peak_allocated_bytes"] == 7
    assert values["torch_reserved_bytes"] == 9
    assert values["torch_num_ooms"] == 0


def test_a_torch_without_cuda_gives_none_and_the_reason(monkeypatch):
    """A CPU run on a GPU machine must not open the GPU just to look."""
    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with AllocatorCollector() as collector:
        reading = collector.read()
    assert reading.values == dict.fromkeys(STATS)
    assert reading.reason == "torch does not use CUDA in this process"


def test_collecting_never_loads_torch_or_pynvml():
    """Importing the collectors and reading the allocator leaves both unloaded."""
    code = """
import sys
from bench.collect import allocator, environment, memory, nvml, process
with allocator.AllocatorCollector() as collector:
    assert collector.read().reason == "torch is not loaded"
sys.exit(bool({"torch", "pynvml"} & sys.modules.keys()))
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
