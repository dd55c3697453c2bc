"""What a planted fault is, and the two ways in which one gets into a live engine.

A fault is a function that takes an engine and replaces one method of one of its parts: of that
instance, so that no other engine knows. Its name is the command line's, its docstring the line
that the table shows.

Knows no fault. Invariant: planting happens before the first request, and nothing but the replaced
methods differs from a clean engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deepinfer.engine import LLMEngine
from deepinfer.plan import StepPlan

Plant = Callable[[LLMEngine], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that an engine does wrong.

    Attributes:
        name: as the command line has it.
        what: what goes wrong, in one line.
        report: the public report it is drawn from (repository#number), or the book's section.
        plant: makes an engine have it.
        of_client: whether it concerns blocks that a client moves beside the engine.
        settings: `EngineConfig` fields that it needs other than the scenario's.
    """

    name: str
    what: str
    report: str
    plant: Plant
    of_client: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


class FaultList(dict[str, Fault]):
    """Faults by name, in the order of their definition."""

    def add(
        self, report: str, *, of_client: bool = False, **settings: Any
    ) -> Callable[[Plant], Plant]:
        """A decorator: the function plants a fault named after it."""

        def register(plant: Plant) -> Plant:
            name = plant.__name__.replace("_", "-")
            what = " ".join((plant.__doc__ or "").split()).rstrip(".")
            self[name] = Fault(name, what, report, plant, of_client, settings)
            return plant

        return register


def around(owner: object, name: str, call: Callable[..., Any]) -> None:
    """Replace a method of one object by `call(inner, *arguments)`, `inner` being the method."""
    setattr(owner, name, partial(call, getattr(owner, name)))


def change_plans(engine: LLMEngine, change: Callable[[StepPlan], StepPlan]) -> None:
    """Let every plan of the scheduler be what `change` makes of it."""

    def schedule(inner: Callable[[], StepPlan | None]) -> StepPlan | None:
        plan = inner()
        return plan if plan is None else change(plan)

    around(engine.scheduler, "schedule", schedule)
