"""Records of collected steps: a few slots, used again and again.

A step's tokens are told to the caller in a record. It is the caller's until the next release point:
then its slot goes back, and a later step may be told in it. Whoever keeps a record clones it, as
whoever keeps a block pins it. One that was kept and not cloned says so when it is read, instead of
showing the tokens of another step.

    collect n        slot 2 taken, filled, given to the caller
    submit n + 1     release point: slot 2 given up; the record of step n raises when it is read
    collect n + 3    slot 2 taken again

Slots are ids of a pool like any other and go back through a release queue like any other. Knows no
requests and no device. Invariant: a slot is written only while nobody may read what it held.
"""

from __future__ import annotations

import numpy as np

from deepinfer.block_manager import BlockManager
from deepinfer.errors import StaleRecordError
from deepinfer.plan import Int32
from deepinfer.release import Fence, ReleaseQueue


class RecordPool:
    """The slots and what lies in them.

    Args:
        slots: the pool; slot 0 is nobody's.
        release: the queue through which slots go back.
        max_tokens: most tokens of a step.
    """

    def __init__(self, slots: BlockManager, release: ReleaseQueue, max_tokens: int) -> None:
        self.slots = slots
        self.release = release
        self._token_ids = np.zeros((slots.num_blocks, max_tokens), np.int32)
        self._request_ids: list[list[str]] = [[] for _ in range(slots.num_blocks)]
        self._generations = np.zeros(slots.num_blocks, np.int64)
        self._out: list[tuple[int, Fence]] = []  # the caller's, with the step each is of

    def tell(self, fence: Fence, request_ids: list[str], token_ids: Int32) -> TokenRecord:
        """Fill a slot with what a collected step brought, n of each; `fence` is the step's."""
        slot, count = self.slots.allocate_one(), len(token_ids)
        self._token_ids[slot, :count] = token_ids
        self._request_ids[slot] = request_ids
        self._out.append((slot, fence))
        return TokenRecord(self, slot, int(self._generations[slot]), count)

    def take_back(self) -> None:
        """At the release point: what the caller has is the caller's no longer."""
        for slot, fence in self._out:
            self._generations[slot] += 1
            self.release.give_up([slot], fence, path="record")
        self._out = []

    def generation(self, slot: int) -> int:
        """How often the slot was given back."""
        return int(self._generations[slot])

    def tokens(self, slot: int, count: int) -> Int32:
        """What lies in a slot, int32 [count], a view."""
        return self._token_ids[slot, :count]

    def owners(self, slot: int) -> list[str]:
        """Whose tokens these are."""
        return self._request_ids[slot].copy()


class TokenRecord:
    """The tokens of a step in a slot of the pool. Implements `outputs.StepTokens`.

    Reading raises StaleRecordError once the slot has been given back.
    """

    __slots__ = ("_count", "_generation", "_pool", "_slot")

    def __init__(self, pool: RecordPool, slot: int, generation: int, count: int) -> None:
        self._pool, self._slot = pool, slot
        self._generation, self._count = generation, count

    @property
    def request_ids(self) -> list[str]:
        """Of the requests that got a token, once for each."""
        return self._fresh().owners(self._slot)

    @property
    def token_ids(self) -> Int32:
        """Their tokens, int32 [n]; a view of the slot."""
        return self._fresh().tokens(self._slot, self._count)

    def _fresh(self) -> RecordPool:
        if self._pool.generation(self._slot) != self._generation:
            raise StaleRecordError(
                "the tokens of this step are gone: its record went back at a release point; "
                "clone() what you keep beyond the next submit"
            )
        return self._pool
