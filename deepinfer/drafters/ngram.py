"""Prompt lookup: what followed the last few tokens where they stood before.

Takes the longest n from `max_n` down to `min_n` for which the history's last n tokens occur earlier
in it, and proposes what followed their earliest occurrence (A. Saxena, "Prompt Lookup Decoding",
2023; vLLM's NgramProposer and transformers' PromptLookupCandidateGenerator take the earliest too).
The earliest has most tokens behind it: where a text repeats with a short period, the most recent
occurrence ends just before the history does and leaves a token or two to propose. An occurrence
may overlap the tokens looked up; at least one token follows it.

Knows nothing of the model, and keeps nothing between calls. Invariant: a proposal is a piece of the
history, so it holds no token that the request has not seen.

    history    a b c d a b c        the last 3 tokens were at 0
               ^^^^^   ^^^^^
    proposal         d a b ...      what followed them
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.device.base import Device
from deepinfer.drafters.base import Asked, Drafts
from deepinfer.errors import UserError, check_int


class NgramDrafter:
    """Proposes by prompt lookup.

    Args:
        min_n: fewest tokens that must have occurred before, at least 1. More of them: fewer
            proposals, and likelier ones.
        max_n: most tokens looked up. The defaults are Saxena's 1 and 3.
    """

    def __init__(self, min_n: int = 1, max_n: int = 3) -> None:
        check_int("min_n", min_n, 1)
        check_int("max_n", max_n, 1)
        if min_n > max_n:
            raise UserError(f"min_n: {min_n} is more than max_n {max_n}")
        self._min_n = min_n
        self._max_n = max_n

    def prepare(self, device: Device, num_slots: int, max_model_len: int) -> None:
        """Nothing to prepare: a proposal depends on the history alone."""

    def start(self, slot: int, request_id: str, num_prompt_tokens: int) -> None:
        """Nothing to forget, for the same reason."""

    def propose(self, asked: Asked) -> Drafts:
        """What followed the longest known suffix; nothing if even `min_n` tokens are new."""
        history = asked.tokens[:, : asked.longest].index_select(0, asked.slots)
        end, num_equal = longest_earliest(history, asked.lengths, self._max_n)
        start = end + 1
        counts = torch.minimum(asked.room, asked.lengths - start)
        counts.masked_fill_(num_equal < self._min_n, 0)
        places = start[:, None] + torch.arange(asked.num_drafts, device=history.device)
        places = torch.minimum(places, asked.lengths[:, None] - 1)
        return Drafts(history.gather(1, places), counts)


def longest_earliest(history: Tensor, lengths: Tensor, max_n: int) -> tuple[Tensor, Tensor]:
    """Where the longest suffix of up to `max_n` tokens ends that occurs earlier, the first time.

    One comparison of the whole histories per n, so the time is bounded by their size times `max_n`
    whatever they hold.

    Args:
        history: int32 [n, width].
        lengths: int64 [n], 1 to width; no token behind is looked at.

    Returns:
        int64 [n], index of the last token of that occurrence, any where there is none, and how many
        tokens it has, 0 to `max_n`.
    """
    width = history.shape[1]
    newest = lengths[:, None] - 1
    columns = torch.arange(width, device=history.device)
    suffix = history.gather(1, (newest - columns[:max_n]).clamp_(min=0))  # the newest token first
    # equal[:, i] for n: the n tokens from i on equal the last n, and at least one follows. They do
    # if the first is the n-th last token and the n - 1 from i + 1 on equal the last n - 1.
    equal = (history == suffix[:, :1]).logical_and_(columns < newest)
    num_equal = equal.to(torch.uint8 if max_n < 256 else torch.int32)  # at the end of each
    for n in range(2, min(max_n, width) + 1):
        equal = equal[:, 1:].logical_and_(history[:, : 1 - n] == suffix[:, n - 1 : n])
        num_equal[:, n - 1 :] += equal
    most, end = num_equal.max(dim=1)  # of several the first
    return end, most
