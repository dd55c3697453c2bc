"""Memory and CPU time of this process.

Knows psutil. Invariant: CPU time counts from the start of the context, memory is what it is now.
"""

from __future__ import annotations

import psutil

from bench.collect.reading import Reading

FIGURES = ("process_rss_bytes", "process_cpu_s")


class ProcessCollector:
    """A context in which `read()` gives resident memory and the CPU seconds of all threads."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._start_s = 0.0

    def __enter__(self) -> ProcessCollector:
        try:
            self._start_s = self._cpu_s()
        except psutil.Error:
            self._start_s = 0.0  # `read` will meet the same error and say so
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def read(self) -> Reading:
        """Resident bytes now, user + system seconds since the start of the context."""
        try:
            rss_bytes = self._process.memory_info().rss
            cpu_s = self._cpu_s() - self._start_s
        except psutil.Error as error:
            return Reading.missing(FIGURES, str(error))
        return Reading(dict(zip(FIGURES, (rss_bytes, cpu_s), strict=True)))

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)
