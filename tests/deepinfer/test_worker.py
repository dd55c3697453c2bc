"""The worker: order of its operations, what it declares, and what comes back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer.config import EngineConfig
from deepinfer.device.base import Device
from deepinfer.device.cpu import SteppedCpuDevice, ThreadedCpuDevice
from deepinfer.models.weights import load_weights
from deepinfer.observer import KV
from deepinfer.plan import LookAhead
from deepinfer.worker import Worker, _touched_rows
from tests.deepinfer.step_plans import TINY, Run, cache_of, model_worker, step_plan

SIZE = 16
CONFIG = EngineConfig(block_size=SIZE, num_blocks=64, max_model_len=256)
PROMPT = np.random.default_rng(0).integers(0, 256, 70).tolist()


@pytest.fixture
def worker(device: SteppedCpuDevice) -> Worker:
    worker = new_worker(device)
    device.log.clear()  # what made the pool and the rope table
    return worker


def new_worker(device: Device) -> Worker:
    return model_worker(TINY, CONFIG, load_weights(TINY, device), device)


def generate(worker: Worker, runs: list[Run], num: int) -> tuple[list[list[int]], np.ndarray]:
    """`num` steps of all runs together: tokens [step][run] and the last log-probabilities."""
    emitted = []
    for _ in range(num):
        result = worker.submit_forward(step_plan(runs, SIZE)).collect()
        emitted.append(result.token_ids.tolist())
        runs = [run.then(token) for run, token in zip(runs, emitted[-1], strict=True)]
    return emitted, result.logprobs


def test_submitting_does_not_compute(worker: Worker, device: SteppedCpuDevice) -> None:
    """Submitting queues one operation a step; the step's end passes when it has run."""
    flight = worker.submit_forward(step_plan([Run(PROMPT, range(1, 6), 0, 70)], SIZE, step=9))
    assert device.log == []
    assert not flight.end.query()
    assert device.runnable() == ["compute"]
    result = flight.collect()
    assert device.log == [("compute", "forward step 9")]
    assert result.step == 9
    assert (result.token_ids.dtype, result.logprobs.dtype) == (np.int32, np.float32)
    assert result.token_ids.shape == result.logprobs.shape == (1,)
    assert flight.device_ms() > 0


def test_copies_run_between_the_forwards(worker: Worker, device: SteppedCpuDevice) -> None:
    """Copies wait for the step before, the forward waits for the copies, whatever runs first."""
    first = worker.submit_forward(step_plan([Run(PROMPT, range(1, 6), 0, 70)], SIZE, step=1))
    children = [Run([*PROMPT, 5], [1, 2, 3, 4, 6], 70)]
    plan = step_plan(children, SIZE, step=2, copies=[(5, 6)])
    worker.submit_copies(plan)
    done = device.event()
    device.stream("copy").record(done)
    second = worker.submit_forward(plan)
    assert device.runnable() == ["compute"]
    assert device.advance("copy") == 0
    done.synchronize()
    assert device.log == [("compute", "forward step 1"), ("copy", "copy_blocks step 2")]
    second.collect()
    assert device.log[2:] == [("compute", "forward step 2")]
    assert torch.equal(cache_of(worker).keys(1)[5, :6], cache_of(worker).keys(1)[6, :6])
    first.collect()


def test_a_forward_needs_its_copies(worker: Worker, device: SteppedCpuDevice) -> None:
    """Collecting a step runs its copies first, for the forward waits for them."""
    plan = step_plan([Run(PROMPT, range(1, 6), 0, 70)], SIZE, step=4, copies=[(8, 9)])
    worker.submit_copies(plan)
    worker.submit_forward(plan).collect()
    assert device.log == [("copy", "copy_blocks step 4"), ("compute", "forward step 4")]


def test_no_copies_queue_nothing(worker: Worker, device: SteppedCpuDevice) -> None:
    """A plan without copies leaves the copy stream alone."""
    worker.submit_copies(step_plan([Run(PROMPT, range(1, 6), 0, 70)], SIZE))
    assert device.runnable() == []
    device.synchronize()
    assert device.log == []


