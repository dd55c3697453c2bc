"""The interface between the engine and whatever guesses the next tokens of requests.

All of it is on the device, so that the host plans ahead without knowing what was accepted, let
alone what is guessed next. A request is known by its draft slot.

Knows nothing of steps, blocks or verification. Invariant: a proposal is a function of the request,
its history and how often it was asked for since `start`, so a run repeats whatever its batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from deepinfer.device.base import Device


@dataclass(frozen=True, slots=True)
class Asked:
    """n requests, n > 0, whose next tokens are to be guessed; tensors are on the device.

    Attributes:
        slots: int64 [n], their draft slots, distinct.
        tokens: int32 [num_slots, width], by draft slot, prompt and output so far, then any; not to
            be kept or written.
        lengths: int64 [n], how many tokens each has, at least 1.
        room: int64 [n], most drafts wanted of each, 0 to `num_drafts`.
        state_ids: int64 [n], their state slots; empty for a model without state.
        num_drafts: most drafts of any, at least 1.
        longest: no request has more tokens.
    """

    slots: Tensor
    tokens: Tensor
    lengths: Tensor
    room: Tensor
    state_ids: Tensor
    num_drafts: int
    longest: int


class Drafts(NamedTuple):
    """What was guessed.

    Attributes:
        token_ids: int32 or int64 [n, k], k <= `Asked.num_drafts`; any behind a request's `counts`.
            Tokens of the vocabulary all of them, for they may be computed; below 0 counts as 0.
        counts: int64 [n], 0 to min(k, room); more are cut off.
    """

    token_ids: Tensor
    counts: Tensor


class Drafter(Protocol):
    """Proposes tokens that may follow those of requests.

    Called inside submitted work, in device order, one call at a time: `start` before the first step
    of a request, `propose` behind a step's sampling. One that asks the device for a value makes the
    host wait on CUDA.
    """

    def prepare(self, device: Device, num_slots: int, max_model_len: int) -> None:
        """Once, before all else: draft slots are below `num_slots`, histories not longer than
        `max_model_len`."""
        ...

    def start(self, slot: int, request_id: str, num_prompt_tokens: int) -> None:
        """Give a slot to a request; what is known of the slot's last owner is forgotten."""
        ...

    def propose(self, asked: Asked) -> Drafts:
        """Guess what follows. Counted as asked: those with `room` above 0."""
        ...
