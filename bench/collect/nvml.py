"""Memory of one NVIDIA GPU as the driver counts it, through NVML.

Knows pynvml (package nvidia-ml-py), imported when a collector is entered and not before; knows
nothing of torch's allocator. Invariant: no failure of NVML (no driver, no permission, a figure this
GPU does not give) leaves a collector as anything but None and a reason.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType, TracebackType
from typing import Any

from bench.collect.reading import Reading, one_line

FIGURES = ("nvml_used_bytes", "nvml_total_bytes", "nvml_process_bytes")


class NvmlCollector:
    """A context in which `read()` gives the GPU's memory: used by all, total, used by this process.

    `gpu` is an NVML index or a UUID (`GPU-...`); by default the first GPU this process may use.
    """

    def __init__(self, gpu: int | str | None = None) -> None:
        self._gpu = gpu
        self._nvml: ModuleType | None = None
        self._handle: Any = None
        self._reason = "not entered"

    def __enter__(self) -> NvmlCollector:
        nvml, self._reason = open_nvml()
        if nvml is not None:
            self._nvml = nvml
            try:
                self._handle = gpu_handle(nvml, default_gpu() if self._gpu is None else self._gpu)
            except nvml.NVMLError as error:
                self._reason = one_line(error)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._nvml is not None:
            close_nvml(self._nvml)
        self._nvml = self._handle = None
        self._reason = "already left"

    def read(self) -> Reading:
        """Bytes now; see `FIGURES`."""
        if self._nvml is None or self._handle is None:
            return Reading.missing(FIGURES, self._reason)
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError as error:
            return Reading.missing(FIGURES, str(error))
        process_bytes, reason = self._process_bytes()
        figures = (int(memory.used), int(memory.total), process_bytes)
        return Reading(dict(zip(FIGURES, figures, strict=True)), reason)

    def _process_bytes(self) -> tuple[int | None, str]:
        nvml = self._nvml
        assert nvml is not None
        try:
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except nvml.NVMLError as error:
            return None, one_line(f"memory by process: {error}")
        # In a container NVML lists the host's process ids, which are not ours.
        sizes = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
        if not sizes or sizes[0] is None:
            return None, "memory by process: this process is not listed"
        return int(sizes[0]), ""


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
