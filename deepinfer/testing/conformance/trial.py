"""One manager, a shadow of what it should be doing, and the calls made so far.

A finding counts only if the invariant under
test is about it; any other that leaves the state unknown ends the trial early (`CutShort`), so that
the verdict on one invariant is not made of the bugs of another.

Knows nothing of hypothesis: a trial can be written by hand, `Trial(MyAdapter, invariant, 4)`.
Invariant: `calls` is the program that leads here, each call as it would be typed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from deepinfer.testing.conformance.adapters import AdapterClass, FullAdapter
from deepinfer.testing.conformance.invariants import Invariant
from deepinfer.testing.conformance.shadow import Shadow

ILLEGAL = {"release_again", "release_twice", "pin_free"}
WAYS = {"fill", "ones"}


class Violation(AssertionError):
    """The invariant under test does not hold; the text says what was seen, `calls` how."""

    def __init__(self, text: str, calls: list[str]) -> None:
        super().__init__(text)
        self.text = text
        self.calls = tuple(calls)


class CutShort(Exception):
    """Another invariant broke first, and what the manager's state is cannot be known."""


@dataclass(frozen=True, slots=True)
class Table:
    """One owner of some blocks: the ids `start` to `stop` of an allocation called `name`."""

    name: str
    start: int
    stop: int
    whole: int
    ids: tuple[int, ...]

    def part(self, start: int, stop: int) -> Table:
        """Entries `start` to `stop` of this table."""
        first = self.start
        return Table(self.name, first + start, first + stop, self.whole, self.ids[start:stop])

    def __str__(self) -> str:
        if self.start == 0 and self.stop == self.whole:
            return self.name
        stop = "" if self.stop == self.whole else self.stop
        return f"{self.name}[{self.start or ''}:{stop}]"


