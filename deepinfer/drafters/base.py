"""The interface between the engine and whatever guesses a request's next tokens.

Knows nothing of steps, blocks or verification. Invariant: a proposal is a function of the request,
its history and how often it was asked for since `start`, so a run repeats whatever its batches.
"""

from __future__ import annotations

from typing import Protocol

from deepinfer.plan import Int32


class Drafter(Protocol):
    """Proposes tokens that may follow a request's.

    Called inside submitted work, behind a step's sampling and in device order: one call at a time.
    """

    def start(self, row: int, request_id: str, num_prompt_tokens: int) -> None:
        """Give a row to a request; what is known of the row's last owner is forgotten."""
        ...

    def propose(self, row: int, token_ids: Int32, num_drafts: int) -> Int32:
        """Guess what follows.

        Args:
            row: of a request that was started.
            token_ids: int32 [n], prompt and output so far; a view, neither kept nor written.
            num_drafts: most tokens wanted, >= 0.

        Returns:
            int32 [<= num_drafts], possibly empty, the caller's to keep.
        """
        ...


class DraftHead(Protocol):
    """A model's own draft layers, which propose for many requests at once.

    They see more than tokens, and keep what they need of a request in its state slot, where each
    step leaves it for the tokens it computes.
    """

    def propose(
        self, state_ids: Int32, token_ids: Int32, positions: Int32, num_drafts: int
    ) -> Int32:
        """Inside submitted work, behind a step's verification: guess what follows.

        Args:
            state_ids: int32 [n], state slots of requests of which all tokens but the newest are
                computed.
            token_ids, positions: int32 [n], their newest tokens and where these are, from 1 on.
            num_drafts: most tokens wanted of each, >= 1.

        Returns:
            int32 [n, <= num_drafts].
        """
        ...
