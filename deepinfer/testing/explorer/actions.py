"""What the user of an engine does in an exploration, as data.

A program is a list of actions. An action that is not possible when its turn comes does nothing (a
request that has ended is not aborted again): so a program stays a program when actions are taken
out of it, and serves every release policy alike.

Knows the world's calls and nothing of orders or policies. Invariant: an action and its JSON form
say the same; what is not said has its default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from deepinfer.errors import UserError, nearest_hint
from deepinfer.testing.explorer.choices import ChoiceDevice
from deepinfer.testing.model import VOCAB_SIZE
from deepinfer.testing.tokens import prefixes
from deepinfer.testing.world import World


@dataclass(frozen=True, slots=True)
class Action:
    """One call.

    Attributes:
        do: `add`, `fork`, `abort`, `submit`, `collect`, `load`, `use`, `drop`, `save`, or
            `advance`: a stream of the device runs its next operation.
        name: of the request, the transfer, or the stream.
        of: the parent that is forked, or the request whose rows are saved.
        tokens: of the prompt; of a fork, own tokens; of a load, its rows.
        shared: tokens a fork takes over; 0 = all there are.
        max_tokens: most tokens to sample.
        stop: the token that ends the request; -1 = none.
    """

    do: str
    name: str = ""
    of: str = ""
    tokens: int = 0
    shared: int = 0
    max_tokens: int = 4
    stop: int = -1

    def __str__(self) -> str:
        text = " ".join(part for part in (self.do, self.name, self.of and f"of {self.of}") if part)
        if self.do in ("add", "load"):
            text += f": {self.tokens} {'rows' if self.do == 'load' else 'tokens'}"
        return text


@dataclass(frozen=True, slots=True)
class Program:
    """What the users of one engine do.

    Attributes:
        start: done first, in order.
        users: actions of each user, in order; who comes next is a matter of chance. One of them
            usually drives the engine: submit, collect, submit, ...
    """

    start: tuple[Action, ...] = ()
    users: tuple[tuple[Action, ...], ...] = ()

    @property
    def actions(self) -> list[Action]:
        """All of them."""
        return [*self.start, *(action for track in self.users for action in track)]


def to_json(action: Action) -> dict[str, Any]:
    """Without what has its default."""
    pairs = ((part.name, getattr(action, part.name), part.default) for part in fields(Action))
    return {name: value for name, value, default in pairs if value != default}


def from_json(entry: Any) -> Action:
    """The action an entry describes. Raises UserError, with the key, if it describes none."""
    if not isinstance(entry, dict):
        raise UserError(f"action {entry!r}: expected an object")
    types = {
        part.name: str if part.name in ("do", "name", "of") else int for part in fields(Action)
    }
    for key, value in entry.items():
        if key not in types:
            raise UserError(f"action key {key!r} is unknown", hint=nearest_hint(key, list(types)))
        if type(value) is not types[key]:
            raise UserError(f"action {key}: {value!r}; expected {types[key].__name__}")
    if entry.get("do") not in DO:
        text = str(entry.get("do"))
        raise UserError(f"action do: {text!r} is unknown", hint=nearest_hint(text, list(DO)))
    return Action(**entry)


def perform(world: World, action: Action) -> bool:
    """Do it, if it is possible now; whether it was."""
    possible, do = DO[action.do]
    if not possible(world, action):
        return False
    do(world, action)
    return True


def is_possible(world: World, action: Action) -> bool:
    """Whether `perform` would do anything now."""
    return DO[action.do][0](world, action)


def tokens_of(name: str, count: int) -> list[int]:
    """The prompt of a request: the same for the same name, and another one for another."""
    start = sum(prefixes(name.encode()))
    return [(start + 7 * index + index * index) % VOCAB_SIZE for index in range(count)]


def _can_add(world: World, action: Action) -> bool:
    return action.name not in world.tokens and action.tokens > 0 and action.max_tokens > 0


def _add(world: World, action: Action) -> None:
    stop = None if action.stop < 0 else action.stop
    world.add(action.name, tokens_of(action.name, action.tokens), action.max_tokens, stop)


def _can_fork(world: World, action: Action) -> bool:
    can_run = action.name not in world.tokens and action.max_tokens > 0
    return can_run and action.of in world.running_ids()


def _fork(world: World, action: Action) -> None:
    length = len(world.tokens[action.of])
    world.fork(
        action.of,
        action.name,
        own=tokens_of(action.name, action.tokens),
        num_shared=min(action.shared, length) or length,
        max_tokens=action.max_tokens,
    )


def _can_load(world: World, action: Action) -> bool:
    is_new = action.name not in world.transfers.held and action.tokens > 0
    return is_new and world.blocks.num_usable * world.config.block_size >= action.tokens


def _device(world: World) -> ChoiceDevice:
    assert isinstance(world.choices, ChoiceDevice), "made to be explored"
    return world.choices


DO: dict[str, tuple[Callable[[World, Action], bool], Callable[[World, Action], object]]] = {
    "add": (_can_add, _add),
    "fork": (_can_fork, _fork),
    "abort": (lambda w, a: a.name in w.tokens, lambda w, a: w.abort(a.name)),
    "submit": (lambda w, a: w.can_submit and bool(w.tokens), lambda w, a: w.submit()),
    "collect": (lambda w, a: bool(w.in_flight), lambda w, a: w.collect()),
    "load": (_can_load, lambda w, a: w.load(a.name, a.tokens)),
    "use": (lambda w, a: a.name in w.transfers.held, lambda w, a: w.use(a.name)),
    "drop": (lambda w, a: a.name in w.transfers.held, lambda w, a: w.drop(a.name)),
    "save": (lambda w, a: a.of in w.readable_ids(), lambda w, a: w.save(a.name, a.of)),
    "advance": (
        lambda w, a: a.name in _device(w).runnable(),
        lambda w, a: _device(w).advance(a.name),
    ),
}
