"""One OpenMP team in the process: what keeps a step on threads as fast as one without."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from deepinfer.device.openmp import use_one_thread

ENGINE = """
import os
import torch
from deepinfer import EngineConfig, LLMEngine, ModelConfig, SamplingParams

def num_threads():
    return len(os.listdir("/proc/self/task"))

before = num_threads()
model = ModelConfig(2, 64, 4, 2, 16, 128, 256)
config = EngineConfig(block_size=16, num_blocks=1025, max_num_seqs=16, max_model_len=65536)
with LLMEngine(model, config, device="cpu") as engine:
    engine.add_request("parent", list(range(200)), SamplingParams(max_tokens=4))
    engine.step()
    for child in range(8):
        engine.fork("parent", str(child), SamplingParams(max_tokens=4))
    while engine.has_unfinished():
        engine.step()
    print(num_threads() - before)
"""

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="counts threads in /proc, which is Linux's"
)


def test_only_the_calling_thread_loses_its_team():
    """A side stream's thread computes alone; every other thread keeps the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    seen = []

    def side() -> None:
        use_one_thread()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=side)
    thread.start()
    thread.join()
    try:
        assert seen == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@needs_proc
def test_an_engine_makes_one_team():
    """Two stream threads and one team: the host's own thread and the copies never start another.

    Sizes are such that filling the pool, making the rope table and copying blocks would each be
    worth a team to torch.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    run = subprocess.run(
        [sys.executable, "-c", ENGINE], capture_output=True, text=True, env=env, check=True
    )
    streams, team = 2, 1  # the team's master is stream compute
    assert int(run.stdout) == streams + team
