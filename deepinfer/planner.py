"""The next plan: the scheduler's, over all whose rows have come, waited for where nobody can run.

Two things can let a request run that cannot now: a fence that keeps blocks or slots, and a load on
its way from the store. While others run, a look at each step is enough; where nobody does and no
step is in flight, nothing would ever look again, so the host waits.

Invariant: without a step in flight no plan means that no request can run, whatever one waits for.
"""

from __future__ import annotations

from deepinfer.plan import StepPlan
from deepinfer.pools import Pools
from deepinfer.scheduler import Scheduler
from deepinfer.transfers import Transfers


class Planner:
    """Plans for one engine.

    Args:
        transfers: what moves rows from and to a store; None without one.
        timeout_s: longest wait, in seconds; None = no limit.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pools: Pools,
        transfers: Transfers | None,
        timeout_s: float | None,
    ) -> None:
        self._scheduler = scheduler
        self._pools = pools
        self._transfers = transfers
        self._timeout_s = timeout_s

    def next(self, *, in_flight: bool) -> StepPlan | None:
        """The next step, or None if nobody can run now.

        Args:
            in_flight: whether a step is, whose result may let somebody run.
        """
        plan = self._schedule()
        while plan is None and not in_flight and self._waited():
            plan = self._schedule()
        return plan

    def _schedule(self) -> StepPlan | None:
        transfers, scheduler = self._transfers, self._scheduler
        if transfers is None:
            return scheduler.schedule()
        came, failed = transfers.poll()
        for load in came:
            scheduler.loaded(load)
        for load in failed:
            scheduler.load_failed(load)
        plan = scheduler.schedule()
        for load in scheduler.loads:
            transfers.begin(load)
        return plan

    def _waited(self) -> bool:
        """Wait for what may let somebody run; False if there is no such thing."""
        if self._pools.any_withheld:
            self._pools.flush()
            return True
        if self._transfers is not None and self._transfers.any_open:
            self._transfers.wait(self._timeout_s)
            return True
        return False
