"""The network of a step for hybrid models: block and slot pools, forward pass and sampling.

Knows nothing of streams, events, requests or who owns a block or slot. Implements `worker.Runner`.
Invariant: `copy_blocks`, `copy_states` and `forward` touch the rows and slots their arguments name,
and no others; a ring row with another tag than the position wanted is counted and never read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from deepinfer.cache_engine import free_bytes, gib
from deepinfer.config import EngineConfig
from deepinfer.device.base import Device, Readback
from deepinfer.drafters.base import Asked, Drafter, Drafts
from deepinfer.entry_bytes import EntryBytes
from deepinfer.errors import UserError
from deepinfer.models.hybrid.cache import HybridCache
from deepinfer.models.hybrid.drafting import Drafting, make_drafting
from deepinfer.models.hybrid.geometry import Geometry
from deepinfer.models.hybrid.layer_plan import HybridConfig
from deepinfer.models.hybrid.layout import RingTags, StepLayout
from deepinfer.models.hybrid.layout_builder import Layouts
from deepinfer.models.hybrid.network import HybridNetwork
from deepinfer.models.hybrid.weights import HybridWeights
from deepinfer.plan import Int32, Int64, StepPlan, WrongRows
from deepinfer.sizing import num_state_slots
from deepinfer.step_inputs import Sampled, StepInputs
from deepinfer.step_sampling import sample_step

MAX_SHOWN = 8  # of the wrong rows of a step


def check_pools_fit(model_config: HybridConfig, config: EngineConfig, device: Device) -> None:
    """Raise UserError, with both numbers, if blocks and slots need more than the device has free.

    Asked for beforehand: Linux grants the CPU memory it has not got, and ends the process that
    uses it.
    """
    free = free_bytes(device)
    served = model_config.served(config.uses_draft_layers)
    geometry = Geometry.of(served, config.block_size)
    num_slots = num_state_slots(config.max_num_seqs, config.num_state_slots)
    needed = config.num_blocks * geometry.bytes_per_block + num_slots * geometry.bytes_per_slot
    if free is not None and needed > free:
        raise UserError(
            f"out of memory for {config.num_blocks} blocks and {num_slots} state slots: "
            f"{gib(needed)} needed, {gib(free)} free on device {device.name!r}",
            hint=f"a block takes {geometry.bytes_per_block} bytes, a slot "
            f"{geometry.bytes_per_slot}: less of num_blocks or max_num_seqs",
        )


class HybridRunner:
    """A hybrid network over its two pools.

    Args:
        weights: on `device`, of the shapes `model_config` says.
        tags: keep a prefix tag beside each row, and compare those of the rows a step reads.

    Attributes:
        cache: both pools.
        network: the layers.
        drafting: the draft layers; None where the engine does not ask them.
    """

    def __init__(
        self,
        model_config: HybridConfig,
        engine_config: EngineConfig,
        weights: HybridWeights,
        device: Device,
        *,
        tags: bool = False,
    ) -> None:
        model_config = model_config.served(engine_config.uses_draft_layers)
        geometry = Geometry.of(model_config, engine_config.block_size)
        num_slots = num_state_slots(engine_config.max_num_seqs, engine_config.num_state_slots)
        self.cache = device.run(
            lambda: HybridCache(
                model_config,
                geometry,
                engine_config.num_blocks,
                num_slots,
                device.torch_device,
                tags=tags,
            ),
            label="block and slot pools",
        )
        self._device = device
        self._layouts = Layouts(model_config, self.cache, device)
        self.network = device.run(
            lambda: HybridNetwork(
                model_config, weights, self.cache, device, engine_config.max_model_len
            ),
            label="pack weights",
        )
        self.drafting: Drafting | None = None
        if model_config.draft is not None:
            self.drafting = device.run(
                lambda: make_drafting(model_config, weights, self.network, self.cache, device),
                label="pack weights of draft layers",
            )

    @property
    def draft_head(self) -> Drafter | None:
        """What proposes with `drafting`; None without it."""
        return self if self.drafting is not None else None

    def entry_bytes(self) -> tuple[EntryBytes, EntryBytes]:
        """Both pools as bytes: of blocks, and of state slots."""
        cache, device = self.cache, self._device
        return EntryBytes(cache.block_parts(), device), EntryBytes(cache.slot_parts(), device)

    def copy_blocks(self, pairs: Int32) -> None:
        """Inside submitted work: see `worker.Runner`."""
        self.cache.copy_blocks(self._device.upload(pairs))

    def copy_states(self, pairs: Int32) -> None:
        """Inside submitted work: see `worker.Runner`."""
        self.cache.copy_states(self._device.upload(pairs))

    def forward(self, inputs: StepInputs) -> Sampled:
        """Inside submitted work: see `worker.Runner`."""
        tokens = None
        if len(inputs.plan.sample_tokens):
            tokens = inputs.plan.sample_tokens.astype(np.int64)
        logits, wrong_rows = self.logits(inputs, tokens)
        return sample_step(logits, inputs, self._device, wrong_rows)

    @torch.inference_mode()
    def logits(
        self, inputs: StepInputs, tokens: Int64 | None
    ) -> tuple[Tensor | None, Callable[[], WrongRows]]:
        """Inside submitted work: compute a step.

        Args:
            tokens: int64 [M], which of the step's tokens' logits are wanted; None if none are.

        Returns:
            Logits [M, vocab_size], None without `tokens`; and what gives the rows that were wrong,
            once the step is done: with tags all kinds of rows, without them ring rows that did not
            hold the position wanted.
        """
        layout = self._layouts.of(inputs)
        wrong_rows = self._check(inputs.plan, layout)
        rows = None if tokens is None else self._device.upload(tokens)
        if self.drafting is None:
            return self.network.forward(layout, rows), wrong_rows
        taps = self.drafting.taps()
        logits = self.network.forward(layout, rows, taps)
        self._device.part("draft layers")
        self.drafting.write(layout, taps)
        return logits, wrong_rows

    def prepare(self, device: Device, num_slots: int, max_model_len: int) -> None:
        """Nothing to make: what draft layers need of a request is in its state slot."""

    def start(self, slot: int, request_id: str, num_prompt_tokens: int) -> None:
        """Nothing to forget: each step writes what they need for the tokens it computes."""

    @torch.inference_mode()
    def propose(self, asked: Asked) -> Drafts:
        """Inside submitted work: see `drafters.base.Drafter`."""
        drafting = self.drafting
        assert drafting is not None, "the engine was made to ask draft layers"
        self._device.part("draft layers")
        positions = asked.lengths - 1
        newest = asked.tokens[asked.slots, positions].long()
        drafts = drafting.propose(asked.state_ids, newest, positions, asked.num_drafts)
        return Drafts(drafts, asked.room.clamp(max=drafts.shape[1]))

    def _check(self, plan: StepPlan, layout: StepLayout) -> Callable[[], WrongRows]:
        """Compare the tags of what the step reads: prefixes if they are kept, else positions."""
        tags, found = self.cache.tags, None
        if tags is not None and plan.tags is not None:
            comparison = tags.write_and_compare(plan, layout, self._device)
            return _no_rows if comparison is None else comparison.result
        if layout.tags:
            parts = [layout.found_tags, layout.asked_tags]
            found = self._device.download(torch.stack([torch.cat(part) for part in parts if part]))
        return _RingCheck(layout.tags, found)


def _no_rows() -> WrongRows:
    none = np.empty(0, np.int32)
    return WrongRows(0, none, none, np.empty(0, np.int64))


class _RingCheck:
    """Gives the ring rows that did not hold the position a step wanted, once the step is done."""

    def __init__(self, reads: list[RingTags], found: Readback | None) -> None:
        self._reads, self._found = reads, found

    def __call__(self) -> WrongRows:
        if self._found is None:
            return _no_rows()
        found, *asked = self._found.numpy()
        seqs = np.concatenate([read.seqs for read in self._reads])
        if not asked:  # the host knows
            asked = [np.concatenate([np.where(r.read, r.wanted, -1) for r in self._reads])]
        (wanted,) = asked
        wrong = (wanted >= 0) & (found != wanted + 1)
        index, row = wrong.nonzero()
        first = slice(MAX_SHOWN)
        return WrongRows(
            len(index),
            seqs[index[first]].astype(np.int32),
            wanted[index, row][first].astype(np.int32),
            found[index, row][first].astype(np.int64),
        )