class Trial:
    """Calls a fresh manager and compares; raises `Violation` or `CutShort`.

    Attributes:
        tables: owners that there are: allocations, pins, and what is left of them.
        withheld: tables given up behind a fence that is still on, with the manager's handle.
        given_up: tables whose owner has released them.
    """

    def __init__(self, adapter: AdapterClass, invariant: Invariant, num_blocks: int) -> None:
        self.adapter = adapter
        self.invariant = invariant
        self.num_blocks = num_blocks
        self.tables: list[Table] = []
        self.withheld: list[tuple[str, Table, Any]] = []
        self.given_up: list[Table] = []
        self.calls: list[str] = []
        self._num_names = 0
        self._tried = False  # what the invariant is about: before that, findings are not its own
        illegal = ILLEGAL & set(invariant.tries)
        self._refusals = "changed" in invariant.sees and not illegal
        self._has_to_try = bool(illegal) or self._refusals
        self._manager = cast(FullAdapter, adapter(num_blocks))
        self._shadow = Shadow(
            num_blocks, getattr(adapter, "free_order", None), getattr(adapter, "discipline", None)
        )

    @property
    def operations(self) -> list[str]:
        """Methods of this class that the invariant tries and the adapter offers."""
        tried = (what for what in self.invariant.tries if what not in WAYS)
        offered = (what for what in tried if what in ILLEGAL or hasattr(self.adapter, what))
        return ["allocate", "release", *offered]

    # -- what an owner may do --------------------------------------------------------------------

    def allocate(self, count: int) -> None:
        """Ask for `count` blocks, whether they fit or not."""
        shadow, name = self._shadow, self._new_name()
        free = shadow.free_ids()
        before = self._snapshot() if self._refusals else {}
        answer, error = self._call(
            f"{name} = allocate({count})", lambda: self._manager.allocate(count)
        )
        if answer is None:
            if count <= len(free):
                why = f"raised {error}" if error else "was refused"
                self._found("ungranted", f"{why}; {_blocks(len(free))} free", cut=False)
            else:
                self._tried |= self._refusals
                self._compare(before)
            self._look()
            return
        ids = self._ids(answer)
        for position, block_id in enumerate(ids):
            if not 0 < block_id < self.num_blocks:
                self._found("range", f"handed out {block_id}")
            if shadow.owners[block_id] or block_id in ids[:position]:
                self._found("owned", f"handed out {block_id}, which has an owner")
            if shadow.fences[block_id]:
                self._found("withheld", f"handed out {block_id}, which is behind a fence")
        if len(ids) != count:
            self._found("ungranted", f"handed out {_blocks(len(ids))}")
        expected = shadow.queue[:count]
        if "order" in self.invariant.sees and expected and ids != expected:
            self._found("order", f"handed out {ids}; promised is {expected}")
        shadow.hand_out(ids)
        self.tables.append(Table(name, 0, count, count, tuple(ids)))
        self._look()

    def release(self, index: int, start: int, stop: int) -> None:
        """Give up entries `start` to `stop` of one table."""
        table = self._split(index, start, stop)
        self._owner_call(f"release({table})", lambda: self._manager.release(list(table.ids)))
        self._shadow.give_up(list(table.ids))
        self.given_up.append(table)
        self._look()

    def withhold(self, index: int, start: int, stop: int) -> None:
        """Give them up behind a fence."""
        table, name = self._split(index, start, stop), self._new_name()
        handle = self._owner_call(
            f"{name} = withhold({table})", lambda: self._manager.withhold(list(table.ids))
        )
        self._shadow.give_up(list(table.ids), fenced=True)
        self.withheld.append((name, table, handle))
        self.given_up.append(table)
        self._look()

    def lift(self, index: int) -> None:
        """One fence has passed."""
        name, table, handle = self.withheld.pop(index)
        self._owner_call(f"lift({name})", lambda: self._manager.lift(handle))
        self._shadow.lift(list(table.ids))
        self._look()

    def pin(self, index: int, start: int, stop: int) -> None:
        """Entries of one table get an owner more: a table of their own."""
        table = self.tables[index].part(start, stop)
        self._owner_call(f"pin({table})", lambda: self._manager.pin(list(table.ids)))
        for block_id in table.ids:
            self._shadow.owners[block_id] += 1
        self.tables.append(table)
        self._look()

    # -- what nobody may do ----------------------------------------------------------------------

    def without_owner(self) -> list[Table]:
        """Given-up tables with at least one block that nobody owns now."""
        owners = self._shadow.owners
        return [table for table in self.given_up if not all(owners[i] for i in table.ids)]

    def release_again(self, table: Table) -> None:
        """Release a table of `without_owner`."""
        self._illegal(f"release({table})", lambda: self._manager.release(list(table.ids)))

    def pin_free(self, table: Table) -> None:
        """Pin a table of `without_owner`."""
        self._illegal(f"pin({table})", lambda: self._manager.pin(list(table.ids)))

    def release_twice(self, index: int) -> None:
        """Release one table, each block named twice: legal only if all of it was pinned once more.

        Where it is not, the manager may refuse, or free the blocks once.
        """
        table = self.tables.pop(index)
        ids = list(table.ids)
        other = next((t for t in self.tables if t.ids == table.ids), None)
        if other is None and any(self._shadow.owners[i] > 1 for i in ids):
            self.tables.insert(index, table)  # would take away what others own in part
            return
        self._tried = True
        _, error = self._call(
            f"release({table} + {table})", lambda: self._manager.release(ids + ids)
        )
        if other is None and error:
            self.tables.insert(index, table)
            return
        if other is not None:
            if error:
                self._found("raised", f"raised {error}")
            self.tables.remove(other)
            self._shadow.give_up(ids)
        self._shadow.give_up(ids)
        self.given_up.append(table)
        self._look()

    # -- the end ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """Give everything back, then hand out the whole pool block by block."""
        if "drained" not in self.invariant.sees:
            return
        while self.withheld:
            self.lift(0)
        while self.tables:
            self.release(0, 0, len(self.tables[0].ids))
        usable = self.num_blocks - 1
        self.calls.append(f"[allocate(1) for _ in range({usable + 1})]")
        seen: list[int] = []
        for _ in range(usable + 1):
            answer, error = _attempt(lambda: self._manager.allocate(1))
            if answer is None:
                break
            seen += self._ids(answer)
        twice = [i for i, times in Counter(seen).items() if times > 1]
        if twice:
            self._found("drained", f"the pool was given back; block {twice[0]} came twice")
        elif len(seen) != usable:
            why = f" ({error})" if error else ""
            self._found(
                "drained", f"the pool was given back; {len(seen)} of {usable} blocks came{why}"
            )

    # -- inside ----------------------------------------------------------------------------------

    def _new_name(self) -> str:
        """a, b, ..., z, a1, b1, ..."""
        number, letter = divmod(self._num_names, 26)
        self._num_names += 1
        return f"{chr(ord('a') + letter)}{number or ''}"

    def _split(self, index: int, start: int, stop: int) -> Table:
        """Take part of a table out; what is left stays a table, or two."""
        table = self.tables.pop(index)
        rest = (table.part(0, start), table.part(stop, len(table.ids)))
        self.tables[index:index] = [part for part in rest if part.ids]
        return table.part(start, stop)

    def _call(self, text: str, call: Callable[[], Any]) -> tuple[Any, str]:
        self.calls.append(text)
        return _attempt(call)

    def _owner_call(self, text: str, call: Callable[[], Any]) -> Any:
        answer, error = self._call(text, call)
        if error:
            self._found("raised", f"raised {error}")
        return answer

    def _ids(self, answer: Any) -> list[int]:
        """What `allocate` answered, whatever kind of numbers it has."""
        ids, error = _attempt(lambda: [int(block_id) for block_id in answer])
        if error:
            self._found("range", f"answered {answer!r}, which is no list of ids")
        return cast(list[int], ids)

    def _illegal(self, text: str, call: Callable[[], Any]) -> None:
        before = self._snapshot()
        self._tried = True
        self._call(text, call)
        self._compare(before)

    def _found(self, kind: str, text: str, *, cut: bool = True) -> None:
        if kind in self.invariant.sees and (self._tried or not self._has_to_try):
            raise Violation(f"{self.calls[-1]}: {text}", self.calls)
        if cut:
            raise CutShort(f"{self.calls[-1]}: {text}")

    def _snapshot(self) -> dict[str, Any]:
        """Everything that the manager shows of itself, by the call that shows it."""
        manager = self._manager
        calls: dict[str, Callable[[], Any]] = {}
        if hasattr(manager, "num_free"):
            calls["num_free()"] = manager.num_free
        if hasattr(manager, "free_ids"):
            calls["free_ids()"] = lambda: list(manager.free_ids())
        if hasattr(manager, "ref_count"):
            for block_id in range(1, self.num_blocks):
                calls[f"ref_count({block_id})"] = partial(manager.ref_count, block_id)
        seen = {text: _attempt(call) for text, call in calls.items()}
        return {text: error or value for text, (value, error) in seen.items()}

    def _compare(self, before: dict[str, Any]) -> None:
        after = self._snapshot() if before else {}
        for call, value in before.items():
            if after[call] != value:
                self._found("changed", f"{call} went from {value} to {after[call]}")

    def _look(self) -> None:
        """What the manager says about itself, as far as the invariant is about it."""
        for kind in self.invariant.sees:
            if look := _LOOKS.get(kind):
                complaint, error = _attempt(partial(look, self._manager, self._shadow))
                if complaint or error:
                    self._found(kind, complaint or f"looking at it raised {error}")


