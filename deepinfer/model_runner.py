"""The network of a step: KV pool, attention, forward pass and sampling on one device.

Knows nothing of streams, events, requests or block ownership. Implements `worker.Runner`.
Invariant: `copy_blocks` and `forward` touch the rows their arguments name, and no others.
"""

from __future__ import annotations

import numpy as np

from deepinfer.cache_engine import KVCache
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.device.base import Device
from deepinfer.entry_bytes import EntryBytes
from deepinfer.models.attention import PagedAttention
from deepinfer.models.qwen3 import Qwen3
from deepinfer.models.weights import Qwen3Weights
from deepinfer.plan import Int32
from deepinfer.step_inputs import Sampled, StepInputs
from deepinfer.step_sampling import sample_step


class ModelRunner:
    """A Qwen3 network over a paged KV pool.

    Args:
        weights: on `device`, of the shapes `model_config` says.
        tags: keep a tag beside each row, and compare those of the rows a step reads.

    Attributes:
        cache: the KV pool.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        weights: Qwen3Weights,
        device: Device,
        *,
        tags: bool = False,
    ) -> None:
        self.cache = device.run(
            lambda: KVCache(
                model_config,
                engine_config.num_blocks,
                engine_config.block_size,
                device.torch_device,
                tags=tags,
            ),
            label="KV pool",
        )
        self._device = device
        self._attention = device.run(
            lambda: PagedAttention(model_config, self.cache, device, engine_config.max_model_len),
            label="rope table",
        )
        self._model = device.run(
            lambda: Qwen3(model_config, weights, self._attention, device), label="pack weights"
        )

    def entry_bytes(self) -> tuple[EntryBytes, None]:
        """The pool as bytes; requests of this network have no state."""
        return EntryBytes(self.cache.block_parts(), self._device), None

    def copy_blocks(self, pairs: Int32) -> None:
        """Inside submitted work: see `worker.Runner`."""
        self.cache.copy_blocks(self._device.upload(pairs))

    def copy_states(self, pairs: Int32) -> None:
        """Never called: requests of this network have no state."""
        raise AssertionError("no state slots")

    def forward(self, inputs: StepInputs) -> Sampled:
        """Inside submitted work: see `worker.Runner`."""
        device, plan, tags, wrong_rows = self._device, inputs.plan, self.cache.tags, None
        attention = self._attention.prepare(inputs)
        if tags is not None and plan.tags is not None:
            reads = self._attention.reads(attention)
            wrong_rows = tags.write_and_compare(plan, attention.slots, reads, device).result
        rows = device.upload(plan.sample_tokens.astype(np.int64))
        logits = self._model.forward(inputs.token_ids, attention, rows if len(rows) else None)
        return sample_step(logits, inputs, device, wrong_rows)
