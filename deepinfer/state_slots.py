"""State slots of requests: one for each that runs, one ahead for a fork that waits.

A model whose requests have state beside their KV rows keeps it in slots of one size. They are taken
and given up as all slots are (`deepinfer.slots`); what is different is that a slot may have to be
copied. A parent's next step writes over the state that a fork starts from, so the fork takes its
slot at once, and the copy goes with the next plan, admitted or not:

    fork()      slot of the parent pinned, slot of the child taken
    schedule()  (parent, child) joins the plan's copies, before anything the plan writes
    submit      the pin goes back behind the copies, through the release queue

Knows no blocks and no order of requests. Invariant: whoever holds a slot is alone with it, but for
pins that await their copy; a state is never copied from a slot nobody holds, and copied once.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.block_manager import BlockManager
from deepinfer.planning import StepCopies
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.sequence import Sequence
from deepinfer.slots import Slots


@dataclass(frozen=True, slots=True)
class StatePool:
    """What the host needs to know of state slots.

    Attributes:
        num_slots: slot 0 included.
        max_rewind: tokens a state may have gone on and still serve a sequence behind fewer.
    """

    num_slots: int
    max_rewind: int


class StateSlots(Slots):
    """The pool of state slots and its queue.

    Args:
        max_rewind: tokens that a state may have gone on and still serve a sequence that goes on
            from before them.
    """

    def __init__(self, slots: BlockManager, release: ReleaseQueue, max_rewind: int) -> None:
        super().__init__(slots, release, "state_id")
        self.max_rewind = max_rewind
        self._pending: list[tuple[int, Sequence]] = []  # (slot pinned, fork that awaits its copy)

    @property
    def pinned(self) -> list[int]:
        """The slots that forks have pinned until their state is copied, one for each fork."""
        return [source for source, _ in self._pending]

    def can_fork(self, num_written: int, num_computed: int) -> bool:
        """Whether a fork that goes on behind `num_computed` tokens can start from a state.

        Args:
            num_written: tokens of the state when it will be copied: a step in flight has been done.
        """
        return num_written - num_computed <= self.max_rewind and self.has_room()

    def fork(self, seq: Sequence, parent: Sequence) -> None:
        """Give `seq` a slot that is to hold what its parent's holds, and pin that one."""
        self._hand_out(seq, "fork")
        self.slots.pin([parent.state_id])
        self._pending.append((parent.state_id, seq))
        if self.release.observer is not None:
            self.release.observer.forked(seq.request_id, parent.request_id, [parent.state_id])

    def give_up(self, seq: Sequence, fence: Fence | None, path: str) -> None:
        """Take the slot of `seq` back, and its pin if the copy was not queued."""
        for source, fork in self._pending:
            if fork is seq:
                self.release.give_up([source], fence, owner=seq.request_id, path="unpin")
        self._pending = [entry for entry in self._pending if entry[1] is not seq]
        super().give_up(seq, fence, path)

    def queue_copies(self, copies: StepCopies) -> list[Fence]:
        """All copies that were not queued go with the plan; returns fences as `take` does."""
        waits: list[Fence] = []
        for source, fork in self._pending:
            copies.states.append((source, fork.state_id))
            copies.state_owners.append(fork.request_id)
            waits += self.release.fences_before_writing([fork.state_id])
        self._pending = []
        return waits
