"""The hybrid runner behind a worker: tokens, copies of slots, wrong ring rows."""

from __future__ import annotations

import pytest

from deepinfer.config import EngineConfig
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.errors import UserError
from deepinfer.hybrid_runner import HybridRunner, check_pools_fit
from deepinfer.observer import KV, STATE, Access
from deepinfer.worker import Worker
from tests.deepinfer.step_plans import Run, step_plan
from tests.golden_models import load_golden

SIZE = 4
CONFIG = EngineConfig(block_size=SIZE, num_blocks=64, max_num_seqs=4, max_model_len=128)
GOLDEN = load_golden("v41_b")
IDS = GOLDEN.values["ids.0"].tolist()
GREEDY = GOLDEN.values["raw.0.logits"].argmax(-1)


@pytest.fixture
def worker(device: SteppedCpuDevice) -> Worker:
    runner = HybridRunner(GOLDEN.config, CONFIG, GOLDEN.weights, device)
    device.log.clear()
    return Worker(runner, device, SIZE)


def forward(worker: Worker, *runs: Run, **copies: object) -> list[int]:
    plan = step_plan(runs, SIZE, **copies)
    worker.submit_copies(plan)
    result = worker.submit_forward(plan).collect()
    assert result.tags is not None
    assert result.tags.count == 0
    return result.token_ids.tolist()


def test_sampled_tokens_are_the_greedy_ones(worker: Worker) -> None:
    """Of the sequences that sample, in their order; a chunk in the middle samples nothing."""
    a = Run(IDS, range(1, 16), 0, 20, state=1)
    b = Run(IDS, range(20, 35), 0, 7, state=4, sampled=False)
    assert forward(worker, b, a) == [GREEDY[19]]
    b = Run(IDS, range(20, 35), 7, 3, state=4)
    assert forward(worker, a.then(IDS[20]), b) == [GREEDY[20], GREEDY[9]]
    assert forward(worker, Run(IDS, range(20, 35), 10, 5, state=4, sampled=False)) == []


def test_copied_slot_and_block_continue_a_fork(worker: Worker, device: SteppedCpuDevice) -> None:
    """The worker copies blocks and slots before the forward pass of the same step."""
    parent = Run(IDS, range(1, 16), 0, 18, state=2)
    forward(worker, parent)
    device.log.clear()
    table = [*range(1, 5), 40, *range(41, 51)]
    child = Run(IDS, table, 18, state=3)
    tokens = forward(worker, child, copies=[(5, 40)], state_copies=[(2, 3)])
    assert tokens == [GREEDY[18]]
    assert device.log == [
        ("copy", "copy_blocks step 1"),
        ("copy", "copy_states step 1"),
        ("compute", "forward step 1"),
    ]


def test_state_slots_are_declared(worker: Worker, device: SteppedCpuDevice) -> None:
    """What a step reads and writes at the device seam includes its slots and the slot copies."""
    declared: list[tuple[str, list[Access], list[Access]]] = []
    for name in ("copy", "compute"):
        stream = device.stream(name)
        submit = stream.submit

        def spy(fn, *, reads=(), writes=(), cost=None, label="", submit=submit):
            declared.append((label, list(reads), list(writes)))
            submit(fn, reads=reads, writes=writes, cost=cost, label=label)

        stream.submit = spy
    plan = step_plan([Run(IDS, [1, 2], 0, 5, state=3)], SIZE, state_copies=[(2, 3)])
    worker.submit_copies(plan)
    worker.submit_forward(plan).collect()
    (copy, reads, writes), (forwarded, read, written) = declared
    assert (copy, forwarded) == ("copy_states step 1", "forward step 1")
    assert [access.ids.tolist() for access in reads if access.kind == STATE] == [[2]]
    assert [access.ids.tolist() for access in writes if access.kind == STATE] == [[3]]
    for accesses in (read, written):
        assert [access.ids.tolist() for access in accesses if access.kind == STATE] == [[3]]
        assert any(access.kind == KV for access in accesses)


def test_row_of_another_position_is_counted_and_not_read(worker: Worker) -> None:
    """A request that gets the slot of another one: every row it wants and does not find."""
    runner = worker.runner
    assert isinstance(runner, HybridRunner)
    forward(worker, Run(IDS, range(1, 16), 0, 18, state=2))
    wrong = step_plan([Run(IDS, range(1, 16), 18, state=1)], SIZE)  # its rows are in slot 2
    tags = worker.submit_forward(wrong).collect().tags
    window = GOLDEN.config.sliding_window
    assert tags is not None
    assert tags.count == window - 1  # all but its own
    assert sorted(tags.positions.tolist()) == list(range(18 - window + 1, 18))
    assert not tags.found.any()
    logprobs = []
    for content in (0.0, 1000.0):
        runner.cache.region("window", 0)[1] = content
        again = step_plan([Run(IDS, range(1, 16), 18, state=1)], SIZE)
        logprobs += worker.submit_forward(again).collect().logprobs.tolist()
    assert logprobs[0] == logprobs[1]


def test_pools_beyond_memory_are_refused(device: SteppedCpuDevice) -> None:
    """With both numbers, before anything is allocated."""
    config = EngineConfig(block_size=SIZE, num_blocks=1 << 40, max_num_seqs=4)
    with pytest.raises(UserError, match=r"1099511627776 blocks and \d+ state slots: \d+ bytes"):
        check_pools_fit(GOLDEN.config, config, device)
    check_pools_fit(GOLDEN.config, CONFIG, device)
