"""What the driver says of one NVIDIA GPU, through NVML: memory, clocks, power, what throttles it.

Knows pynvml (package nvidia-ml-py), imported when a GPU is opened and not before; knows nothing of
torch's allocator. Invariant: no failure of NVML (no driver, no permission, a MIG slice, a lost GPU,
a figure this GPU does not give) leaves anything but None and one line that says why.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from bench.collect.reading import Reading, one_line

FIGURES = ("nvml_used_bytes", "nvml_total_bytes", "nvml_process_bytes")

# Bits of nvmlClocksEventReasons in nvml.h.
THROTTLE_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
# Of these, what slows a GPU down that has work to do.
SLOWDOWNS = frozenset(THROTTLE_REASONS.values()) - {
    "gpu_idle",
    "applications_clocks_setting",
    "sync_boost",
    "display_clock_setting",
}

Answers = tuple[Any, ...]


def _memory(nvml: Any, gpu: Any) -> Answers:
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    return int(memory.used), int(memory.total)


def _processes(nvml: Any, gpu: Any) -> Answers:
    sizes: dict[int, int | None] = {}
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu):
        # A process has an entry per MIG slice it uses; None where the driver does not say.
        known = process.usedGpuMemory, sizes.get(process.pid, 0)
        sizes[process.pid] = None if None in known else sum(known)
    return (sizes,)


def _throttle_reasons(nvml: Any, gpu: Any) -> Answers:
    try:
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
    except (AttributeError, nvml.NVMLError_FunctionNotFound):  # older package, or older driver
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    named = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    unnamed = bits & ~sum(THROTTLE_REASONS)
    return (tuple([*named, f"unknown_{unnamed:#x}"] if unnamed else named),)


# The figures that one question to NVML answers, and the question.
Question = tuple[tuple[str, ...], Callable[[Any, Any], Answers]]
MEMORY: Question = (("used_bytes", "total_bytes"), _memory)
PROCESSES: Question = (("processes",), _processes)
STATE: tuple[Question, ...] = (
    (("sm_clock_mhz",), lambda nvml, gpu: (nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),)),
    (
        ("memory_clock_mhz",),
        lambda nvml, gpu: (nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),),
    ),
    (("throttle_reasons",), _throttle_reasons),
    # NVML speaks of milliwatts.
    (("power_w",), lambda nvml, gpu: (nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,)),
    (
        ("temperature_c",),
        lambda nvml, gpu: (nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),),
    ),
    (("utilization_percent",), lambda nvml, gpu: (nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,)),
)


class NvmlGpu:
    """A context in which NVML can be asked about one GPU, if it can be asked at all.

    `gpu` is an NVML index or a UUID (`GPU-...`, `MIG-...`); by default the first GPU this process
    may use.

    Attributes:
        reason: why nothing can be asked, one line; empty if the GPU is open.
    """

    def __init__(self, gpu: int | str | None = None) -> None:
        self._gpu = gpu
        self._nvml: ModuleType | None = None
        self._handle: Any = None
        self.reason = "not entered"

    def __enter__(self) -> NvmlGpu:
        nvml, self.reason = open_nvml()
        if nvml is not None:
            self._nvml = nvml
            gpu = default_gpu() if self._gpu is None else self._gpu
            try:
                self._handle = gpu_handle(nvml, gpu)
            except nvml.NVMLError as error:
                self.reason = one_line(f"GPU {gpu}: {error}")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._nvml is not None:
            close_nvml(self._nvml)
        self._nvml = self._handle = None
        self.reason = "already left"

    def ask(self, *questions: Question) -> tuple[dict[str, Any], dict[str, str]]:
        """Figures by name, and for each that is None the reason; never raises an NVML error."""
        values: dict[str, Any] = {}
        reasons: dict[str, str] = {}
        for names, question in questions:
            answers, reason = self._answers(question)
            if answers is None:
                answers = (None,) * len(names)
                reasons.update(dict.fromkeys(names, reason))
            values.update(zip(names, answers, strict=True))
        return values, reasons

    def _answers(self, question: Callable[[Any, Any], Answers]) -> tuple[Answers | None, str]:
        """What NVML answers, or None and the reason."""
        if self._nvml is None or self._handle is None:
            return None, self.reason
        try:
            return question(self._nvml, self._handle), ""
        except _errors(self._nvml) as error:
            return None, one_line(error)


class NvmlCollector:
    """A context in which `read()` gives the GPU's memory: used by all, total, used by this process.

    `gpu` is as for `NvmlGpu`.
    """

    def __init__(self, gpu: int | str | None = None) -> None:
        self._gpu = NvmlGpu(gpu)

    def __enter__(self) -> NvmlCollector:
        self._gpu.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._gpu.__exit__(*exc)

    def read(self) -> Reading:
        """Bytes now; see `FIGURES`."""
        values, reasons = self._gpu.ask(MEMORY)
        if reasons:
            return Reading.missing(FIGURES, reasons["used_bytes"])
        processes, why = self._gpu.ask(PROCESSES)
        process_bytes, reason = own_bytes(processes["processes"])
        figures = (values["used_bytes"], values["total_bytes"], process_bytes)
        reason = why.get("processes", reason)
        return Reading(
            dict(zip(FIGURES, figures, strict=True)),
            one_line(f"memory by process: {reason}") if reason else "",
        )


def _errors(nvml: ModuleType) -> tuple[type[Exception], ...]:
    """What pynvml raises: its error, and where package and driver are of different ages another."""
    mismatch = getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)
    return nvml.NVMLError, mismatch


def own_bytes(processes: Mapping[int, int | None] | None) -> tuple[int | None, str]:
    """GPU memory of this process out of that of all, or None and the reason."""
    # In a container NVML lists the host's process ids, which are not ours.
    size = (processes or {}).get(os.getpid())
    return size, "this process is not listed" if size is None else ""


def open_nvml() -> tuple[ModuleType | None, str]:
    """pynvml, initialised, or None and the reason. Close it with `close_nvml`."""
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        return None, "package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, one_line(f"no usable NVIDIA driver ({error})")
    return pynvml, ""


def close_nvml(nvml: ModuleType) -> None:
    """Undo one `open_nvml`; a driver that has gone away meanwhile is no error."""
    try:
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return


def gpu_handle(nvml: ModuleType, gpu: int | str) -> Any:
    """NVML's handle of a GPU by index or UUID. Raises NVMLError if there is no such GPU."""
    if isinstance(gpu, int):
        return nvml.nvmlDeviceGetHandleByIndex(gpu)
    return nvml.nvmlDeviceGetHandleByUUID(gpu)


def default_gpu() -> int | str:
    """The GPU torch calls `cuda:0`, in NVML's terms.

    CUDA orders GPUs by its own rules and by CUDA_VISIBLE_DEVICES, so a torch that uses CUDA already
    is asked for the UUID; without it, the first entry of that variable is the best guess.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
        if uuid is not None:
            return f"GPU-{uuid}"
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if first.isdecimal():
        return int(first)
    return first or 0
