"""StepPlan -> queued device work -> sampled tokens.

Owns the KV pool and the network. Each step is at most two operations: the block copies on stream
`copy`, the forward pass with sampling on stream `compute`. Ordered by events:

    copy      wait(end of step n-1)   copy_blocks n   record(copied)
    compute                           wait(copied)    record(start)   forward n   record(end)

Knows nothing of requests or of who owns a block: it touches what the plan names. Invariant: a
submit call never waits for the device.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from deepinfer.cache_engine import KVCache
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.device.base import COMPUTE, Device, Event, Readback, Stream
from deepinfer.models.attention import PagedAttention
from deepinfer.models.qwen3 import Qwen3
from deepinfer.models.weights import Qwen3Weights
from deepinfer.plan import Int32, Int64, StepPlan, StepResult
from deepinfer.sampling import sample


class InFlightStep:
    """A step submitted whose result has not been read.

    Attributes:
        step: the plan's number.
        end: passes when the step's tokens are ready to be read.
    """

    def __init__(self, step: int, device: Device) -> None:
        self.step = step
        self._device = device
        self._start = device.event(timing=True)
        self.end: Event = device.event(timing=True)
        self._readback: tuple[Readback, Readback] | None = None
        self._device_ms: float | None = None
        self._recycled = False

    def record_start(self, stream: Stream) -> None:
        """Mark on `stream` where the step's device time begins."""
        stream.record(self._start)

    def deliver(self, token_ids: Tensor, logprobs: Tensor) -> None:
        """Inside submitted work: start the way of the sampled tokens to the host."""
        self._readback = self._device.download(token_ids), self._device.download(logprobs)

    def collect(self) -> StepResult:
        """Wait for the step and read its tokens. Raises DeviceError if its work failed."""
        self.end.synchronize()
        self._device_ms = self.end.elapsed_ms(self._start)
        if self._readback is None:
            return StepResult(self.step, np.empty(0, np.int32), np.empty(0, np.float32))
        token_ids, logprobs = self._readback
        return StepResult(self.step, token_ids.numpy(), logprobs.numpy())

    def device_ms(self) -> float:
        """Device time of forward and sampling in milliseconds; only after `collect`."""
        assert self._device_ms is not None, "collect() comes first"
        return self._device_ms

    def recycle(self) -> None:
        """Give both events back to the device's pool; `end` must not be used afterwards."""
        if not self._recycled:
            self._recycled = True
            self._device.recycle(self._start)
            self._device.recycle(self.end)

    @property
    def recycled(self) -> bool:
        """Whether `recycle` was called."""
        return self._recycled


class Worker:
    """Runs steps on one device. Per step: `submit_copies`, then `submit_forward`, in that order.

    Args:
        weights: on `device`, of the shapes `model_config` says.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        weights: Qwen3Weights,
        device: Device,
    ) -> None:
        self.cache = device.run(
            lambda: KVCache(
                model_config,
                engine_config.num_blocks,
                engine_config.block_size,
                device.torch_device,
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
        self._copy_stream = device.stream("copy")
        self._compute_stream = device.stream(COMPUTE)
        self._copied = device.event()
        self._previous: InFlightStep | None = None

    def submit_copies(self, plan: StepPlan) -> None:
        """Queue the plan's block copies, behind everything the previous step writes.

        An event recorded on stream `copy` right after this call passes when they are done.
        """
        if not len(plan.block_copies):
            return
        if self._previous is not None and not self._previous.recycled:
            self._copy_stream.wait(self._previous.end)
        pairs = plan.block_copies
        self._copy_stream.submit(
            lambda: self.cache.copy_blocks(self._device.upload(pairs)),
            reads=(pairs[:, 0],),
            writes=(pairs[:, 1],),
            label=f"copy_blocks step {plan.step}",
        )
        self._copy_stream.record(self._copied)
        self._compute_stream.wait(self._copied)

    def submit_forward(self, plan: StepPlan) -> InFlightStep:
        """Queue forward and sampling of `plan`, behind its copies."""
        flight = InFlightStep(plan.step, self._device)

        def forward() -> None:
            logits = self.logits(plan)
            if logits is not None:
                self._device.part("sampling")
                flight.deliver(*self._sample(plan, logits))

        read, written = _touched_blocks(plan, self.cache.block_size)
        flight.record_start(self._compute_stream)
        self._compute_stream.submit(
            forward, reads=(read,), writes=(written,), label=f"forward step {plan.step}"
        )
        self._compute_stream.record(flight.end)
        self._previous = flight
        return flight

    def logits(self, plan: StepPlan) -> Tensor | None:
        """Inside submitted work: the forward pass. [M, vocab_size], None if nothing samples."""
        rows = None
        if len(plan.sample_seq):
            last_tokens = plan.query_start[1:][plan.sample_seq] - 1
            rows = self._device.upload(last_tokens.astype(np.int64))
        token_ids = self._device.upload(plan.token_ids)
        return self._model.forward(token_ids, self._attention.prepare(plan), rows)

    def _sample(self, plan: StepPlan, logits: Tensor) -> tuple[Tensor, Tensor]:
        return sample(logits, plan.temperature, plan.seeds, plan.sample_positions, self._device)


def _touched_blocks(plan: StepPlan, block_size: int) -> tuple[Int32, Int64]:
    """Block ids a step reads and writes, for whoever watches the device seam; ids may repeat."""
    columns = np.arange(plan.block_tables.shape[1])
    in_context = columns * block_size < plan.context_lens[:, None]
    return plan.block_tables[in_context], plan.slot_mapping // block_size
