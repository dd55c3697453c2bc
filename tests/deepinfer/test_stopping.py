"""An engine whose device fails or hangs: one error from then on, every block accounted for."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from deepinfer.config import EngineConfig
from deepinfer.device import open_device
from deepinfer.engine import LLMEngine
from deepinfer.errors import DeviceError, DeviceTimeoutError
from deepinfer.model_runner import ModelRunner
from deepinfer.models.weights import load_weights
from deepinfer.names import RELEASE_POLICIES
from deepinfer.sequence import SamplingParams
from tests.deepinfer.step_plans import TINY

pytestmark = pytest.mark.timeout(30)  # nothing may hang

CONFIG = EngineConfig(
    block_size=4, num_blocks=33, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64
)
PROMPT = np.arange(10)
SAMPLING = SamplingParams(max_tokens=12)


class Runner:
    """The network, with something else done at one of its calls."""

    def __init__(self, inner):
        self._inner = inner
        self.instead = {}  # (name, number of the call) -> function
        self._num_calls = {"copy_blocks": 0, "forward": 0}

    def copy_blocks(self, pairs):
        self._call("copy_blocks")
        self._inner.copy_blocks(pairs)

    def forward(self, plan):
        self._call("forward")
        return self._inner.forward(plan)

    def _call(self, name):
        self._num_calls[name] += 1
        self.instead.get((name, self._num_calls[name]), lambda: None)()


@pytest.fixture(scope="module")
def weights():
    """One set of weights for all engines."""
    return load_weights(TINY, open_device("cpu-stepped"))


@pytest.fixture
def start(weights):
    """Make an engine and its runner; the devices are closed after the test, and gates opened."""
    devices, gate = [], threading.Event()

    def make(device_name, **changes):
        config = replace(CONFIG, **changes)
        device = open_device(device_name)
        devices.append(device)
        runner = Runner(ModelRunner(TINY, config, weights, device))
        engine = LLMEngine(TINY, config, device=device, runner=runner)
        runner.gate = gate
        return engine, runner

    yield make
    for device in devices:
        device.close()
    gate.set()


def drive(engine):
    """Forks with copies, an abort with a step in flight, requests that come and go: 40 steps."""
    for number in range(40):
        if number % 8 == 0:
            engine.add_request(f"parent-{number}", PROMPT, SAMPLING)
        if number % 8 == 3:
            for child in range(3):
                engine.fork(f"parent-{number - 3}", f"child-{number}-{child}", SAMPLING)
        engine.submit()
        if number % 8 == 5:
            engine.abort(f"parent-{number - 5}")
        engine.collect()


def fail():
    """What the operation does instead of its work."""
    raise ValueError("a planted fault")


def fail_on_load_stream(engine):
    """An operation of stream `load` that raises; the next step waits for it."""
    event = engine.device.event()
    load, compute = engine.device.stream("load"), engine.device.stream("compute")
    load.submit(fail, label="transfer")
    load.record(event)
    compute.wait(event)


def check_stopped(engine, error):
    """Every call answers with the same error, and every block is free, held or withheld."""
    blocks = engine.blocks
    blocks.check_integrity()
    assert blocks.num_free + blocks.num_held + blocks.num_withheld == blocks.num_usable
    counts = f"{blocks.num_free} free, {blocks.num_held} held, {blocks.num_withheld} withheld of 32"
    assert str(error).endswith(f"; the engine has stopped with {counts} blocks")
    withheld = {int(i) for entry in engine.release._entries for i in entry.ids}
    withheld = {i for i in withheld if not blocks.ref_count(i)}
    assert len(withheld) == blocks.num_withheld, "each withheld block has a fence that names it"
    for call in (
        engine.submit,
        engine.collect,
        engine.step,
        lambda: engine.add_request("late", PROMPT, SAMPLING),
        lambda: engine.fork("parent-0", "late", SAMPLING),
        lambda: engine.abort("parent-0"),
    ):
        with pytest.raises(type(error)) as again:
            call()
        assert str(again.value) == str(error)
    assert blocks.num_free + blocks.num_held + blocks.num_withheld == blocks.num_usable


@pytest.mark.parametrize("release", RELEASE_POLICIES)
@pytest.mark.parametrize("device", ["cpu", "cpu-stepped"])
@pytest.mark.parametrize(
    ("call", "number", "what"),
    [
        ("copy_blocks", 1, "operation 'copy_blocks step 4' on stream 'copy' failed"),
        ("copy_blocks", 2, "on stream 'copy' failed"),
        ("forward", 1, "operation 'forward step 1' on stream 'compute' failed"),
        ("forward", 6, "operation 'forward step 6' on stream 'compute' failed"),
        ("load", 0, "operation 'transfer' on stream 'load' failed"),
    ],
)
def test_an_operation_that_raises_stops_the_engine(start, device, release, call, number, what):
    """Whatever it was, with waits queued and a step in flight: one error, that names it."""
    engine, runner = start(device, release=release)
    runner.instead[call, number] = fail
    if call == "load":
        engine.add_request("first", PROMPT, SAMPLING)
        engine.step()
        fail_on_load_stream(engine)
    with pytest.raises(DeviceError, match=f"{what}: ValueError: a planted fault") as caught:
        drive(engine)
    check_stopped(engine, caught.value)
    with pytest.raises(DeviceError, match="a planted fault"):
        engine.device.synchronize()
    engine.device.close()


@pytest.mark.parametrize("device", ["cpu", "cpu-stepped"])
def test_a_stream_that_waits_for_a_failed_one_fails_with_it(start, device):
    """Whoever waits behind the step is told why, and is not left asleep."""
    engine, runner = start(device)
    runner.instead["forward", 1] = lambda: runner.gate.wait(0.1) or fail()
    load, behind = engine.device.stream("load"), engine.device.event()
    engine.add_request("first", PROMPT, SAMPLING)
    assert engine.submit()
    load.wait(engine._in_flight[0].flight.end)
    load.submit(lambda: None)
    load.record(behind)
    with pytest.raises(DeviceError, match="a planted fault"):
        behind.synchronize()
    with pytest.raises(DeviceError, match="a planted fault"):
        engine.collect()
    engine.device.close()


def test_a_step_that_never_ends_is_given_up(start):
    """The error names step, blocks, requests, operation and stream."""
    engine, runner = start("cpu", timeout_s=0.2)
    runner.instead["forward", 3] = runner.gate.wait
    engine.add_request("a", PROMPT, SAMPLING)
    engine.add_request("b", PROMPT, SAMPLING)
    engine.step()
    engine.step()
    engine.submit()
    with pytest.raises(DeviceTimeoutError) as caught:
        engine.collect()
    assert str(caught.value) == (
        "step 3 has no result: it may still touch blocks 1, 2, 3, 4, ... (6 in all), those held by "
        "'a', 'b'; after 0.2 s operation 'forward step 3' on stream 'compute' still runs; the "
        "engine has stopped with 26 free, 6 held, 0 withheld of 32 blocks"
    )
    check_stopped(engine, caught.value)
    engine.device.close()


@pytest.mark.parametrize("release", ["blocking", "deferred"])
@pytest.mark.parametrize("fence", ["step", "block"])
def test_a_fence_that_never_passes_is_given_up(start, release, fence):
    """The error names the fence's step, the blocks withheld behind it and who gave them up."""
    engine, runner = start("cpu", release=release, fence=fence, timeout_s=0.2)
    runner.instead["copy_blocks", 1] = runner.gate.wait
    with pytest.raises(DeviceTimeoutError) as caught:
        drive(engine)
    if fence == "step" and release == "deferred":
        assert str(caught.value) == (
            "the fence of step 4 has not passed: it keeps blocks 3 that 'child-3-0', 'child-3-1', "
            "'child-3-2' gave up; after 0.2 s operation 'copy_blocks step 4' on stream 'copy' "
            "still runs; the engine has stopped with 22 free, 10 held, 0 withheld of 32 blocks"
        )
    assert "fence of step 4 has not passed: it keeps blocks 3" in str(caught.value)
    assert "'child-3-0'" in str(caught.value)
    check_stopped(engine, caught.value)
    engine.device.close()


def test_without_a_limit_a_slow_step_is_waited_for(start):
    """`timeout_s=0` switches the limit off."""
    engine, runner = start("cpu", timeout_s=0)
    runner.instead["forward", 1] = lambda: runner.gate.wait(0.3)
    engine.add_request("a", PROMPT, SAMPLING)
    assert engine.step() is not None
    assert engine.failure is None
