"""What a block manager of any project looks like to the conformance kit, and how one is found.

An adapter is a class. Two methods are required; every further member is optional, and what a
class does not have is *not offered*: there is no flag that could say otherwise. A refusal is an
answer of None or any exception; whether it changed something is looked at, not declared.

Knows no invariant and loads neither hypothesis nor torch. Invariant: a manager is found by the
same rule everywhere: a name in the entry-point group `deepinfer.block_managers`, or
`module:Class`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol

from deepinfer.errors import UserError, nearest_hint

GROUP = "deepinfer.block_managers"
PROMISES = {
    "free_order": ("reverse", "forward", "by_id"),
    "discipline": ("fifo", "lifo", "by_id"),
}
SMALLEST = 2  # blocks of a pool: block 0 and one that can be used


class Unavailable(ImportError):
    """An adapter needs what cannot be imported here; the text says what."""


class Adapter(Protocol):
    """The least: ids go out and come back. Block 0 is not usable.

    `allocate` hands out `count` >= 1 ids with one owner each, in the order in which they leave the
    free list, or refuses. `release` takes one owner from each block of (a part of) a table, given
    in table order.
    """

    def __init__(self, num_blocks: int) -> None: ...

    def allocate(self, count: int) -> Sequence[int] | None: ...

    def release(self, table: list[int]) -> object: ...


class FullAdapter(Adapter, Protocol):
    """With everything the kit can look at; leave out what the manager does not have.

    Attributes:
        free_order: `reverse`, `forward` or `by_id`: the promised order in which the blocks of one
            table join the free list, one by one.
        discipline: `fifo`, `lifo` or `by_id`: the promise where a block joins and leaves it.
    """

    free_order: str
    discipline: str

    def pin(self, table: list[int]) -> object:
        """Add one owner to each block, each of which has one."""
        ...

    def withhold(self, table: list[int]) -> Hashable:
        """Release behind a fence: nothing of it is handed out before `lift` of the answer."""
        ...

    def lift(self, fence: Any) -> object:
        """The fence of one `withhold` has passed; fences may be lifted in any order."""
        ...

    def num_free(self) -> int:
        """How many can be handed out, as the manager counts them."""
        ...

    def free_ids(self) -> Sequence[int]:
        """The ids that can be handed out, by a walk over the free list."""
        ...

    def ref_count(self, block_id: int) -> int:
        """Owners of one block; 0 when free or withheld."""
        ...

    def can_allocate(self, count: int) -> str:
        """`OK`, `LATER` or `NEVER`."""
        ...


AdapterClass = type[Adapter]
Family = tuple[AdapterClass, ...]


def registered() -> list[str]:
    """Names in the entry-point group, those of this package first."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    return sorted(found, key=lambda name: (not found[name].value.startswith("deepinfer."), name))


def find(name: str) -> Family:
    """The adapter of a registered name or a `module:Class`, or several: one for each variant.

    Raises:
        UserError: nothing has this name, or what has it is no adapter.
        Unavailable: it is registered, and needs what is not installed here.
    """
    module, colon, attribute = name.partition(":")
    if colon:
        try:
            return as_family(getattr(import_module(module), attribute), name)
        except Unavailable:
            raise
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"block manager {name!r}: {error}") from None
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        hint = f"{nearest_hint(name, registered())}; or module:Class"
        raise UserError(f"block manager: unknown name {name!r}", hint=hint)
    try:
        target = points[name].load()
    except ImportError as error:
        raise Unavailable(str(error)) from None
    return as_family(target, name)


def as_family(target: object, name: str) -> Family:
    """One adapter class or a tuple of them, as a tuple; one manager of each is made as a trial.

    Raises:
        UserError: `target`, called `name`, is neither, or its constructor fails.
        Unavailable: its constructor cannot import something.
    """
    family = target if isinstance(target, tuple) else (target,)
    for member in family:
        for method in ("allocate", "release"):
            if not callable(getattr(member, method, None)):
                raise UserError(f"block manager {name!r}: {member!r} has no method {method!r}")
        if not isinstance(member, type):
            raise UserError(f"block manager {name!r}: {member!r} is not a class")
        for promise, known in PROMISES.items():
            if (promised := getattr(member, promise, None)) not in (None, *known):
                problem = f"{promise}: unknown promise {promised!r}"
                hint = f"one of {', '.join(known)}, or leave it out"
                raise UserError(f"block manager {name!r}: {problem}", hint=hint)
        try:
            member(SMALLEST)
        except ImportError as error:
            raise Unavailable(str(error)) from None
        except Exception as error:
            problem = f"{member.__name__}({SMALLEST}) raised {type(error).__name__}: {error}"
            raise UserError(f"block manager {name!r}: {problem}") from None
    return family
