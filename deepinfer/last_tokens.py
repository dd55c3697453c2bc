"""The newest token of each request, on the device: what a decode planned ahead goes on from.

Without drafts a plan made ahead is true but for one token per open sequence: the one that the step
before samples. It stays on the device, by draft slot:

    step n      ... sample -> [4 7 9] --keep--> tokens by slot
    step n + 1  planned [? ? 2 ?] ----put in--> [4 7 2 9] -> forward ...

so nobody waits for it on the host, and no step is laid out again. A request that ends by a stop
token runs on for as many steps as were planned; their results are stale.

Drafts move positions, and prefix tags are made of the tokens themselves: with either, what runs
must be laid out when the tokens are known (`deepinfer.carry`).

Knows nothing of streams and of who has a slot. Invariant: a token is put in behind the step that
sampled it, on the same stream; no placeholder is left.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.config import EngineConfig
from deepinfer.device.base import Device, Readback
from deepinfer.plan import Int32, StepPlan


class LastTokens:
    """One token for each of `num_slots` draft slots, slot 0 included.

    `told`: tokens put into a step go to the host too, for who checks what ran.
    """

    def __init__(self, num_slots: int, device: Device, *, told: bool = False) -> None:
        self._device, self._told = device, told
        self._tokens: Tensor = device.run(
            lambda: torch.zeros(num_slots, dtype=torch.int32, device=device.torch_device),
            label="last tokens",
        )
        self._newest: Tensor | None = None  # those put into the step that is running

    def put_in(self, plan: StepPlan, token_ids: Tensor) -> Tensor:
        """Inside submitted work, before the step: `token_ids` without placeholders.

        Who has one samples in this step, so that `keep` follows.

        Args:
            token_ids: int32 or int64 [T], the plan's; not written, for it may be the plan's memory.
        """
        ahead, self._newest = plan.ahead, None
        if ahead is None or not np.count_nonzero(ahead.is_open):
            return token_ids
        is_open = ahead.is_open
        assert (plan.num_scheduled[is_open] == 1).all(), "more is unknown than the last token"
        newest = self._tokens.index_select(0, self._upload(ahead.slots[is_open]))
        places = self._upload(plan.query_start[:-1][is_open])
        self._newest = newest
        return token_ids.index_copy(0, places, newest.to(token_ids.dtype))

    def keep(self, plan: StepPlan, sampled: Tensor) -> Readback | None:
        """Inside submitted work, after the step: `sampled` int32 [M] are the newest tokens now.

        Returns:
            Those that were put in before the step, on their way to the host; None if none were, or
            nobody is told.
        """
        if plan.ahead is not None:
            slots = self._upload(plan.ahead.slots[plan.sample_seq])
            self._tokens.index_copy_(0, slots, sampled)
        tells = self._told and self._newest is not None
        return self._device.download(self._newest) if tells else None

    def _upload(self, numbers: Int32) -> Tensor:
        indices: Tensor = self._device.upload(numbers.astype(np.int64))
        return indices


def make_last_tokens(
    config: EngineConfig, num_slots: int, device: Device, *, tags: bool, told: bool
) -> LastTokens | None:
    """What the network of an engine goes on from; None where plans are complete, or more is open
    in them than tokens.

    Args:
        num_slots: draft slots, slot 0 included.
        tags: whether rows are tagged.
        told: of `LastTokens`.
    """
    if not config.looks_ahead or config.drafts or tags:
        return None
    return LastTokens(num_slots, device, told=told)
