"""When a given-up block may be handed out again: the release queue and its six policies.

Every path on which an id is given up goes through one queue: fork sources, finished, aborted and
preempted tables, shrunk tails. A release without a fence (nothing in flight can touch the blocks)
frees at once under every policy; one with a fence is where the policies differ.

    policy     the blocks become allocatable                                    host waits
    early      at once, fence or not: UNSAFE                                    no
    blocking   after waiting for the fence right where it is given up           yes
    deferred   after waiting at the next release point (the pre-sampler point)  a little
    polled     when a look finds the fence passed: each step, and when starved  no
    step       when the result of the step that carried them is collected       no
    ordered    at once, tagged; the next writer's stream waits for the fence    no

Knows nothing of sequences, plans or devices: a fence is anything with a step number and an event.
Invariant: under every policy but `early`, no block is handed out while an operation submitted
during its ownership may still touch it, unless (`ordered`) its next writer waits for it on the
device; and blocks join the free list in the same order whether they waited or not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from deepinfer.block_manager import BlockIds, BlockManager
from deepinfer.errors import DeviceTimeoutError, check_name, listed
from deepinfer.observer import NO_STEP, Observer


class FenceEvent(Protocol):
    """What the queue needs of a device event."""

    def query(self) -> bool: ...

    def synchronize(self, timeout_s: float | None = None) -> None: ...


class FenceStream(Protocol):
    """What a fence needs of a device stream."""

    def wait(self, event: Any) -> None: ...


@dataclass(slots=True, eq=False)
class Fence:
    """A point in submitted device work after which the blocks released behind it are untouched.

    `step` is `NO_STEP` for a transfer, which has an event under every policy. `event` is None where
    the policy needs none (`step`). `passed` latches once anybody knows that the point was passed;
    the event may be gone from then on.
    """

    step: int
    event: FenceEvent | None = None
    passed: bool = False

    @property
    def what(self) -> str:
        """The fence, in words."""
        return (
            "the fence of a transfer" if self.step == NO_STEP else f"the fence of step {self.step}"
        )

    def query(self) -> bool:
        """Whether the point is known to have passed; never blocks."""
        if not self.passed and self.event is not None:
            self.passed = self.event.query()
        return self.passed

    def wait(self, timeout_s: float | None = None) -> None:
        """Block the host until the point has passed. Raises what the event's wait raises."""
        if not self.passed:
            assert self.event is not None, "a fence without an event passes by `collected` only"
            self.event.synchronize(timeout_s)
            self.passed = True

    def hold(self, stream: FenceStream) -> None:
        """Let what follows on a device stream wait for the point; the host goes on."""
        if not self.passed and self.event is not None:
            stream.wait(self.event)


@dataclass(slots=True)
class ReleaseCounters:
    """What the policy cost so far.

    Attributes:
        withheld_peak: most blocks withheld at once.
        withheld_block_ns: integral of withheld blocks over time, in block-nanoseconds.
        num_waits, wait_ns: host waits on a fence, and the time spent in them.
        num_stream_waits: waits put on a device stream instead (`ordered`).
        num_refused_while_withheld: allocations refused although the withheld blocks would have
            sufficed.
    """

    withheld_peak: int = 0
    withheld_block_ns: int = 0
    num_waits: int = 0
    wait_ns: int = 0
    num_stream_waits: int = 0
    num_refused_while_withheld: int = 0


class ReleasePolicy:
    """What one policy does at the four moments at which it may act; the base withholds for ever.

    A policy of your own overrides these, calls the queue's primitives (`withhold`, `lift_passed`,
    `flush`, `tag`), and joins `POLICIES`.
    """

    safe = True
    needs_events = True

    def given_up(self, queue: ReleaseQueue, table: BlockIds, fence: Fence) -> None:
        """A table was given up behind a fence that has not passed."""
        queue.withhold(table, fence)

    def release_point(self, queue: ReleaseQueue) -> None:
        """The pre-sampler point: forward and sampling of this step are queued."""

    def collected(self, queue: ReleaseQueue) -> None:
        """The result of a step reached the host; the fences up to it are known to have passed."""

    def starved(self, queue: ReleaseQueue) -> None:
        """An allocation is about to be refused."""


