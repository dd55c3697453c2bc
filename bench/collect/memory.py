"""All memory figures of a round in one context: NVML, torch's allocator, the process.

Knows the collectors and the shape of a round record's `memory`. Invariant: `read` always has every
figure's key; those without a value are explained in `reasons`, by collector.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from bench.collect.allocator import AllocatorCollector
from bench.collect.nvml import NvmlCollector
from bench.collect.process import ProcessCollector


class MemoryCollector:
    """A context for one round: enter before it, `read()` at its end; peaks are the round's own."""

    def __init__(self) -> None:
        self._collectors: dict[str, NvmlCollector | AllocatorCollector | ProcessCollector] = {
            "nvml": NvmlCollector(),
            "allocator": AllocatorCollector(),
            "process": ProcessCollector(),
        }
        self._stack = ExitStack()

    def __enter__(self) -> MemoryCollector:
        for collector in self._collectors.values():
            self._stack.enter_context(collector)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def read(self) -> dict[str, Any]:
        """`{nvml_used_bytes: ..., ..., reasons: {collector: why some are None}}`."""
        memory: dict[str, Any] = {}
        reasons: dict[str, str] = {}
        for name, collector in self._collectors.items():
            reading = collector.read()
            memory.update(reading.values)
            if reading.reason:
                reasons[name] = reading.reason
        return {**memory, "reasons": reasons}
