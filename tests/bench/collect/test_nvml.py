"""NVML figures, against a small stand-in for the driver's library."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from bench.collect.nvml import (
    FIGURES,
    PROCESSES,
    STATE,
    THROTTLE_REASONS,
    NvmlCollector,
    NvmlGpu,
    default_gpu,
)


class FakeNvml(ModuleType):
    """Two GPUs of 1000 bytes each; every call can be made to fail."""

    class NVMLError(Exception):
        """What pynvml raises."""

    def __init__(self, fail=(), processes=()):
        super().__init__("pynvml")
        self.fail, self.processes, self.is_open = fail, processes, False

    def _call(self, name):
        if name in self.fail:
            raise self.NVMLError(f"{name} failed\nbadly")

    def nvmlInit(self):
        self._call("init")
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False
        self._call("shutdown")

    def nvmlDeviceGetHandleByIndex(self, index):
        self._call("handle")
        return f"index {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return f"uuid {uuid}"

    def nvmlDeviceGetMemoryInfo(self, handle):
        self._call("memory")
        self.asked = handle
        return SimpleNamespace(used=600, total=1000)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        self._call("processes")
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.processes]


@pytest.fixture
def install(monkeypatch):
    """Put a fake in the place of pynvml."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(**behaviour):
        nvml = FakeNvml(**behaviour)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return put


def test_memory_of_the_gpu_and_of_this_process(install):
    """Used by all, total, and the share of our own process id; NVML is closed afterwards."""
    nvml = install(processes=[(1, 100), (os.getpid(), 250)])
    with NvmlCollector() as collector:
        reading = collector.read()
    assert reading.values == dict(zip(FIGURES, (600, 1000, 250), strict=True))
    assert reading.reason == ""
    assert not nvml.is_open


@pytest.mark.parametrize("processes", [[], [(1, 100)], [(os.getpid(), None)]])
def test_a_process_that_is_not_listed_costs_only_its_own_figure(install, processes):
    """In a container the process list holds other ids: that figure is None, with its reason."""
    install(processes=processes)
    with NvmlCollector() as collector:
        reading = collector.read()
    assert reading.values["nvml_used_bytes"] == 600
    assert reading.values["nvml_process_bytes"] is None
    assert "not listed" in reading.reason


@pytest.mark.parametrize("fail", ["init", "handle", "memory"])
def test_every_failure_is_none_with_one_line(install, fail):
    """No driver, no GPU, no permission: nothing raises, the reason has no line break."""
    install(fail=(fail, "shutdown"))
    with NvmlCollector() as collector:
        reading = collector.read()
    assert set(reading.values) == set(FIGURES)
    assert set(reading.values.values()) == {None}
    assert f"{fail} failed badly" in reading.reason


def test_without_the_package_the_reason_names_it(monkeypatch):
    """nvidia-ml-py missing is no crash."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with NvmlCollector() as collector:
        assert collector.read().reason == "package nvidia-ml-py is not installed"


def test_outside_its_context_a_collector_reads_nothing(install):
    """Before and after, with the reason."""
    install()
    collector = NvmlCollector()
    assert collector.read().reason == "not entered"
    with collector:
        pass
    assert collector.read().reason == "already left"


@pytest.mark.parametrize(
    ("visible", "asked"),
    [("", "index 0"), ("1,0", "index 1"), ("GPU-abc", "uuid GPU-abc")],
)
def test_the_gpu_asked_is_the_one_cuda_would_use(install, monkeypatch, visible, asked):
    """CUDA_VISIBLE_DEVICES decides which GPU `cuda:0` is."""
    nvml = install()
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with NvmlCollector() as collector:
        collector.read()
    assert nvml.asked == asked


def test_a_torch_that_uses_cuda_is_asked_for_its_gpu(monkeypatch):
    """torch's own UUID beats a guess from the environment."""
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        get_device_properties=lambda index: SimpleNamespace(uuid="12-34"),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert default_gpu() == "GPU-12-34"


def test_the_real_package_reads_the_answers_of_the_c_library(library):
    """nvidia-ml-py over a fake library: its structs, its two calls for the list of processes."""
    with NvmlCollector() as collector:
        reading = collector.read()
    assert reading.values == {
        "nvml_used_bytes": 40 * 2**30,
        "nvml_total_bytes": 150754820096,
        "nvml_process_bytes": 39 * 2**30,
    }
    assert library.asked[0] == "nvmlInitWithFlags"
    assert library.asked[-1] == "nvmlShutdown"


def test_an_older_driver_is_asked_for_throttle_reasons_by_their_old_name(library):
    """A driver without `...EventReasons` answers `...ThrottleReasons`, with the same bits."""
    library.missing.add("nvmlDeviceGetCurrentClocksEventReasons")
    library.calls["nvmlDeviceGetCurrentClocksThrottleReasons"] = {"return": 0, "out": [0x60]}
    with NvmlGpu() as gpu:
        values, reasons = gpu.ask(*STATE)
    assert values["throttle_reasons"] == ("sw_thermal_slowdown", "hw_thermal_slowdown")
    assert reasons == {}


def test_a_package_newer_than_the_driver_is_a_reason(library):
    """pynvml then raises an error that is not an NVMLError: still one line, only that figure."""
    library.missing.add("nvmlDeviceGetComputeRunningProcesses_v3")
    with NvmlCollector() as collector:
        reading = collector.read()
    assert reading.values["nvml_used_bytes"] == 40 * 2**30
    assert reading.values["nvml_process_bytes"] is None
    assert "does not match" in reading.reason


def test_the_slices_of_a_process_add_up(library):
    """On MIG a process is listed once per slice; one size not told makes the sum unknown."""
    processes = library.calls["nvmlDeviceGetComputeRunningProcesses_v3"]["processes"]
    processes.append(dict(processes[0], gpuInstanceId=2))
    with NvmlGpu() as gpu:
        assert gpu.ask(PROCESSES)[0]["processes"][4242] == 2 * 2**30
        processes.append(dict(processes[0], usedGpuMemory=2**64 - 1))
        assert gpu.ask(PROCESSES)[0]["processes"][4242] is None


def test_names_of_throttle_reasons_are_those_of_nvml_h():
    """Each bit has the name that nvidia-ml-py gives it."""
    import pynvml

    for bit, name in THROTTLE_REASONS.items():
        camel = "".join(part.capitalize() for part in name.split("_"))
        assert getattr(pynvml, f"nvmlClocksThrottleReason{camel}") == bit
    assert sum(THROTTLE_REASONS) == pynvml.nvmlClocksThrottleReasonAll