class Early(ReleasePolicy):
    """At once. Safe only if every later writer is ordered behind the reader."""

    safe = False
    needs_events = False

    def given_up(self, queue: ReleaseQueue, table: BlockIds, fence: Fence) -> None:
        queue.blocks.release(table)


class Blocking(ReleasePolicy):
    """Wait right where the blocks are given up: behind the copies, before the forward is queued."""

    def given_up(self, queue: ReleaseQueue, table: BlockIds, fence: Fence) -> None:
        queue.withhold(table, fence)
        queue.flush()


class Deferred(ReleasePolicy):
    """Wait at the pre-sampler point, with the forward already queued (the engine of the book)."""

    def release_point(self, queue: ReleaseQueue) -> None:
        queue.flush()


class Polled(ReleasePolicy):
    """Never wait: look at each step and when an allocation would fail, oldest first."""

    def release_point(self, queue: ReleaseQueue) -> None:
        queue.lift_passed()

    def collected(self, queue: ReleaseQueue) -> None:
        queue.lift_passed()

    def starved(self, queue: ReleaseQueue) -> None:
        queue.lift_passed()


class Step(ReleasePolicy):
    """With the result of the step that carried the release; needs no event of its own."""

    needs_events = False

    def collected(self, queue: ReleaseQueue) -> None:
        queue.lift_passed()


class Ordered(ReleasePolicy):
    """At once, tagged: whoever writes the block next waits for the fence on the device."""

    def given_up(self, queue: ReleaseQueue, table: BlockIds, fence: Fence) -> None:
        queue.tag(queue.blocks.release(table), fence)


POLICIES: dict[str, ReleasePolicy] = {
    "early": Early(),
    "blocking": Blocking(),
    "deferred": Deferred(),
    "polled": Polled(),
    "step": Step(),
    "ordered": Ordered(),
}


@dataclass(slots=True)
class _Entry:
    ids: BlockIds
    fence: Fence
    owner: str


