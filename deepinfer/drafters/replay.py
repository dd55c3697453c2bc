"""Drafts that are right as often as asked for: a reference run's tokens, some of them replaced.

For draft storms. The engine verifies these like any other drafts; only how many will be accepted is
arranged, so what rejection costs can be measured without a model that drafts well or badly.

Whether a token is replaced, and by which, is decided by a hash of (seed, request id, position in
the sequence, number of the proposal): BLAKE2b, because Python's own hash differs between processes.

Knows nothing of the engine's tokens but how many there are. Where a run has left its reference
(a near-tie went the other way) the reference's tokens are proposed all the same, and verification
rejects them. Invariant: a replaced token is another token of the vocabulary, never the true one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from deepinfer.drafters.acceptance import Acceptance
from deepinfer.errors import UnknownRequestError, check_int
from deepinfer.plan import Int32

_DRAFT = struct.Struct("<qq")  # position, proposal number
_CHOICE = struct.Struct("<QQ")  # whether to replace, by which token


@dataclass(slots=True)
class _Owner:
    """The request of a row: its reference, the hash of what identifies it, proposals so far."""

    reference: Int32
    identity: Any  # hashlib's hash objects have no public type
    num_proposals: int = 0


class ReplayDrafter:
    """Proposes the continuation of a reference run, right with given probabilities.

    Args:
        references: request id -> int32 [n], prompt and output of the reference run. Read when a
            request starts.
        acceptance: probability that a draft is the true one, by proposal and position.
        seed: of the hash.
        vocab_size: replaced tokens are below it; at least 2.
    """

    def __init__(
        self, references: Mapping[str, Int32], acceptance: Acceptance, seed: int, vocab_size: int
    ) -> None:
        check_int("vocab_size", vocab_size, 2)
        self._references = references
        self._acceptance = acceptance
        self._seed = seed
        self._vocab_size = vocab_size
        self._owners: dict[int, _Owner] = {}

    def start(self, row: int, request_id: str, num_prompt_tokens: int) -> None:
        """Give a row to a request and count its proposals from 0.

        Raises UnknownRequestError if the request has no reference.
        """
        if request_id not in self._references:
            raise UnknownRequestError(f"replay: no reference for request {request_id!r}")
        identity = blake2b(f"{self._seed}\0{request_id}".encode(), digest_size=_CHOICE.size)
        self._owners[row] = _Owner(self._references[request_id], identity)

    def propose(self, row: int, token_ids: Int32, num_drafts: int) -> Int32:
        """The reference's next tokens, some replaced; empty beyond its end."""
        owner = self._owners[row]
        number = owner.num_proposals
        owner.num_proposals += 1
        start = len(token_ids)
        drafts = np.array(owner.reference[start : start + num_drafts], np.int32)
        for k, token_id in enumerate(drafts.tolist()):
            draft = owner.identity.copy()
            draft.update(_DRAFT.pack(start + k, number))
            bits, offset = _CHOICE.unpack(draft.digest())
            # 53 bits fill a float exactly: a uniform number in [0, 1), so 0 and 1 are certain.
            if (bits >> 11) * 2.0**-53 >= self._acceptance.probability(number, k):
                drafts[k] = (token_id + 1 + offset % (self._vocab_size - 1)) % self._vocab_size
        return drafts
