"""A hybrid network driven by plans written by hand: logits and choices of every token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from deepinfer.config import EngineConfig
from deepinfer.device.base import Device
from deepinfer.drafters.base import Asked
from deepinfer.hybrid_runner import HybridRunner
from deepinfer.models.hybrid.geometry import OPEN, OPEN_INDEX
from deepinfer.models.hybrid.layer_plan import HybridConfig
from deepinfer.models.hybrid.weights import HybridWeights
from tests.deepinfer.step_plans import Run, as_planned, step_plan


@dataclass
class Request:
    """A request as its owner would keep it: what is computed, and where."""

    tokens: list[int]
    table: list[int]
    state: int
    computed: int = 0
    logits: list[Tensor] = field(default_factory=list)  # [vocab_size] of each position computed
    chosen: dict[tuple[int, str], list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    @property
    def all_logits(self) -> Tensor:
        """[computed, vocab_size]."""
        return torch.stack(self.logits)


class Steps:
    """A network, its pools, and steps of any mix of sequences.

    Attributes:
        wrong_rows: ring rows that did not hold the position wanted, over all steps.
    """

    def __init__(
        self,
        config: HybridConfig,
        weights: HybridWeights,
        device: Device,
        *,
        block_size: int = 4,
        num_blocks: int = 65,
        max_num_seqs: int = 5,
        drafter: str | None = None,
    ) -> None:
        self.block_size = block_size
        self.device = device
        engine = EngineConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=2048,
            drafts=0 if drafter is None else 5,
            drafter=drafter or "ngram",
        )
        self.runner = HybridRunner(config, engine, weights, device)
        self.wrong_rows = 0
        self._scattered = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).tolist()

    def sequence(self, tokens: Sequence[int], state: int) -> Request:
        """A request with blocks, scattered over the pool, for all of `tokens`."""
        tokens = [int(token) for token in tokens]
        return Request(tokens, self.blocks(-(-len(tokens) // self.block_size)), state)

    def blocks(self, num: int) -> list[int]:
        """Blocks nobody else has."""
        return [self._scattered.pop() for _ in range(num)]

    def step(self, *parts: tuple[Request, int]) -> None:
        """Compute the next `count` tokens of each (sequence, count)."""
        runs = [
            Run(seq.tokens, seq.table, seq.computed, count, state=seq.state) for seq, count in parts
        ]
        plan = step_plan(runs, self.block_size, padding=1)
        owners = [seq for seq, count in parts for _ in range(count)]

        def record(layer: int, name: str, tokens: slice | Tensor, values: Tensor) -> None:
            for token, value in zip(torch.arange(len(owners))[tokens], values, strict=True):
                owners[token].chosen[layer, name].append(value.clone())

        self.runner.network.recorder = record
        logits, wrong_rows = self.device.run(
            lambda: self.runner.logits(as_planned(plan), np.arange(len(owners)))
        )
        self.wrong_rows += wrong_rows().count
        for owner, row in zip(owners, logits, strict=True):
            owner.logits.append(row)
        for seq, count in parts:
            seq.computed += count

    def run(self, seq: Request, chunks: Sequence[int]) -> Tensor:
        """Compute `seq` in steps of its own of these sizes: its logits so far."""
        for count in chunks:
            self.step((seq, count))
        return seq.all_logits

    def left_behind(self, seq: Request) -> dict[str, Tensor]:
        """What the caches hold of `seq`: final paged rows, rings, their tags, and token ids.

        Open groups are not among them: which of their rows are still needed depends on the length.
        """
        cache, size = self.runner.cache, self.block_size
        found = {
            f"{region.kind} {region.layer}": cache.region(region.kind, region.layer)[seq.state]
            for region in cache.geometry.slot
            if region.kind not in (OPEN, OPEN_INDEX)
        }
        for rows in cache.geometry.paged:
            ends = torch.arange(rows.ratio - 1, seq.computed, rows.ratio)
            blocks = torch.tensor(seq.table)[ends // size]
            stored = cache.paged(rows.kind, rows.layer)
            found[f"{rows.kind} {rows.layer}"] = stored[blocks, ends % size // rows.ratio]
        return {name: values.clone() for name, values in found.items()}

    def copy(self, blocks: Sequence[tuple[int, int]], states: Sequence[tuple[int, int]]) -> None:
        """What a fork copies."""
        for pairs, copy in ((blocks, self.runner.copy_blocks), (states, self.runner.copy_states)):
            if pairs:
                array = np.array(pairs, np.int32)
                self.device.run(lambda copy=copy, array=array: copy(array))


def asked_behind(newest: Sequence[tuple[int, int, int]], num_drafts: int) -> Asked:
    """As many drafts of all, behind (state slot, token, its position) of each."""
    states, token_ids, positions = torch.tensor(newest).unbind(1)
    num, longest = len(newest), int(positions.max()) + 1
    tokens = torch.full((num, longest), -1, dtype=torch.int32)
    tokens[torch.arange(num), positions] = token_ids.int()
    room = torch.full((num,), num_drafts)
    return Asked(torch.arange(num), tokens, positions + 1, room, states, num_drafts, longest)


def chunked(total: int, size: int) -> list[int]:
    """`total` in chunks of `size`, the last one shorter."""
    return [min(size, total - start) for start in range(0, total, size)]
