"""Drafts that are right as often as asked for: a reference run's tokens, some of them replaced.

For draft storms. The engine verifies these like any other drafts; only how many will be accepted is
arranged, so what rejection costs can be measured without a model that drafts well or badly.

Whether a token is replaced, and by which, is decided by hashes of (seed, request id, position in
the sequence, number of the proposal). A request's key is BLAKE2b of the first two, because Python's
own hash differs between processes: 8 bytes, read as two little-endian integers. From each the
device goes on to a hash of its own, modulo 2^32 and with the lowbias32 of `deepinfer.hashing`:

    h = lowbias32(half of the key ^ lowbias32(position + number * 0x9E3779B9))

The factor, 2^32 over the golden ratio, gives no two (position, number) below 2^15 the same sum.

A draft is true if the first h is below 2^32 times the probability asked for. Otherwise the token is
moved on by 1 + second h % (vocab_size - 1), modulo vocab_size.

Knows nothing of the engine's tokens but how many there are. Where a run has left its reference
(a near-tie went the other way) the reference's tokens are proposed all the same, and verification
rejects them. Invariant: a replaced token is another token of the vocabulary, never the true one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from deepinfer.device.base import Device
from deepinfer.drafters.acceptance import Acceptance
from deepinfer.drafters.base import Asked, Drafts
from deepinfer.errors import UnknownRequestError, check_int
from deepinfer.hashing import lowbias32_, signed, unsigned
from deepinfer.plan import Int32, Int64

_GOLDEN = signed(0x9E3779B9)
_NUM_HASHES = 1 << 32


@dataclass(frozen=True, slots=True)
class _Owners:
    """What is known of the requests that have the slots; tensors are on the device.

    Attributes:
        device: theirs.
        references: int32 [num_slots, max_model_len]; behind `lengths` any valid tokens.
        lengths: int64 [num_slots].
        keys: int32 [num_slots, 2], the halves of the key.
        num_proposals: int64 [num_slots], so far.
        limits: int64 [entries, positions], how many of the 2^32 hashes leave a draft as it is.
    """

    device: Device
    references: Tensor
    lengths: Tensor
    keys: Tensor
    num_proposals: Tensor
    limits: Tensor


class ReplayDrafter:
    """Proposes the continuation of a reference run, right with given probabilities.

    Args:
        references: request id -> int32 [n], prompt and output of the reference run, below
            `vocab_size`. Read when a request starts, as far as a history may get.
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
        self._owners: _Owners | None = None

    def prepare(self, device: Device, num_slots: int, max_model_len: int) -> None:
        """Make room for a reference per slot: 4 * `num_slots` * `max_model_len` bytes."""
        on = device.torch_device
        self._owners = _Owners(
            device=device,
            references=torch.zeros((num_slots, max_model_len), dtype=torch.int32, device=on),
            lengths=torch.zeros(num_slots, dtype=torch.int64, device=on),
            keys=torch.zeros((num_slots, 2), dtype=torch.int32, device=on),
            num_proposals=torch.zeros(num_slots, dtype=torch.int64, device=on),
            limits=device.upload(_limits(self._acceptance)),
        )

    def start(self, slot: int, request_id: str, num_prompt_tokens: int) -> None:
        """Give a slot to a request and count its proposals from 0.

        Raises UnknownRequestError if the request has no reference.
        """
        if request_id not in self._references:
            raise UnknownRequestError(f"replay: no reference for request {request_id!r}")
        owners = self._owners
        assert owners is not None, "prepared before all else"
        # A copy: the caller may write to its array afterwards, or may have made it read-only.
        known = np.array(self._references[request_id][: owners.references.shape[1]], np.int32)
        key = blake2b(f"{self._seed}\0{request_id}".encode(), digest_size=8).digest()
        owners.references[slot, : len(known)] = owners.device.upload(known)
        owners.keys[slot] = owners.device.upload(np.frombuffer(key, "<i4").astype(np.int32))
        owners.lengths[slot].fill_(len(known))  # `[slot] = number` would make the host wait
        owners.num_proposals[slot].fill_(0)

    def propose(self, asked: Asked) -> Drafts:
        """The reference's next tokens, some replaced; nothing beyond its end."""
        owners, slots, lengths = self._owners, asked.slots, asked.lengths
        assert owners is not None, "prepared before all else"
        numbers = owners.num_proposals.index_select(0, slots)
        owners.num_proposals.index_copy_(0, slots, numbers + (asked.room > 0))
        behind = torch.arange(asked.num_drafts, device=slots.device)
        positions = lengths[:, None] + behind  # [n, num_drafts], as is what follows
        inside = positions.clamp(max=owners.references.shape[1] - 1)
        true = owners.references[slots[:, None], inside]
        whether, which = self._hashes(owners.keys.index_select(0, slots), numbers, positions)
        num_entries, num_columns = owners.limits.shape
        entries = numbers // self._acceptance.length % num_entries
        limits = owners.limits[entries[:, None], behind.clamp(max=num_columns - 1)]
        other = (true + 1 + which % (self._vocab_size - 1)) % self._vocab_size
        num_left = (owners.lengths.index_select(0, slots) - lengths).clamp_(min=0)
        return Drafts(
            torch.where(whether < limits, true, other), torch.minimum(asked.room, num_left)
        )

    def _hashes(self, keys: Tensor, numbers: Tensor, positions: Tensor) -> Tensor:
        """int64 [2, n, num_drafts], 0 to 2^32 - 1: of keys [n, 2], numbers [n] and positions."""
        counters = lowbias32_(positions.int() + numbers.int()[:, None] * _GOLDEN)
        return unsigned(lowbias32_(keys.t()[:, :, None] ^ counters))


def _limits(acceptance: Acceptance) -> Int64:
    """[entries, positions]: probabilities as shares of all hashes; 0 and 1 are certain.

    A hash h counts as the uniform number h / 2^32 and is below p if it is below ceil(p * 2^32).
    """
    num_columns = max(map(len, acceptance.entries))
    probabilities = [
        [acceptance.probability(entry * acceptance.length, k) for k in range(num_columns)]
        for entry in range(len(acceptance.entries))
    ]
    return np.array([[math.ceil(p * _NUM_HASHES) for p in row] for row in probabilities], np.int64)