def test_operations_declare_their_blocks(
    worker: Worker, device: SteppedCpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies read sources and write destinations; a forward reads contexts and writes new slots."""
    declared = {}
    for name in ("copy", "compute"):
        stream = device.stream(name)
        submit = stream.submit

        def spy(fn, *, reads=(), writes=(), label="", submit=submit, **rest):  # type: ignore[no-untyped-def]
            ids = [
                sorted({int(i) for access in accesses if access.kind == KV for i in access.ids})
                for accesses in (reads, writes)
            ]
            declared[label] = ids
            submit(fn, reads=reads, writes=writes, label=label, **rest)

        monkeypatch.setattr(stream, "submit", spy)
    runs = [Run(PROMPT, [9, 8, 7, 6, 5], 16, 20), Run(PROMPT, [9, 11], 31)]
    plan = step_plan(runs, SIZE, step=3, padding=2, copies=[(8, 11), (2, 3)])
    worker.submit_copies(plan)
    worker.submit_forward(plan)
    assert declared == {
        "copy_blocks step 3": [[2, 8], [3, 11]],
        "forward step 3": [[7, 8, 9, 11], [7, 8, 11]],
    }


def test_a_plan_made_ahead_may_write_as_far_back_as_is_unsure() -> None:
    """Decodes planned at 33, in the third block: with two rows unsure, the second counts too."""
    plan = step_plan([Run([*PROMPT], range(1, 6), 33), Run([*PROMPT], range(6, 11), 33)], 16)
    none, some = np.zeros(2, np.int32), np.ones(2, np.bool_)
    unsure = np.array([2, 0], np.int32)
    plan = replace(plan, ahead=LookAhead(none, some, none, none, unsure, none, (), 5))
    read, written = _touched_rows(plan, 16)
    assert read.ids.tolist() == [1, 2, 3, 6, 7, 8]
    spans = zip(written.ids, written.start, written.end, written.holders, strict=True)
    assert [tuple(map(int, span)) for span in spans] == [(2, 15, 16, 0), (3, 0, 2, 0), (8, 1, 2, 1)]


def test_a_step_that_samples_nothing(worker: Worker) -> None:
    """A step of chunks only gives empty arrays, and its rows are in the cache."""
    run = Run(PROMPT, range(1, 6), 0, 32, sampled=False)
    result = worker.submit_forward(step_plan([run], SIZE)).collect()
    assert result.token_ids.shape == result.logprobs.shape == (0,)
    assert (result.token_ids.dtype, result.logprobs.dtype) == (np.int32, np.float32)
    assert cache_of(worker).keys(1)[1:3].count_nonzero(dim=(1, 2, 3)).tolist() == [512, 512]
    assert cache_of(worker).keys(1)[3:].count_nonzero() == 0


def test_only_sampling_rows_come_back(worker: Worker) -> None:
    """Results follow `sample_seq`: the middle sequence of three does not sample."""
    runs = [
        Run(PROMPT, range(1, 6), 0, 70),
        Run(PROMPT[::-1], range(6, 11), 0, 30, sampled=False),
        Run(PROMPT[5:], range(11, 16), 0, 65),
    ]
    both = worker.submit_forward(step_plan(runs, SIZE)).collect()
    alone = [worker.submit_forward(step_plan([runs[i]], SIZE)).collect() for i in (0, 2)]
    assert both.token_ids.tolist() == [int(result.token_ids[0]) for result in alone]


def test_tokens_do_not_depend_on_the_batch(device: SteppedCpuDevice) -> None:
    """Four children of one prompt draw the same tokens together, shared, and each alone."""
    children = [
        Run([*PROMPT[:64], i], [1, 2, 3, 4, 10 + i], 64, temperature=1.0, seed=i) for i in range(8)
    ]
    emitted = []
    for group in (children, *([child] for child in children)):
        worker = new_worker(device)
        prefill = Run(PROMPT[:64], range(1, 5), 0, 64, sampled=False)
        worker.submit_forward(step_plan([prefill], SIZE)).collect()
        emitted.append(np.array(generate(worker, group, 12)[0]))
    assert np.array_equal(emitted[0], np.hstack(emitted[1:]))
    assert len({tuple(column) for column in emitted[0].T}) == 8


def test_chunks_give_the_tokens_of_one_prefill(device: SteppedCpuDevice) -> None:
    """A prompt in chunks of 23 continues like the prompt in one step."""
    whole, _ = generate(new_worker(device), [Run(PROMPT, range(1, 8), 0, 70)], 10)
    worker = new_worker(device)
    for begin in (0, 23):
        chunk = Run(PROMPT, range(11, 18), begin, 23, sampled=False)
        worker.submit_forward(step_plan([chunk], SIZE)).collect()
    assert generate(worker, [Run(PROMPT, range(11, 18), 46, 24)], 10)[0] == whole


def test_recycled_events_serve_the_next_step(worker: Worker, device: SteppedCpuDevice) -> None:
    """A step's events go back once; copies after it need not wait for it any more."""
    flight = worker.submit_forward(step_plan([Run(PROMPT, range(1, 6), 0, 70)], SIZE, step=1))
    flight.collect()
    flight.recycle()
    flight.recycle()
    assert flight.recycled
    reused = [device.event(timing=True), device.event(timing=True)]
    device.stream("other").submit(lambda: None)
    for event in reused:
        device.stream("other").record(event)
    worker.submit_copies(step_plan([Run(PROMPT, range(1, 6), 69)], SIZE, step=2, copies=[(1, 9)]))
    assert "copy" in device.runnable()


def test_the_host_may_run_ahead() -> None:
    """On the threaded device steps queue up; the results are those of the stepped one."""
    plans = [
        step_plan([Run(PROMPT, range(1, 6), begin, 10, temperature=1.0)], SIZE, step=begin)
        for begin in range(0, 70, 10)
    ]
    results = []
    for device in (ThreadedCpuDevice(), SteppedCpuDevice()):
        worker = new_worker(device)
        flights = [worker.submit_forward(plan) for plan in plans]
        results.append([flight.collect().token_ids.tolist() for flight in flights])
        device.close()
    assert results[0] == results[1]
