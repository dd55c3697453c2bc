"""The runner of a model: each family's network, by the type of its configuration.

Knows nothing of requests and streams. Invariant: this is the only place that asks which family a
model is.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from deepinfer.cache_engine import check_pool_fits, free_bytes, gib
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.device.base import Device
from deepinfer.errors import UserError
from deepinfer.hybrid_runner import HybridRunner, check_pools_fit
from deepinfer.model_runner import ModelRunner
from deepinfer.models.hybrid.layer_plan import HybridConfig, check_drafts
from deepinfer.models.hybrid.loading import draw_weights
from deepinfer.models.hybrid.loading import num_parameters as num_hybrid_parameters
from deepinfer.models.hybrid.weights import HybridWeights
from deepinfer.models.weights import Qwen3Weights, load_weights, num_parameters
from deepinfer.sizing import num_state_slots
from deepinfer.state_slots import StatePool

Model: TypeAlias = ModelConfig | HybridConfig
Weights: TypeAlias = Qwen3Weights | HybridWeights


def state_pool(model: Model, config: EngineConfig) -> StatePool | None:
    """The pool of a model whose requests have state; None for one that keeps all of it in blocks.

    Each part of a slot has rows for a step of 1 + `max_draft_tokens` beside those it looks back at.
    """
    if not isinstance(model, HybridConfig):
        return None
    num_slots = num_state_slots(config.max_num_seqs, config.num_state_slots)
    return StatePool(num_slots, 1 + model.max_draft_tokens)


def load_model(model: Model, device: Device) -> Weights:
    """Inside submitted work: the weights `model` names, on `device`.

    Raises as the loaders do, and UserError if the device has less memory free than they need.
    """
    _check_weights_fit(model, device)
    if isinstance(model, HybridConfig):
        dtype: torch.dtype = getattr(torch, model.dtype)
        return draw_weights(model, dtype, device.torch_device)
    return load_weights(model, device)


def _check_weights_fit(model: Model, device: Device) -> None:
    """Asked for beforehand: see `cache_engine.check_pool_fits`."""
    free, dtype = free_bytes(device), getattr(torch, model.dtype)
    if isinstance(model, HybridConfig):
        count = num_hybrid_parameters(model)
    else:
        count = num_parameters(model)
    if free is not None and count * dtype.itemsize > free:
        raise UserError(
            f"out of memory for {count} weights of {model.dtype}: {gib(count * dtype.itemsize)} "
            f"needed, {gib(free)} free on device {device.name!r}",
            hint="a smaller model, or a smaller dtype",
        )


def check_fits(model: Model, config: EngineConfig, device: Device) -> None:
    """Raise UserError if the pools of `config` need more memory than the device has free, or if it
    asks for drafts that the model has no layers or no room for."""
    check_drafts(model, config)
    if isinstance(model, HybridConfig):
        check_pools_fit(model, config, device)
    else:
        check_pool_fits(model, config.num_blocks, config.block_size, device)


def make_runner(
    model: Model,
    config: EngineConfig,
    weights: Weights,
    device: Device,
    *,
    tags: bool,
) -> ModelRunner | HybridRunner:
    """The network of `model` with its pools.

    Args:
        weights: on `device`, those of `model`.
        tags: keep a tag beside each row, and compare those of the rows a step reads.
    """
    if isinstance(model, HybridConfig):
        assert isinstance(weights, HybridWeights), "weights of another family"
        return HybridRunner(model, config, weights, device, tags=tags)
    assert isinstance(weights, Qwen3Weights), "weights of another family"
    return ModelRunner(model, config, weights, device, tags=tags)
