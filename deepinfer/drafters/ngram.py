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

from deepinfer.errors import UserError, check_int
from deepinfer.plan import Int32


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

    def start(self, row: int, request_id: str, num_prompt_tokens: int) -> None:
        """Nothing to forget: a proposal depends on the history alone."""

    def propose(self, row: int, token_ids: Int32, num_drafts: int) -> Int32:
        """What followed the longest known suffix; empty if even `min_n` tokens are new."""
        start = followed_at(token_ids, self._min_n, self._max_n)
        return token_ids[start : start + num_drafts].copy()


def followed_at(token_ids: Int32, min_n: int, max_n: int) -> int:
    """Index of the token behind the earliest occurrence of the longest suffix of min_n to max_n.

    The length of the history if there is none. One comparison of the whole history per n, so the
    time is bounded by its length times `max_n` whatever it holds.
    """
    num_tokens = len(token_ids)
    start = num_tokens
    # longer[i]: the n tokens from i on equal the last n, and at least one follows them. They do if
    # the first is the n-th last token and the n - 1 from i + 1 on equal the last n - 1.
    matches = None
    for n in range(1, min(max_n, num_tokens - 1) + 1):
        longer = token_ids[: num_tokens - n] == token_ids[num_tokens - n]
        if matches is not None:
            longer &= matches[1:]
        first = int(longer.argmax())
        if not longer[first]:
            break
        if n >= min_n:
            start = first + n
        matches = longer
    return start
