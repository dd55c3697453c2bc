"""The right network for a model, by the type of its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepinfer.config import EngineConfig
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.errors import UserError
from deepinfer.hybrid_runner import HybridRunner
from deepinfer.model_runner import ModelRunner
from deepinfer.models.hybrid.layer_plan import v4_config
from deepinfer.models.hybrid.loading import num_parameters as num_hybrid_parameters
from deepinfer.models.weights import num_parameters
from deepinfer.runners import Model, check_fits, load_model, make_runner
from tests.deepinfer.step_plans import TINY
from tests.hybrid_configs import v4_raw

CONFIG = EngineConfig(block_size=16, num_blocks=8, max_num_seqs=2, max_model_len=64)
HYBRID = v4_config(v4_raw(ratios=(4, 16), window=8))


@pytest.mark.parametrize(("model", "kind"), [(TINY, ModelRunner), (HYBRID, HybridRunner)])
def test_each_family_has_its_runner(model: Model, kind: type, device: SteppedCpuDevice) -> None:
    """Weights drawn from the seed go with it, the same each time."""
    weights, again = load_model(model, device), load_model(model, device)
    assert torch.equal(weights.head, again.head)
    assert isinstance(make_runner(model, CONFIG, weights, device, tags=False), kind)


@pytest.mark.parametrize("model", [TINY, HYBRID])
def test_pools_beyond_memory_are_refused(model: Model, device: SteppedCpuDevice) -> None:
    """Whatever the family."""
    check_fits(model, CONFIG, device)
    with pytest.raises(UserError, match="out of memory"):
        check_fits(model, EngineConfig(block_size=16, num_blocks=1 << 40), device)


@pytest.mark.parametrize(
    "huge", [replace(TINY, vocab_size=1 << 40), replace(HYBRID, moe_intermediate_size=1 << 40)]
)
def test_weights_beyond_memory_are_refused(huge: Model, device: SteppedCpuDevice) -> None:
    """With both numbers, before one of them is made; the system would end the process."""
    with pytest.raises(UserError, match=r"out of memory for \d+ weights of float32: .* needed"):
        load_model(huge, device)


@pytest.mark.parametrize(
    ("model", "counted"), [(TINY, num_parameters), (HYBRID, num_hybrid_parameters)]
)
def test_weights_are_counted_without_being_made(
    model: Model, counted: Callable[[Any], int], device: SteppedCpuDevice
) -> None:
    """As many as there are when they are made."""
    assert counted(model) == load_model(model, device).num_parameters()
