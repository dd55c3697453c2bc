"""The base of every settings model, and the types their keys share.

Knows pydantic; nothing of what any key means. Invariant: a model made from it is exact in its
types, knows all its keys and never changes.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

# Ids, positions and counters are int32.
Count = Annotated[int, Field(ge=1, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]


def conflict(text: str, expected: str, at: tuple[str | int, ...] = ()) -> PydanticCustomError:
    """Two keys that do not go together: what is wrong, what would be right, and under which key of
    the model that complains."""
    context = {"text": text, "expected": expected, "at": at}
    return PydanticCustomError("conflict", "{text}", context)


class Strict(BaseModel):
    """Exact types, no unknown key, no change after it is made."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())

    def only(self, *names: str) -> None:
        """Refuse any number but one of these keys."""
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            what = f"several forms (got {' and '.join(given)})" if given else "no form given"
            raise conflict(what, f"one of {', '.join(names)}")
