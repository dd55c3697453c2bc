"""The live requests by their ids: which may be made, found, and named again once they have ended.

Knows neither rows nor blocks. Invariant: an id names at most one live request, and a request that
was made but not accepted leaves no trace.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from deepinfer.errors import UnknownRequestError, UserError
from deepinfer.plan import Int32
from deepinfer.sequence import SamplingParams, Sequence


class LiveRequests:
    """Requests that were accepted and have not ended."""

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._num_arrived = 0

    def find(self, request_id: str) -> Sequence:
        """The live request of this id. Raises UnknownRequestError if there is none."""
        try:
            return self._by_id[request_id]
        except KeyError:
            raise UnknownRequestError(f"no live request {request_id!r}") from None

    def make(self, request_id: str, prompt: Int32, sampling: SamplingParams) -> Sequence:
        """The request that would arrive next. Raises UserError for what could only fail later."""
        if not isinstance(request_id, str):
            raise UserError(f"request id {request_id!r}: expected a string")
        if request_id in self._by_id:
            raise UserError(f"request id {request_id!r} is already in use")
        if not len(prompt):
            raise UserError(f"request {request_id!r}: empty prompt; needs at least one token")
        sampling.check(request_id)
        return Sequence(request_id, self._num_arrived, prompt, len(prompt), sampling)

    def accept(self, seq: Sequence) -> None:
        """A request that was made has arrived."""
        self._by_id[seq.request_id] = seq
        self._num_arrived += 1

    def forget(self, seq: Sequence) -> None:
        """A request has ended."""
        del self._by_id[seq.request_id]


def as_token_ids(token_ids: ArrayLike, vocab_size: int) -> Int32:
    """What a caller gives for tokens, as int32 [n]. Raises UserError if they are none."""
    try:
        tokens = np.asarray(token_ids)
    except (ValueError, OverflowError):  # rows of different lengths, numbers beyond int64
        tokens = np.empty((0, 0))
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise UserError("token ids must be a one-dimensional sequence of integers")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise UserError(
            f"token id {int(tokens.max() if tokens.min() >= 0 else tokens.min())} is outside "
            f"the vocabulary of {vocab_size}"
        )
    return tokens.astype(np.int32)
