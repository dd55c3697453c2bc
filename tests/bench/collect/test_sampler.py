"""The NVML sampler, on the real nvidia-ml-py over a fake of its C library."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import pytest

from bench.collect import sampler as sampler_module
from bench.collect.sampler import UTILIZATION_CAVEAT, NvmlSampler
from deepinfer.errors import UserError

GIB = 2**30


def wait_for(condition, timeout_s=5.0):
    """Until `condition()` holds; fails the test if it never does."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "nothing happened"
        time.sleep(0.001)


def threads():
    """Sampler threads alive."""
    return [thread for thread in threading.enumerate() if thread.name == "nvml-sampler"]


def test_a_sample_has_every_figure_of_the_driver(library):
    """Bytes, clocks, reasons by name, watts from milliwatts, memory by process id."""
    with NvmlSampler(60.0) as sampler:
        (sample,) = sampler.samples
    assert (sample.used_bytes, sample.total_bytes) == (40 * GIB, 150754820096)
    assert sample.processes == {4242: GIB, os.getpid(): 39 * GIB}
    assert (sample.sm_clock_mhz, sample.memory_clock_mhz) == (1980, 3201)
    assert sample.throttle_reasons == ("sw_power_cap",)
    assert (sample.power_w, sample.temperature_c) == (512.345, 61)
    assert sample.utilization_percent == 97
    assert sample.cost_us > 0


def test_the_summary_shows_what_changed_during_the_run(library):
    """Peak and median memory, clocks at start and end, reasons seen only for a while."""
    used = library.calls["nvmlDeviceGetMemoryInfo"]["out"][0]
    clocks = library.calls["nvmlDeviceGetClockInfo"]["by_argument"]
    reasons = library.calls["nvmlDeviceGetCurrentClocksEventReasons"]
    sampler = NvmlSampler(60.0)
    with sampler:  # the thread never comes to its turn, so each sample is one of these
        for size, clock, bits in ((50, 1200, 0x41), (44, 1500, 0x800)):
            used["used"], clocks["1"], reasons["out"] = size * GIB, [clock], [bits]
            sampler._take_sample()
    summary = sampler.summary()
    assert summary["num_samples"] == 4
    assert summary["used_bytes"] == {"peak": 50 * GIB, "median": 44 * GIB}
    assert summary["process_bytes"]["peak"] == 39 * GIB
    assert summary["sm_clock_mhz"] == {"start": 1980, "end": 1500, "min": 1200}
    assert summary["throttle_reasons"] == {
        "start": ["sw_power_cap"],
        "end": ["unknown_0x800"],
        "seen": ["gpu_idle", "hw_thermal_slowdown", "sw_power_cap", "unknown_0x800"],
    }
    assert summary["slowdowns"] == ["hw_thermal_slowdown", "sw_power_cap"]
    assert summary["notes"] == [UTILIZATION_CAVEAT]
    assert summary["reasons"] == {}
    json.dumps(summary, allow_nan=False)


def test_it_samples_at_its_interval_and_says_what_that_cost(library):
    """Every 10 ms, none early; the cost is that of the calls, as a share of the wall time."""
    library.on_call = lambda name: time.sleep(0.002 if "MemoryInfo" in name else 0)
    with NvmlSampler(0.01) as sampler:
        wait_for(lambda: len(sampler.samples) >= 6)
    times_s = [sample.time_s for sample in sampler.samples]
    assert all(time_s >= 0.01 * number for number, time_s in enumerate(times_s[:-1]))
    cost = sampler.summary()["cost"]
    assert 2000 <= cost["us_per_sample"] <= cost["max_us"]
    total_us = sum(sample.cost_us for sample in sampler.samples)
    assert cost["wall_share"] == pytest.approx(total_us / (sampler._wall_s * 1e6))
    assert 0 < cost["wall_share"] < 1
    assert not threads()


def test_moments_missed_during_a_slow_sample_are_skipped(library):
    """A sample that takes five intervals is not followed by a burst of those it missed."""
    slow = iter([0.0, 0.05])
    library.on_call = lambda name: time.sleep(next(slow, 0) if "MemoryInfo" in name else 0)
    with NvmlSampler(0.01) as sampler:
        wait_for(lambda: len(sampler.samples) >= 4)
    times_s = [sample.time_s for sample in sampler.samples[:4]]
    assert times_s[2] >= 0.06
    # The grid of intervals goes on: the next two are not closer than one step of it.
    assert int(times_s[3] / 0.01) > int(times_s[2] / 0.01)


