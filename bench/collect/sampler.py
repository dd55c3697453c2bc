"""One GPU's memory, clocks, power and throttling over time: a thread that asks NVML at an interval.

Knows when to ask and what it costs; `bench.collect.nvml` knows how. Invariant: sampling never
raises and never holds up a run: what NVML does not tell is None with one line of reason, and a
driver that stops answering ends the sampling, not the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.collect.nvml import MEMORY, PROCESSES, SLOWDOWNS, STATE, NvmlGpu, own_bytes
from bench.stats import median
from deepinfer.errors import UserError

QUESTIONS = (MEMORY, PROCESSES, *STATE)
INTERVAL_S = 0.1
PATIENCE_S = 5.0  # for a call into the driver, when the context is left
UTILIZATION_CAVEAT = (
    "utilization_percent is the share of the driver's last averaging window (1/6 s to 1 s, by GPU) "
    "in which any kernel ran, however few SMs it used: not a figure of the sample's own interval"
)

Figure = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class NvmlSample:
    """What NVML said at one moment; None where it said nothing.

    Attributes:
        time_s: since the context was entered.
        cost_us: wall time of asking.
        used_bytes, total_bytes: of the GPU, all processes together.
        processes: bytes by process id, as the driver numbers them; a size may be None.
        sm_clock_mhz, memory_clock_mhz: now.
        throttle_reasons: what keeps the clocks down, names of `nvml.THROTTLE_REASONS`.
        power_w: board power; the driver averages over up to 1 s on recent GPUs.
        temperature_c: of the GPU's die.
        utilization_percent: see `UTILIZATION_CAVEAT`.
    """

    time_s: float
    cost_us: float
    used_bytes: int | None
    total_bytes: int | None
    processes: Mapping[int, int | None] | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    throttle_reasons: tuple[str, ...] | None
    power_w: float | None
    temperature_c: int | None
    utilization_percent: int | None


class NvmlSampler:
    """A context that samples one GPU: at its start, every `interval_s`, and at its end.

    The first and the last sample are taken by the caller's thread, so that even a short run has
    both. A sample that is late moves none of the later ones: moments that have passed are skipped.

    Args:
        interval_s: seconds between samples. Raises UserError unless above 0.
        gpu: as for `NvmlGpu`.

    Attributes:
        samples: oldest first; empty where there is no NVML.
        reasons: figure -> why it was None the first time; `nvml` if nothing could be asked.
    """

    def __init__(self, interval_s: float = INTERVAL_S, *, gpu: int | str | None = None) -> None:
        if not interval_s > 0:
            raise UserError(f"interval_s: {interval_s} is not above 0")
        self.interval_s = interval_s
        self.samples: list[NvmlSample] = []
        self.reasons: dict[str, str] = {}
        self._gpu = NvmlGpu(gpu)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._start_ns = 0
        self._wall_s = 0.0

    def __enter__(self) -> NvmlSampler:
        self._start_ns = time.perf_counter_ns()
        self._gpu.__enter__()
        if self._gpu.reason:
            self.reasons["nvml"] = self._gpu.reason
        elif self._take_sample():
            self._thread = threading.Thread(target=self._run, name="nvml-sampler", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join(PATIENCE_S)
            if self._thread.is_alive():
                # NVML must not be shut down under the call that hangs; the thread dies with us.
                self.reasons["nvml"] = f"a call into the driver did not return in {PATIENCE_S:g} s"
                self._wall_s = self._now_s()
                return
            if "nvml" not in self.reasons:
                self._take_sample()
        self._wall_s = self._now_s()
        self._gpu.__exit__(*exc)

    def summary(self) -> dict[str, Any]:
        """What a result keeps of the samples, ready for JSON; None with a line in `reasons`.

        Keys: num_samples, interval_s, total_bytes, used_bytes {peak, median}, process_bytes {peak,
        median} (of this process), sm_clock_mhz and memory_clock_mhz {start, end, min},
        throttle_reasons {start, end, seen} (lists), slowdowns (those seen that slow down a GPU with
        work to do), power_w {peak, median}, temperature_c {start, end, peak}, utilization_percent
        {median}, notes, cost {us_per_sample, max_us, wall_share}, reasons. `start` and `end` are
        of the first and the last sample. `wall_share` counts the wall time of asking, most of which
        is spent in the driver while other threads run; it is None until the context is left.
        """
        own = [own_bytes(sample.processes) for sample in self.samples]
        reasons = dict(self.reasons)
        for _, why in own:
            if why and "processes" not in reasons:
                reasons["process_bytes"] = why
        costs = [sample.cost_us for sample in self.samples]
        wall_us = self._wall_s * 1e6
        throttling = self._series("throttle_reasons")
        seen = {name for names in throttling if names is not None for name in names}
        known = any(names is not None for names in throttling)
        return {
            "num_samples": len(self.samples),
            "interval_s": self.interval_s,
            "total_bytes": _figures(self._series("total_bytes"), peak=max)["peak"],
            "used_bytes": _figures(self._series("used_bytes"), peak=max, median=median),
            "process_bytes": _figures([size for size, _ in own], peak=max, median=median),
            "sm_clock_mhz": self._over_time("sm_clock_mhz", min=min),
            "memory_clock_mhz": self._over_time("memory_clock_mhz", min=min),
            "throttle_reasons": {
                **{name: names and list(names) for name, names in _ends(throttling).items()},
                "seen": sorted(seen) if known else None,
            },
            "slowdowns": sorted(seen & SLOWDOWNS) if known else None,
            "power_w": _figures(self._series("power_w"), peak=max, median=median),
            "temperature_c": self._over_time("temperature_c", peak=max),
            "utilization_percent": _figures(self._series("utilization_percent"), median=median),
            "notes": [UTILIZATION_CAVEAT] if self.samples else [],
            "cost": {
                **_figures(costs, us_per_sample=median, max_us=max),
                "wall_share": sum(costs) / wall_us if costs and wall_us else None,
            },
            "reasons": reasons,
        }

    # -- sampling --------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return (time.perf_counter_ns() - self._start_ns) / 1e9

    def _run(self) -> None:
        number = 1
        while not self._stop.wait(max(0.0, number * self.interval_s - self._now_s())):
            if not self._take_sample():
                return
            number = max(number, int(self._now_s() / self.interval_s)) + 1

    def _take_sample(self) -> bool:
        """Ask for everything; False once the GPU has nothing to say, as when it is lost."""
        start_s = self._now_s()
        values, reasons = self._gpu.ask(*QUESTIONS)
        end_s = self._now_s()
        self.samples.append(NvmlSample(time_s=start_s, cost_us=(end_s - start_s) * 1e6, **values))
        self.reasons = {**reasons, **self.reasons}
        answered = len(reasons) < len(values)
        if not answered:
            why = reasons["used_bytes"]
            self.reasons["nvml"] = f"nothing more was answered after {start_s:.1f} s: {why}"
        return answered

    def _series(self, name: str) -> list[Any]:
        return [getattr(sample, name) for sample in self.samples]

    def _over_time(self, name: str, **figures: Figure) -> dict[str, Any]:
        values = self._series(name)
        return {**_ends(values), **_figures(values, **figures)}


def _ends(values: list[Any]) -> dict[str, Any]:
    """The first and the last value, None included: a GPU that was lost has no clock at the end."""
    return {"start": values[0] if values else None, "end": values[-1] if values else None}


def _figures(values: Iterable[Any], **figures: Figure) -> dict[str, Any]:
    """`figures` of those values that are not None; each None if there are none."""
    known = [value for value in values if value is not None]
    return {name: figure(known) if known else None for name, figure in figures.items()}
