"""Draft slots: where the device keeps what a request hands from one step to the next.

Tokens, length and drafts of a request are written there by each of its steps and read by the next
(`deepinfer.carry`), so a slot may change hands only when no step in flight can touch it: it is
given up behind a fence, through a queue of the policy that blocks have. Where no plan looks ahead
there are none.

Knows no blocks and no order of requests. Invariant: each running request has one slot, alone.
"""

from __future__ import annotations

from deepinfer.block_manager import BlockManager
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.sequence import Sequence


class DraftSlots:
    """The pool of draft slots and its queue.

    Attributes:
        slots: the pool; slot 0 is nobody's.
        release: the queue through which slots go back.
    """

    def __init__(self, slots: BlockManager, release: ReleaseQueue) -> None:
        self.slots = slots
        self.release = release

    def has_room(self) -> bool:
        """Whether a slot can be taken now, after the policy had a look."""
        return self.release.make_room(1)

    def take(self, seq: Sequence) -> list[Fence]:
        """Give `seq` a slot; returns the fences its writers must wait for (`ordered` only)."""
        seq.draft_slot = self.slots.allocate_one()
        return self.release.fences_before_writing([seq.draft_slot])

    def give_up(self, seq: Sequence, fence: Fence | None, path: str) -> None:
        """Take the slot of `seq` back."""
        slot, seq.draft_slot = seq.draft_slot, 0
        self.release.give_up([slot], fence, owner=seq.request_id, path=path)
