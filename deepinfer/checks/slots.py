"""Conservation of state slots: one for each running request, those of waiting forks, and pins.

What holds for any pool is checked by `pool`; here are the holders of slots and the plan. Knows no
policy. Invariant: as of `PoolChecker`; without a pool of slots it is never asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from deepinfer.checks.findings import Findings
from deepinfer.checks.host import Host
from deepinfer.checks.plans import Contradiction
from deepinfer.checks.pool import PoolChecker
from deepinfer.plan import StepPlan


class SlotChecker(PoolChecker):
    """Follows every change, looks at every plan (`planned`) and after every call (`settled`)."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings, "state slot")

    def bind(self, host: Host) -> None:
        """Whose requests and slots these are."""
        states = host.states
        assert states is not None, "the model has state"
        self.watch(host, states.slots, states.release, states.slots.num_blocks)
        self._states = states

    def planned(self, plan: StepPlan) -> None:
        """The plan stays inside what its requests hold."""
        self._report("plan", plan.step, self._plan(plan))
        self._report("holders", plan.step, self._holders(plan.state_copies[:, 0].tolist()))

    def settled(self, step: int) -> None:
        """Everything adds up."""
        self._report("counters", step, self._counters())
        self._report("holders", step, self._holders(()))
        self._report("fences", step, self._fences())

    def _holders(self, sources: Sequence[int]) -> Iterator[Contradiction]:
        """Each slot has as many owners as requests have it, and forks await its copy."""
        requests = (*self.host.running, *self.host.waiting)
        for seq in self.host.running:
            if not seq.state_id:
                yield ("none", seq.row), f"{seq.request_id!r} runs without a state slot"
        held = [seq.state_id for seq in requests]
        yield from self._held([held, self._states.pinned, list(sources)])

    def _plan(self, plan: StepPlan) -> Iterator[Contradiction]:
        """Each sequence writes its own slot, alone; copies go from held slots into such slots."""
        sources, destinations = plan.state_copies.astype(np.intp).T
        pending = np.bincount(self.usable(sources), minlength=self.num_blocks)
        held = {seq.row: seq for seq in self.host.running}
        rows, slots = plan.rows.tolist(), plan.state_ids.tolist()
        if len(rows) != len(slots):
            yield ("sizes",), f"a plan of {len(rows)} sequences has {len(slots)} state slots"
            return
        for row, slot in zip(rows, slots, strict=True):
            seq = held.get(row)
            name = repr(seq.request_id) if seq else "nobody"
            if seq is None or slot != seq.state_id or not 0 < slot < self.num_blocks:
                own = seq.state_id if seq else 0
                yield ("slot", row), f"the plan has state slot {slot} for {name}, which has {own}"
            elif self.refs[slot] - pending[slot] != 1:
                yield (
                    ("shared", row),
                    f"{name} writes state slot {slot} of {int(self.refs[slot])} owners, "
                    f"{int(pending[slot])} of which only await their copy",
                )
        if len(np.unique(destinations)) < len(destinations):
            yield ("copied twice",), f"state slots {destinations.tolist()} are copied to"
        for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
            inside = 0 < source < self.num_blocks and 0 < destination < self.num_blocks
            if not inside or not self.refs[source] or self.refs[destination] != 1:
                yield (
                    ("copy", source, destination),
                    f"state slot {source} is copied to {destination}: a held one to one of a "
                    f"single owner is due, of slots 1 to {self.num_blocks - 1}",
                )
