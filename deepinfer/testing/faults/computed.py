"""Faults of the device's own work: an operation does something else than it says it does.

They sit below what is declared at the device seam, as a wrong kernel or a stale captured graph
would. Knows no checker. Invariant: plans, owners, events and declared accesses are all right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from deepinfer.engine import LLMEngine
from deepinfer.plan import Int32
from deepinfer.step_inputs import StepInputs
from deepinfer.testing.faults.plant import FaultList, around

COMPUTED = FaultList()
Call = Callable[..., Any]


@COMPUTED.add("TensorRT-LLM#9056")
def copy_leaves_one_out(engine: LLMEngine) -> None:
    """The operation that copies a step's blocks leaves out the last of them."""

    def copy_blocks(inner: Call, pairs: Int32) -> None:
        if len(pairs) > 1:
            inner(pairs[:-1])

    around(engine.worker.runner, "copy_blocks", copy_blocks)


@COMPUTED.add("lmdeploy#4569")
def captured_with_old_table(engine: LLMEngine) -> None:
    """A forward pass runs with the tables that the last one of the same shape was given."""
    last: dict[tuple[int, ...], Int32] = {}

    def forward(inner: Call, inputs: StepInputs) -> Any:
        plan = inputs.plan
        shape = plan.block_tables.shape
        old = last.get(shape, plan.block_tables)
        last[shape] = plan.block_tables
        return inner(replace(inputs, plan=replace(plan, block_tables=old)))

    around(engine.worker.runner, "forward", forward)
