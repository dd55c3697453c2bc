"""Every error the engine and the toolkit raise on purpose, in one tree.

"Does not fit" is a return value (`Verdict`), never an exception. What is raised here says what was
asked and what there is, and leaves the state of whatever raised it untouched.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral, Real
from typing import TypeGuard

MAX_LISTED = 30  # names in a hint


class DeepInferError(Exception):
    """Root of every deliberate error."""


class UserError(DeepInferError):
    """Bad input from outside: a file, a flag, a request. One line at the CLI, exit code 2.

    `hint` is printed on a line of its own as `hint: ...`.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class OwnershipError(DeepInferError):
    """A call that would break an ownership rule: pin a free block, release one nobody owns."""


class OutOfBlocksError(DeepInferError):
    """More blocks were asked for than are free; callers ask `can_allocate` first."""


class UnknownRequestError(DeepInferError):
    """A request id that was never added, or whose request has already ended."""


class StaleRecordError(DeepInferError):
    """The record of a step was read after its slot had gone back; `clone()` what is to be kept."""


class DeviceError(DeepInferError):
    """Work on a device failed: names the operation, the stream and the cause."""


class DeviceTimeoutError(DeviceError):
    """Work on a device did not end in the time it was given; it may still be running."""


def check_name(what: str, name: str, valid: Iterable[str]) -> None:
    """Raise a UserError that names the nearest valid name unless `name` is one of `valid`."""
    names = list(valid)
    if name not in names:
        raise UserError(f"{what}: unknown name {name!r}", hint=nearest_hint(name, names))


def check_int(what: str, value: object, least: int) -> None:
    """Raise a UserError unless `value` is an integer (numpy's too, no bool) of at least `least`."""
    if not is_int(value):
        raise UserError(f"{what}: {value!r}; expected an integer")
    if int(value) < least:
        raise UserError(f"{what}: {value}; at least {least}")


def is_int(value: object) -> TypeGuard[int]:
    """Whether `value` counts something: an integer of Python or numpy, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a real number of Python or numpy, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def listed(items: Iterable[object], most: int = 4) -> str:
    """`1, 2, 3, 4, ... (12 in all)`: the first few, and how many there are if not all are shown."""
    shown = list(map(str, items))
    more = f", ... ({len(shown)} in all)" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def nearest_hint(name: str, valid: Iterable[str]) -> str:
    """`did you mean 'x'?` if one is near, and the list of valid names; of very many the nearest."""
    names = list(valid)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    listed = f"valid: {', '.join(names)}"
    if len(names) > MAX_LISTED:
        some = difflib.get_close_matches(name, names, n=4, cutoff=0)
        listed = f"nearest of {len(names)}: {', '.join(some)}"
    return f"did you mean {near[0]!r}? {listed}" if near else listed
