"""A pool with one slot for each request that runs, where something of the request lives.

Draft slots are such a pool: the tokens, length and drafts of a request are written there by each of
its steps and read by the next (`deepinfer.carry`). So are state slots, which can be copied
(`deepinfer.state_slots`). A slot may change hands only when no step in flight can touch it: it is
given up behind a fence, through a queue of the policy that blocks have.

Knows no blocks and no order of requests. Invariant: a request has one slot of a pool or none, and
shares it with no other.
"""

from __future__ import annotations

from typing import Literal

from deepinfer.block_manager import BlockManager
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.sequence import Sequence


class Slots:
    """The pool of slots and its queue.

    Args:
        held_in: the field of a `Sequence` that names its slot; 0 = none.

    Attributes:
        slots: the pool; slot 0 is nobody's.
        release: the queue through which slots go back.
    """

    def __init__(
        self, slots: BlockManager, release: ReleaseQueue, held_in: Literal["state_id", "draft_slot"]
    ) -> None:
        self.slots = slots
        self.release = release
        self._held_in = held_in

    def has_room(self) -> bool:
        """Whether a slot can be taken now, after the policy had a look."""
        return self.release.make_room(1)

    def holds_one(self, seq: Sequence) -> bool:
        """Whether `seq` has a slot."""
        return bool(getattr(seq, self._held_in))

    def take(self, seq: Sequence) -> list[Fence]:
        """Give `seq` a slot; returns the fences its writers must wait for (`ordered` only)."""
        return self.release.fences_before_writing([self._hand_out(seq, "admit")])

    def give_up(self, seq: Sequence, fence: Fence | None, path: str) -> None:
        """Take the slot of `seq` back, if it has one."""
        slot: int = getattr(seq, self._held_in)
        if slot:
            setattr(seq, self._held_in, 0)
            self.release.give_up([slot], fence, owner=seq.request_id, path=path)

    def _hand_out(self, seq: Sequence, path: str) -> int:
        slot = self.slots.allocate_one()
        setattr(seq, self._held_in, slot)
        if self.release.observer is not None:
            self.release.observer.took(seq.request_id, [slot], path)
        return slot
