"""Faults of output records: their slots go back too early, or without a word to their readers.

They sit in the pool of records. Knows no checker. Invariant: what requests say in the end is right;
only who reads a step's record is shown another step's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepinfer.engine import LLMEngine
from deepinfer.plan import Int32
from deepinfer.records import TokenRecord
from deepinfer.release import Fence
from deepinfer.testing.faults.plant import FaultList, around

TOLD = FaultList()
Call = Callable[..., Any]


@TOLD.add("none public (I16)", overlap="2")
def record_recycled_under_its_reader(engine: LLMEngine) -> None:
    """A record's slot goes back once its step is collected, and not at the release point."""
    records, told = engine.pools.records, list[int]()

    def tell(inner: Call, fence: Fence, request_ids: list[str], token_ids: Int32) -> TokenRecord:
        record = inner(fence, request_ids, token_ids)
        assert isinstance(record, TokenRecord)
        slot, _ = records._out.pop()
        records.release.give_up([slot], fence, path="record")
        told.append(slot)
        return record

    def take_back(inner: Call) -> None:
        records._generations[told] += 1
        told.clear()

    around(records, "tell", tell)
    around(records, "take_back", take_back)


@TOLD.add("none public (I16)")
def record_recycled_without_a_mark(engine: LLMEngine) -> None:
    """A record's slot goes back without a mark: who kept it reads the tokens of a later step."""
    records = engine.pools.records

    def take_back(inner: Call) -> None:
        generations = records._generations.copy()
        inner()
        records._generations = generations

    around(records, "take_back", take_back)
