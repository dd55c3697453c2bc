"""What the forks of a plan let go once their copies are queued: given up behind these copies.

Knows no forks: the plan says what is let go, and by whom. Invariant: a source goes back behind an
event that is recorded on stream `copy` after everything that reads it there, or, under a policy
that needs no events, behind the plan's step.
"""

from __future__ import annotations

from deepinfer.device import Device, Event
from deepinfer.plan import StepPlan
from deepinfer.pools import Pools
from deepinfer.release import Fence

FORK_SOURCE = "fork source"


def give_up_sources(plan: StepPlan, pools: Pools, device: Device, fence: str) -> list[Event]:
    """Give up the sources of `plan`, whose copies were just queued.

    Args:
        fence: `EngineConfig.fence`: an event for all, or one for each block.

    Returns:
        The events, to be recycled once the step was collected.
    """
    copy_stream, events = device.stream("copy"), []

    def new_fence() -> Fence:
        if not pools.release.policy.needs_events:
            return Fence(plan.step)
        event = device.event()
        copy_stream.record(event)
        events.append(event)
        return Fence(plan.step, event)

    blocks = zip(plan.copy_sources, plan.source_owners, strict=True)
    let_go = [(pools.release, sources, owner) for sources, owner in blocks]
    if pools.states is not None:
        slots = zip(plan.state_copies[:, :1], plan.state_owners, strict=True)
        let_go += [(pools.states.release, source, owner) for source, owner in slots]
    shared = new_fence() if let_go and fence == "step" else None
    for queue, sources, owner in let_go:
        if shared is not None:
            queue.give_up(sources, shared, owner=owner, path=FORK_SOURCE)
        else:
            for block_id in queue.blocks.in_free_order(sources):
                queue.give_up([int(block_id)], new_fence(), owner=owner, path=FORK_SOURCE)
    return events
