"""How an engine ends when its device fails or does not answer: once, with one answer from then on.

Knows the blocks' counts and the error; nothing of requests or steps. Invariant: the call that met
the error and every later one raise an error of the same type with the same message, which says
where all blocks are; nothing is handed out any more, and `close` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from deepinfer.block_manager import BlockManager
from deepinfer.device.base import Failure
from deepinfer.errors import DeviceError


class Stoppable(Protocol):
    """What an engine has that a device's error can stop."""

    blocks: BlockManager
    failure: Failure | None


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Stoppable)


def stops_with_device(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """The method of an engine; a DeviceError in it stops the engine, a stopped one refuses it."""

    @wraps(method)
    def call(engine: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if engine.failure is not None:
            raise engine.failure.error()
        try:
            return method(engine, *args, **kwargs)
        except DeviceError as error:
            engine.failure = _failure(error, engine.blocks)
            raise engine.failure.error() from error

    return call


def _failure(error: DeviceError, blocks: BlockManager) -> Failure:
    where = (
        f"{blocks.num_free} free, {blocks.num_held} held, {blocks.num_withheld} withheld "
        f"of {blocks.num_usable} blocks"
    )
    return Failure(f"{error}; the engine has stopped with {where}", error, type(error))