def _look_at_owners(manager: FullAdapter, shadow: Shadow) -> str | None:
    for block_id in range(1, shadow.num_usable + 1):
        count, owners = manager.ref_count(block_id), shadow.owners[block_id]
        if count != owners:
            return f"ref_count({block_id}) is {count}; it has {owners} owner{'s'[owners == 1 :]}"
    return None


def _look_for_duplicates(manager: FullAdapter, shadow: Shadow) -> str | None:
    ids = [int(i) for i in manager.free_ids()] if hasattr(manager, "free_ids") else []
    return f"the free list is {ids}" if len(set(ids)) < len(ids) else None


def _look_at_free_set(manager: FullAdapter, shadow: Shadow) -> str | None:
    listed, free = sorted({int(i) for i in manager.free_ids()}), shadow.free_ids()
    return f"the free list has {listed}; free are {free}" if listed != free else None


def _look_at_counter(manager: FullAdapter, shadow: Shadow) -> str | None:
    count, walk = manager.num_free(), len(manager.free_ids())
    return f"num_free() is {count}, the walk finds {walk}" if count != walk else None


def _look_at_never(manager: FullAdapter, shadow: Shadow) -> str | None:
    usable = shadow.num_usable
    for count in (1, usable, usable + 1, usable + 2):
        answer = manager.can_allocate(count)
        if (answer == "NEVER") != (count > usable):
            return f"can_allocate({count}) is {answer}; the pool has {_blocks(usable)}"
    return None


def _look_at_verdict(manager: FullAdapter, shadow: Shadow) -> str | None:
    free = len(shadow.free_ids())
    for count in (1, free, free + 1):
        answer = manager.can_allocate(count)
        if count and (answer == "OK") != (count <= free):
            return f"can_allocate({count}) is {answer}; {_blocks(free)} free"
    return None


_LOOKS: dict[str, Callable[[FullAdapter, Shadow], str | None]] = {
    "owners": _look_at_owners,
    "listed": _look_for_duplicates,
    "free set": _look_at_free_set,
    "counter": _look_at_counter,
    "never": _look_at_never,
    "verdict": _look_at_verdict,
}


def _attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    """The answer and no error, or None and the error in one line."""
    try:
        return call(), ""
    except Exception as error:
        text = str(error).partition("\n")[0]
        return None, f"{type(error).__name__}: {text}" if text else type(error).__name__


def _blocks(count: int) -> str:
    return f"{count} block{'s'[count == 1 :]}"
