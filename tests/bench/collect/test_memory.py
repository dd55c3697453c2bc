"""All memory figures of a round, in the shape its record stores."""

from __future__ import annotations

import json
import sys

from bench.collect.memory import MemoryCollector
from bench.metrics import compute_metrics


def test_every_figure_has_a_key_and_the_missing_ones_a_reason(monkeypatch):
    """Without NVML and torch: their figures None, reasons by collector, the process's own read."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with MemoryCollector() as collector:
        memory = collector.read()
    assert memory["process_rss_bytes"] > 0
    assert memory["nvml_used_bytes"] is memory["torch_peak_allocated_bytes"] is None
    assert set(memory["reasons"]) == {"nvml", "allocator"}
    json.dumps(memory, allow_nan=False)


def test_the_metrics_find_what_the_collector_stores(synthetic, monkeypatch):
    """Keys and collector names are those the memory columns look for."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with MemoryCollector() as collector:
        memory = collector.read()
    run = synthetic()
    run.round(run.cell(), memory=memory)
    (metrics,) = compute_metrics(run.end())
    assert metrics.process_rss_mib.value == memory["process_rss_bytes"] / 2**20
    assert metrics.nvml_used_mib.reason == "nvml: package nvidia-ml-py is not installed"
    assert metrics.torch_peak_mib.reason == "allocator: torch is not loaded"