def test_a_gpu_lost_mid_run_ends_the_sampling_with_one_line(library):
    """The run goes on; figures up to then are kept, the clock at the end is unknown."""
    with NvmlSampler(0.005) as sampler:
        wait_for(lambda: len(sampler.samples) >= 3)
        library.lose()
        wait_for(lambda: not threads())
    summary = sampler.summary()
    assert summary["used_bytes"]["peak"] == 40 * GIB
    assert summary["sm_clock_mhz"] == {"start": 1980, "end": None, "min": 1980}
    assert sampler.samples[-1].used_bytes is None
    assert sampler.samples[-2].used_bytes is not None, "it asked again after the loss"
    assert summary["reasons"]["nvml"].endswith("GPU is lost")
    assert "\n" not in summary["reasons"]["nvml"]


@pytest.mark.parametrize(
    ("call", "error", "figure", "line"),
    [
        ("nvmlDeviceGetMemoryInfo", "no_permission", "used_bytes", "Insufficient Permissions"),
        ("nvmlDeviceGetUtilizationRates", "not_supported", "utilization_percent", "Not Supported"),
        (
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "no_permission",
            "processes",
            "Insufficient Permissions",
        ),
    ],
)
def test_what_a_mig_slice_or_a_plain_user_may_not_ask_is_empty(library, call, error, figure, line):
    """One refused question costs its own figures and leaves one line; the others are read."""
    library.errors[call] = error
    with NvmlSampler(60.0) as sampler:
        pass
    assert getattr(sampler.samples[0], figure) is None
    assert sampler.reasons[figure] == line
    assert sampler.samples[0].temperature_c == 61
    json.dumps(sampler.summary(), allow_nan=False)


def test_memory_of_a_process_that_is_not_listed_says_so(library):
    """Behind a container's own process ids: None, with the reason; the others are listed."""
    library.calls["nvmlDeviceGetComputeRunningProcesses_v3"]["processes"].pop()
    with NvmlSampler(60.0) as sampler:
        pass
    summary = sampler.summary()
    assert sampler.samples[0].processes == {4242: GIB}
    assert summary["process_bytes"] == {"peak": None, "median": None}
    assert summary["reasons"] == {"process_bytes": "this process is not listed"}


@pytest.mark.parametrize("call", ["nvmlInitWithFlags", "nvmlDeviceGetHandleByIndex_v2"])
def test_without_driver_or_gpu_there_are_no_samples_and_no_thread(library, call):
    """Every key of the summary is there, empty, with one line."""
    library.errors[call] = "driver_not_loaded"
    with NvmlSampler(0.001) as sampler:
        assert not threads()
    summary = sampler.summary()
    assert sampler.samples == []
    assert summary["used_bytes"] == {"peak": None, "median": None}
    assert summary["throttle_reasons"] == {"start": None, "end": None, "seen": None}
    assert summary["cost"] == {"us_per_sample": None, "max_us": None, "wall_share": None}
    assert list(summary["reasons"]) == ["nvml"]
    assert "Driver Not Loaded" in summary["reasons"]["nvml"]
    json.dumps(summary, allow_nan=False)


def test_without_the_package_the_line_names_it(monkeypatch):
    """nvidia-ml-py missing is no crash."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with NvmlSampler() as sampler:
        pass
    assert sampler.summary()["reasons"] == {"nvml": "package nvidia-ml-py is not installed"}


def test_a_driver_that_hangs_does_not_hold_up_the_run(library, monkeypatch):
    """Leaving the context waits for a while, not for ever, and does not close NVML under it."""
    monkeypatch.setattr(sampler_module, "PATIENCE_S", 0.05)
    hanging, answer = threading.Event(), threading.Event()

    def hang(name):
        if threading.current_thread() in threads():
            hanging.set()
            answer.wait(10)

    library.on_call = hang
    with NvmlSampler(0.001) as sampler:
        assert hanging.wait(5)
    assert "did not return in 0.05 s" in sampler.summary()["reasons"]["nvml"]
    assert "nvmlShutdown" not in library.asked
    answer.set()
    wait_for(lambda: not threads())


@pytest.mark.parametrize("interval_s", [0, -1.0, float("nan")])
def test_an_interval_must_be_above_0(interval_s):
    """The message names the value."""
    with pytest.raises(UserError, match=f"interval_s: {interval_s}"):
        NvmlSampler(interval_s)


def test_an_exception_in_the_run_passes_through_and_stops_the_thread(library):
    """The sampler neither hides it nor goes on."""
    with pytest.raises(KeyError), NvmlSampler(0.001):
        raise KeyError
    assert not threads()
    assert library.asked[-1] == "nvmlShutdown"