class ReleaseQueue:
    """The one way blocks go back to a `BlockManager`.

    Args:
        blocks: the pool.
        policy: a name in `POLICIES`.
        clock: nanoseconds, monotonic; for the withheld integral and the waits.
        observer: told of every release and every moment at which the policy may act.
        timeout_s: longest wait for one fence, in seconds; None = no limit.
        things: what the ids are, for messages.
    """

    def __init__(
        self,
        blocks: BlockManager,
        policy: str,
        clock: Callable[[], int] = time.perf_counter_ns,
        *,
        observer: Observer | None = None,
        timeout_s: float | None = None,
        things: str = "blocks",
    ) -> None:
        check_name("release", policy, POLICIES)
        self.blocks = blocks
        self.observer = observer
        self.policy = POLICIES[policy]
        self.counters = ReleaseCounters()
        self._clock = clock
        self._timeout_s = timeout_s
        self._things = things
        self._owner = ""  # of the table that is being given up
        self._entries: deque[_Entry] = deque()
        self._tags: dict[int, list[Fence]] = {}
        self._since_ns = clock()

    @property
    def num_entries(self) -> int:
        """Releases still waiting for their fence."""
        return len(self._entries)

    def fenced(self) -> list[tuple[BlockIds, Fence]]:
        """Every release still waiting, oldest first: its ids, one fence on each, and the fence."""
        return [(entry.ids, entry.fence) for entry in self._entries]

    # -- what the engine calls -------------------------------------------------------------------

    def give_up(
        self, table: BlockIds, fence: Fence | None = None, *, owner: str = "", path: str = ""
    ) -> None:
        """Drop one owner of each block of one table.

        Args:
            fence: the last submitted work that may touch them, already recorded; None if there is
                none in flight.
            owner, path: who gives them up, and why; see `Observer.giving_up`.
        """
        if not len(table):
            return
        self._owner = owner
        if self.observer is not None:
            event = fence.event if fence and not fence.passed else None
            self.observer.giving_up(table, fence.step if fence else None, owner, path, event)
        if fence is None or fence.passed:
            self._account()  # a block that an older fence still keeps becomes withheld here
            self.blocks.release(table)
            self._note_peak()
        else:
            self.policy.given_up(self, table, fence)

    def release_point(self) -> None:
        """The pre-sampler point: forward and sampling of this step are queued."""
        if self.observer is not None:
            self.observer.release_point()
        self.policy.release_point(self)

    def collected(self, step: int) -> None:
        """The result of `step` has reached the host: every fence up to it has passed."""
        if self.observer is not None:
            self.observer.collected(step)
        for entry in self._entries:
            entry.fence.passed = entry.fence.passed or entry.fence.step <= step
        if self._tags:
            still_open = (
                (i, [f for f in fences if not f.passed and f.step > step])
                for i, fences in self._tags.items()
            )
            self._tags = {i: fences for i, fences in still_open if fences}
        self.policy.collected(self)

    def make_room(self, count: int) -> bool:
        """Whether `count` blocks can be allocated now, after the policy had a look; counts a no."""
        if count > self.blocks.num_free:
            self.policy.starved(self)
        if count <= self.blocks.num_free:
            return True
        if count <= self.blocks.num_free + self.blocks.num_withheld:
            self.counters.num_refused_while_withheld += 1
        return False

    def fences_before_writing(self, ids: BlockIds) -> list[Fence]:
        """Fences the streams that will write these new blocks must wait for (`ordered` only)."""
        if not self._tags:
            return []
        tagged = [fence for i in ids for fence in self._tags.pop(int(i), ())]
        fences = list({id(fence): fence for fence in tagged if not fence.query()}.values())
        self.counters.num_stream_waits += len(fences)
        return fences

    def withheld_block_ns(self) -> int:
        """The withheld integral up to now, in block-nanoseconds."""
        self._account()
        return self.counters.withheld_block_ns

    # -- what the policies call ------------------------------------------------------------------

    def withhold(self, table: BlockIds, fence: Fence) -> None:
        """Drop the owners now, keep the blocks from the free list until the fence is lifted."""
        self._account()
        ids = self.blocks.release(table, fenced=True)
        self._entries.append(_Entry(ids, fence, self._owner))
        self._note_peak()

    def tag(self, ids: BlockIds, fence: Fence) -> None:
        """Remember the fence for whoever writes these freed blocks next.

        A block that several owners gave up keeps all their fences: one need not imply another.
        """
        for block_id in ids:
            fences = self._tags.setdefault(int(block_id), [])
            if fence not in fences:
                fences.append(fence)

    def flush(self) -> None:
        """Wait for every fence and free what it kept; also called when the engine goes idle.

        Raises DeviceTimeoutError, with fence, blocks and owners, if one takes too long; all that
        was withheld still is.
        """
        if not self._entries:
            return
        for entry in self._entries:
            if not entry.fence.passed:
                start = self._clock()
                self._wait(entry.fence)
                self.counters.wait_ns += self._clock() - start
                self.counters.num_waits += 1
        self.lift_passed()
        if self.observer is not None:
            self.observer.flushed()

    def lift_passed(self) -> None:
        """Free what passed fences kept, oldest first, stopping at the first that has not passed."""
        if not self._entries:
            return
        self._account()
        while self._entries and self._entries[0].fence.query():
            self.blocks.lift(self._entries.popleft().ids)

    def _wait(self, fence: Fence) -> None:
        try:
            fence.wait(self._timeout_s)
        except DeviceTimeoutError as error:
            kept = [entry for entry in self._entries if entry.fence is fence]
            ids = listed(dict.fromkeys(int(i) for entry in kept for i in entry.ids))
            owners = listed(dict.fromkeys(repr(entry.owner) for entry in kept))
            raise DeviceTimeoutError(
                f"{fence.what} has not passed: it keeps {self._things} {ids} "
                f"that {owners} gave up; {error}"
            ) from error

    def _note_peak(self) -> None:
        self.counters.withheld_peak = max(self.counters.withheld_peak, self.blocks.num_withheld)

    def _account(self) -> None:
        now = self._clock()
        self.counters.withheld_block_ns += self.blocks.num_withheld * (now - self._since_ns)
        self._since_ns = now
