"""Counters of torch's caching allocator on CUDA.

Knows torch only if the process has loaded it already: a collector never imports it. Invariant:
where there is no torch or no CUDA every figure is None, with the reason.
"""

from __future__ import annotations

import sys

from bench.collect.reading import Reading

# Our name -> torch.cuda.memory_stats key.
STATS = {
    "torch_allocated_bytes": "allocated_bytes.all.current",
    "torch_reserved_bytes": "reserved_bytes.all.current",
    "torch_peak_allocated_bytes": "allocated_bytes.all.peak",
    "torch_peak_reserved_bytes": "reserved_bytes.all.peak",
    "torch_num_alloc_retries": "num_alloc_retries",
    "torch_num_ooms": "num_ooms",
}


class AllocatorCollector:
    """A context in which `read()` gives the allocator's counters; peaks count from its start.

    It sees what torch allocates only: not the CUDA context, nor other libraries (`nvml` does).
    """

    def __enter__(self) -> AllocatorCollector:
        if not _why_not():
            sys.modules["torch"].cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def read(self) -> Reading:
        """Counters now; see `STATS`."""
        reason = _why_not()
        if reason:
            return Reading.missing(tuple(STATS), reason)
        stats = sys.modules["torch"].cuda.memory_stats()
        # A counter torch has not touched yet is absent: nothing was allocated, a true 0.
        return Reading({name: int(stats.get(key, 0)) for name, key in STATS.items()})


def _why_not() -> str:
    """Why there are no counters, empty if there are."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "torch is not loaded"
    # Asking further would make a CUDA context, and so change what is measured.
    return "" if torch.cuda.is_initialized() else "torch does not use CUDA in this process"
