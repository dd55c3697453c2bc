"""The checkers of one engine, put where they see what they must; or none of them.

Knows which checker watches what, and none of their rules. Invariant: without checkers and observers
the engine gets its own device and block manager back, and every call here returns at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepinfer.checks.conservation import ConservationChecker, Holder
from deepinfer.checks.findings import Findings
from deepinfer.checks.order import OrderChecker
from deepinfer.checks.prefix_tags import PrefixTags
from deepinfer.checks.told import Record
from deepinfer.device import Device
from deepinfer.device.observed import ObservedDevice
from deepinfer.errors import check_name
from deepinfer.names import CHECKS
from deepinfer.observer import Observer, Observers
from deepinfer.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from deepinfer.checks.host import Host

OFF, ALL = "off", "all"


def parse_checks(value: str) -> tuple[str, ...]:
    """The checkers that `off`, `all` or `tags+order` names. UserError for any other name."""
    if value in (OFF, ALL):
        return () if value == OFF else CHECKS
    names = tuple(dict.fromkeys(value.split("+")))
    for name in names:
        check_name("checks", name, CHECKS)
    return names


class Checks:
    """What one engine is watched by.

    Args:
        value: `EngineConfig.checks`.
        block_size: token positions per block.
        observers: more of them, of the caller's own.

    Attributes:
        findings: what the checkers found.
        observer: what is to be told of everything; None if nobody wants to know.
        state_observer: the same, of the pool of state slots.
    """

    def __init__(self, value: str, block_size: int, observers: Sequence[Observer] = ()) -> None:
        self.names = parse_checks(value)
        self.findings = Findings()
        self._prefix_tags: PrefixTags | None = None
        self._order = OrderChecker(block_size, self.findings) if "order" in self.names else None
        self._conservation = (
            ConservationChecker(block_size, self.findings) if "conservation" in self.names else None
        )
        parts = [*observers, *(part for part in (self._order, self._conservation) if part)]
        self.observer = _one(parts)
        self.state_observer = _one([part.states for part in parts if part.states is not None])

    @property
    def tags(self) -> bool:
        """Whether rows are tagged."""
        return "tags" in self.names

    @property
    def reads_plans(self) -> bool:
        """Whether `tagged` looks at the tokens that a step ran with."""
        return self._conservation is not None

    def watch_device(self, device: Device) -> Device:
        """The device to use instead of `device`."""
        return device if self.observer is None else ObservedDevice(device, self.observer)

    def bind(self, host: Host) -> None:
        """Tell the checkers whose requests and blocks they look at."""
        if self._order is not None:
            self._order.bind(host)
        if self._conservation is not None:
            self._conservation.bind(host)
        self._prefix_tags = host.prefix_tags if self.tags else None

    def add_holder(self, holder: Holder) -> None:
        """A client beside the scheduler holds blocks too; `holder` gives those it holds now."""
        if self._conservation is not None:
            self._conservation.others.append(holder)

    # -- moments of a step -----------------------------------------------------------------------

    def planned(self, plan: StepPlan) -> None:
        """A plan was made; its fork sources are still owned by those who let them go."""
        if self._conservation is not None:
            self._conservation.planned(plan)

    def settled(self, step: int) -> None:
        """No call is half way through: everything must add up."""
        if self._conservation is not None:
            self._conservation.settled(step)

    def told(self, step: int, record: Record) -> None:
        """The caller is about to be given what a step brought."""
        if self._conservation is not None:
            self._conservation.told(step, record)

    def tagged(self, plan: StepPlan, result: StepResult) -> None:
        """A result came back with what the device found in the rows it read.

        `plan`: as the step really ran; its result is not committed yet.
        """
        if self._conservation is not None:
            self._conservation.ran(plan)
        wrong = result.tags
        if wrong is None or not wrong.count or self._prefix_tags is None:
            return
        messages = list(self._prefix_tags.describe(plan, wrong))
        if (more := wrong.count - len(messages)) > 0:
            messages[-1] += f"; and {more} more in this step"
        for number, message in enumerate(messages, start=1):
            is_last = number == len(messages)
            self.findings.add("tags", plan.step, message, 1 + more * is_last)


def _one(parts: Sequence[Observer]) -> Observer | None:
    """Several observers as one; None for none."""
    if len(parts) > 1:
        return Observers(parts)
    return parts[0] if parts else None
