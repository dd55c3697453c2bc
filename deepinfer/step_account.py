"""A step in flight and its account: when each phase began, what was held, what its figures are.

Reads the clock of nobody: the engine does, and hands in what it read. Invariant: times the release
policy made the host wait are counted as waits and as no phase's work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deepinfer.device import Event
from deepinfer.outputs import DraftCounts, StepMoments, StepStats
from deepinfer.plan import AheadResult, Int32, LookAhead, StepPlan
from deepinfer.release import Fence
from deepinfer.scheduler import Scheduler
from deepinfer.worker import InFlightStep


class Counts(NamedTuple):
    """Requests, blocks and slots once a step was queued, before its release point."""

    num_running: int
    num_waiting: int
    blocks_free: int
    blocks_held: int
    blocks_withheld: int
    slots_held: int | None
    slots_withheld: int | None
    blocks_ahead: int = 0
    blocks_for_drafts: int = 0

    @classmethod
    def of(cls, scheduler: Scheduler) -> Counts:
        """As they are now."""
        blocks, states = scheduler.blocks, scheduler.states
        return cls(
            scheduler.num_running,
            scheduler.num_waiting,
            blocks.num_free,
            blocks.num_held,
            blocks.num_withheld,
            None if states is None else states.slots.num_held,
            None if states is None else states.slots.num_withheld,
            *scheduler.blocks_ahead(),
        )


class Reading(NamedTuple):
    """The host's clock, and how long the release policy had made it wait until then."""

    at_ns: int
    waited_ns: int

    @property
    def host_ns(self) -> int:
        """The clock without these waits."""
        return self.at_ns - self.waited_ns


@dataclass(slots=True)
class SubmittedStep:
    """A step in flight and what is known of it so far."""

    plan: StepPlan
    flight: InFlightStep
    fence: Fence
    copy_events: list[Event]
    readings: tuple[Reading, Reading, Reading, Reading]  # started, planned, submitted, released
    counts: Counts
    started_ids: list[str]

    def stats(
        self,
        collecting: int,
        arrived: int,
        collected: Reading,
        now: Reading,
        drafts: DraftCounts | None,
        gap_ms: float | None,
    ) -> StepStats:
        """The step in numbers, once it is committed.

        Args:
            collecting, arrived: nanoseconds at which the host asked for the result, and had it.
            collected, now: after the release policy saw the result, and after the commit.
            drafts: of the step.
            gap_ms: how long the device had nothing to do before it.
        """
        started, planned, submitted, released = self.readings
        return StepStats(
            step=self.plan.step,
            num_tokens=self.plan.num_tokens,
            num_seqs=self.plan.num_seqs,
            **self.counts._asdict(),
            num_copies=len(self.plan.block_copies),
            schedule_ns=planned.host_ns - started.host_ns,
            submit_ns=submitted.host_ns - planned.host_ns,
            release_ns=released.host_ns - submitted.host_ns,
            collect_ns=collected.at_ns - arrived,
            commit_ns=now.host_ns - collected.host_ns,
            wait_ns=now.waited_ns - started.waited_ns,  # an abort may have waited meanwhile
            result_wait_ns=arrived - collecting,
            device_ms=self.flight.device_ms(),
            gap_ms=gap_ms,
            drafts=drafts,
            moments=StepMoments(
                started.at_ns,
                planned.at_ns,
                submitted.at_ns,
                released.at_ns,
                collecting,
                arrived,
                collected.at_ns,
                now.at_ns,
            ),
        )


def draft_counts(
    ahead: LookAhead | None, found: AheadResult | None, num_new: Int32 | None
) -> DraftCounts | None:
    """The drafts of a step in numbers; None if it was to have none.

    Args:
        ahead, found: of its plan and of its result.
        num_new: int32 [S], tokens that its sequences got; 0 where the frame is stale, whose drafts
            count for nothing but the rows that they took.
    """
    if ahead is None or found is None or num_new is None or not np.count_nonzero(ahead.num_drafts):
        return None
    verified = np.where(num_new > 0, found.num_verified, 0)
    accepted = np.clip(num_new - 1, 0, verified)
    positions = np.arange(int(verified.max()))
    return DraftCounts(
        num_rows=int(ahead.num_drafts.sum()),
        num_seqs=int(np.count_nonzero(verified)),
        proposed=tuple(np.count_nonzero(verified[:, None] > positions, axis=0).tolist()),
        accepted=tuple(np.count_nonzero(accepted[:, None] > positions, axis=0).tolist()),
    )
