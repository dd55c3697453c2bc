"""What the cases share: small worlds, the groups of policies, and one stream run alone."""

from __future__ import annotations

from typing import Any

from deepinfer.config import EngineConfig
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.names import RELEASE_POLICIES, UNSAFE_POLICIES
from deepinfer.testing.world import World as UncheckedWorld
from tests.deepinfer.host_world import World

SAFE = [name for name in RELEASE_POLICIES if name not in UNSAFE_POLICIES]
HOST_HOLDS_BACK = ["deferred", "polled", "step"]  # those that withhold while work is open


def case_config(block_size: int, num_blocks: int, **changes: Any) -> EngineConfig:
    """A pool of the case's size in an engine that nothing else limits."""
    settings: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1000,
        "max_model_len": 1000,
    }
    return EngineConfig(block_size=block_size, num_blocks=num_blocks, **(settings | changes))


def world(block_size: int, num_blocks: int, **changes: Any) -> World:
    """A world that checks everything at every moment."""
    return World(case_config(block_size, num_blocks, **changes))


def run_only(w: UncheckedWorld, stream: str) -> None:
    """Run one stream as far as it gets while all others stand still."""
    assert isinstance(w.device, SteppedCpuDevice)
    while w.device.advance(stream):
        pass
