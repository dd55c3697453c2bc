"""One pool of a replay, of blocks or of state slots: its manager, its queue, its owners, its count.

Counts owners itself, so that a manager's own counts can be held against them. Knows neither
operations nor the device. Invariant: figures count what was done here, and nothing of another pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepinfer.block_manager import BlockManager
from deepinfer.observer import Observer
from deepinfer.release import ReleaseQueue
from deepinfer.testing.oplog.figures import Figures


class ReplayPool:
    """Ids from 1 on, handed out and given back.

    Args:
        thing: what an id is, for messages.
        size: ids, 0 included.
        observer: told who took what; None if nobody wants to know.
        complain: called with a sentence for each contradiction.

    Attributes:
        num_waits: for fences without an event.
    """

    def __init__(
        self,
        thing: str,
        size: int,
        blocks: BlockManager,
        release: str,
        observer: Observer | None,
        complain: Callable[[str], None],
    ) -> None:
        self.thing, self.blocks, self.observer = thing, blocks, observer
        self.queue = ReleaseQueue(
            blocks, release, clock=lambda: 0, observer=observer, things=f"{thing}s"
        )
        self.num_waits = 0
        self._complain = complain
        self._figures = Figures()
        self._owners = [0] * size  # at each place
        self._num_owned = 0  # places with an owner
        self._touched: set[int] = set()
        self._given_up_at: dict[int, int] = {}  # place -> handed out before it was given up

    @property
    def figures(self) -> Figures:
        """What was counted up to now; `operations` are not a pool's."""
        figures, counters = self._figures, self.queue.counters
        figures.withheld_peak = counters.withheld_peak
        figures.refused_while_withheld = counters.num_refused_while_withheld
        figures.host_waits = counters.num_waits + self.num_waits
        figures.stream_waits = counters.num_stream_waits
        figures.blocks_touched = len(self._touched)
        return figures

    def allocate(self, count: int) -> list[int]:
        """So many ids that are free. Raises what the manager raises."""
        places = [int(i) for i in self.blocks.allocate(count)]
        figures = self._figures
        for place in places:
            if self._owners[place]:
                owners = self._owners[place]
                self._complain(f"{self.thing} {place} is handed out while it has {owners} owners")
            else:
                self._num_owned += 1
            self._owners[place] += 1
            given_up_at = self._given_up_at.pop(place, None)
            if given_up_at is not None:
                figures.reuse_distances[figures.blocks_allocated - given_up_at] += 1
            figures.blocks_allocated += 1
        figures.allocations += 1
        self._touched.update(places)
        return places

    def pin(self, places: Sequence[int]) -> None:
        """One more owner of each. Raises what the manager raises."""
        self.blocks.pin(places)
        for place in places:
            self._owners[place] += 1

    def given_up(self, places: Sequence[int]) -> None:
        """One owner less of each, which the queue has been told."""
        for place in places:
            self._owners[place] -= 1
            if not self._owners[place]:
                self._num_owned -= 1
                self._given_up_at[place] = self._figures.blocks_allocated

    def release_point(self) -> None:
        """A step's work is queued."""
        self._figures.withheld_block_steps += self.blocks.num_withheld
        self.queue.release_point()

    def refusal(self, count: int, takers: str) -> str:
        """Why so many do not fit."""
        blocks = self.blocks
        return (
            f"does not fit: {count} {self.thing}s for {takers or 'nobody'}, with "
            f"{blocks.num_free} free, {blocks.num_held} held and {blocks.num_withheld} withheld "
            f"of {blocks.num_usable}"
        )

    def check(self) -> None:
        """Free, held and withheld ids are all there are."""
        blocks, owned = self.blocks, self._num_owned
        total = blocks.num_free + blocks.num_held + blocks.num_withheld
        if total != blocks.num_usable or blocks.num_held != owned:
            self._complain(
                f"{blocks.num_free} free + {blocks.num_held} held + {blocks.num_withheld} withheld "
                f"of {blocks.num_usable} {self.thing}s; {owned} have owners"
            )
