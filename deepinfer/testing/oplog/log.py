"""The operation log: what one engine did with its blocks and its device, a line for each operation.

    {"format": "deepinfer-operations", "version": 1, "engine": {...}}
    {"op": "allocate", "blocks": "a1-a3", "ids": [1, 2, 3], "takers": [["chat-0", "admit", 3]]}
    {"op": "submit", "stream": "compute", "label": "forward step 1", "reads": "a1-a2 a3[0:5]", ...}
    {"op": "release", "owner": "chat-0", "path": "finish", "blocks": "a1-a3"}

A block is named by an ownership, not by its place: each allocation has new names `a1`, `a2`, ...
that are never used again, and `ids` says where they were. So a log can be replayed where the ids
differ. State slots are named in the same way: `"pool": "states"` in an allocation says that its
names are theirs. Events are `e1`, `e2`, ... from one recycling to the next. A line with
`"by": "policy"` is what the release policy of the recorded run made of it: a replay has a policy of
its own.

Knows the format; `recorder` writes it and `replay` runs it. No
torch. Invariant: what is read was written by this version, every block in it was allocated before,
and an error names file and line; a last line that was cut off is left out.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from deepinfer.config import EngineConfig
from deepinfer.errors import UserError, nearest_hint
from deepinfer.observer import BUFFER, RECORD, STAGING
from deepinfer.testing.oplog.operations import (
    OPERATIONS,
    STATES,
    Allocate,
    Blocks,
    Commit,
    Copy,
    Host,
    Operation,
    Pin,
    Release,
    Submit,
    Touched,
)

FORMAT = "deepinfer-operations"
VERSION = 1
END = '{"op":"end"}'  # behind the last operation of a run that was not cut off
MAX_RUN = 1 << 20  # blocks that one `a1-a4` may stand for: a broken line must not fill the memory

# -- text ----------------------------------------------------------------------------------------


def show_blocks(blocks: Blocks) -> str:
    """`a1-a3 a7` for (1, 2, 3, 7)."""
    return show_touched(tuple((block, 0, None) for block in blocks))


def show_touched(touched: Touched) -> str:
    """`a1-a3 a7[0:5] record:2`: blocks, blocks in part, and numbers of another kind."""
    parts: list[str] = []
    first = last = 0  # of a run of whole blocks
    for part in touched:
        if len(part) == 3 and part[2] is None and last and part[0] == last + 1:
            last += 1
            continue
        if last:
            parts.append(f"a{first}" if first == last else f"a{first}-a{last}")
            first = last = 0
        if len(part) == 2:
            parts.append(f"{part[0]}:{part[1]}")
        elif part[2] is None:
            first = last = part[0]
        else:
            parts.append(f"a{part[0]}[{part[1]}:{part[2]}]")
    if last:
        parts.append(f"a{first}" if first == last else f"a{first}-a{last}")
    return " ".join(parts)


_PART = re.compile(rf"a(\d+)(?:-a(\d+)|\[(\d+):(\d+)\])?|({STAGING}|{RECORD}|{BUFFER}):(\d+)")


@lru_cache(maxsize=1 << 16)
def _read_part(text: str) -> Touched:
    match = _PART.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is neither a block, as a3, a3-a7 or a3[0:5], nor {RECORD}:3")
    first, last, start, end, kind, number = match.groups()
    if kind is not None:
        return ((kind, int(number)),)
    if start is not None:
        if int(start) >= int(end):
            raise ValueError(f"{text!r}: no rows")
        return ((int(first), int(start), int(end)),)
    if not 0 < int(first) <= int(last or first):
        raise ValueError(f"{text!r}: no blocks")
    if int(last or first) - int(first) >= MAX_RUN:
        raise ValueError(f"{text!r}: more than {MAX_RUN} blocks")
    return tuple((block, 0, None) for block in range(int(first), int(last or first) + 1))


def read_touched(text: str) -> Touched:
    """The inverse of `show_touched`; ValueError if it is not such a text."""
    if type(text) is not str:
        raise ValueError(f"{text!r} is no text")
    return tuple(part for word in text.split(" ") for part in _read_part(word)) if text else ()


def read_blocks(text: str) -> Blocks:
    """The inverse of `show_blocks`; ValueError if it is not such a text."""
    blocks = []
    for part in read_touched(text):
        if len(part) != 3 or part[2] is not None:
            raise ValueError(f"{show_touched((part,))!r} is no whole block")
        blocks.append(part[0])
    return tuple(blocks)


def _typed(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"{value!r} is not of type {kind.__name__}")
        return value

    return read


def _read_ids(value: Any) -> Blocks:
    if type(value) is not list or not all(type(item) is int for item in value):
        raise ValueError(f"{value!r} is no list of ids")
    return tuple(value)


def _read_takers(value: Any) -> tuple[tuple[str, str, int], ...]:
    try:
        return tuple((str(owner), str(path), int(count)) for owner, path, count in value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is no list of [owner, path, count]") from None


def _read_pool(value: Any) -> str:
    if value != STATES:
        raise ValueError(f"{value!r} is no pool that is named; expected {STATES!r}")
    return STATES


_read_text = _typed(str)

# A key means the same in every operation: how it is written, and how it is read.
_WRITE: dict[str, Callable[[Any], Any]] = {
    "blocks": show_blocks,
    "sources": show_blocks,
    "reads": show_touched,
    "writes": show_touched,
    "rows": show_touched,
}
_READ: dict[str, Callable[[Any], Any]] = {
    "blocks": read_blocks,
    "sources": read_blocks,
    "reads": read_touched,
    "writes": read_touched,
    "rows": read_touched,
    "ids": _read_ids,
    "takers": _read_takers,
    "reuses": _typed(dict),
    "pool": _read_pool,
    "step": _typed(int),
    "passed": _typed(bool),
}
_FIELDS = {
    name: tuple((f.name, _WRITE.get(f.name), f.default) for f in fields(kind))
    for name, kind in OPERATIONS.items()
}
_REQUIRED = {
    name: {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    for name, kind in OPERATIONS.items()
}


def encode(operation: Operation) -> str:
    """One line, without its end; keys that say nothing are left out."""
    entry: dict[str, Any] = {"op": operation.op}
    for name, write, default in _FIELDS[operation.op]:
        value = getattr(operation, name)
        if value != default and value != {} and value != ():
            entry[name] = write(value) if write is not None else value
    return json.dumps(entry, ensure_ascii=False)


def decode(line: bytes | str) -> Operation:
    """The operation of one line; ValueError, saying what is wrong with it, if it is none."""
    entry = json.loads(line)
    if type(entry) is not dict:
        raise ValueError("expected an object")
    name = entry.pop("op", None)
    kind = OPERATIONS.get(name) if type(name) is str else None
    if kind is None:
        raise ValueError(f"unknown operation {name!r}; {nearest_hint(str(name), OPERATIONS)}")
    known = kind.__dataclass_fields__
    if not known.keys() >= entry.keys():
        key = next(key for key in entry if key not in known)
        raise ValueError(f"{name}: unknown key {key!r}; {nearest_hint(key, known)}")
    if missing := _REQUIRED[name] - entry.keys():
        raise ValueError(f"{name}: no {', '.join(sorted(missing))}")
    values = {key: _READ.get(key, _read_text)(value) for key, value in entry.items()}
    return kind(**values)


# -- the file ------------------------------------------------------------------------------------


def header(config: EngineConfig) -> str:
    """The first line, without its end."""
    return json.dumps({"format": FORMAT, "version": VERSION, "engine": dataclasses.asdict(config)})


def read_header(path: Path) -> dict[str, Any]:
    """The first line of a file as an object.

    Raises UserError if the file cannot be read, or its first line is no object with a `format`.
    """
    try:
        with path.open("rb") as file:
            entry = json.loads(file.readline(1 << 20))
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror}") from error
    except ValueError:
        entry = None
    if type(entry) is not dict or "format" not in entry:
        raise UserError(
            f"{path}: not an operation log: its first line names no format",
            hint="`run --record FILE` writes one",
        )
    return entry


class OperationLog:
    """A log on disk, read as it is iterated over: (line number, operation), as often as asked.

    Attributes:
        config: of the engine that was recorded.
        truncated: whether it has no end mark, so that a part of the run is missing; known once it
            was read.

    Raises UserError for a file that is not a log of this version; iterating raises it for a line
    that is no operation.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.truncated = False
        entry = read_header(self.path)
        if entry["format"] != FORMAT:
            raise UserError(f"{path}: format {entry['format']!r}; expected {FORMAT!r}")
        if entry.get("version") != VERSION:
            raise UserError(
                f"{path}: version {entry.get('version')!r} of the format; expected {VERSION}",
                hint="record it again with this version",
            )
        engine = entry.get("engine")
        if type(engine) is not dict:
            raise UserError(f"{path}:1: engine: expected its settings, as an object")
        known = [f.name for f in fields(EngineConfig)]
        if unknown := [key for key in engine if key not in known]:
            hint = nearest_hint(unknown[0], known)
            raise UserError(f"{path}:1: engine: unknown key {unknown[0]!r}", hint=hint)
        try:
            self.config = EngineConfig(**engine)
            self.config.check()
        except UserError as error:
            raise UserError(f"{path}:1: engine: {error}") from None

    def __iter__(self) -> Iterator[tuple[int, Operation]]:
        names = _Names()
        self.truncated = True
        with self.path.open("rb") as file:
            file.readline()
            for number, line in enumerate(file, start=2):
                if line == END.encode() + b"\n":
                    self.truncated = False
                    continue
                try:
                    operation = decode(line)
                    names.check(operation)
                except ValueError as error:
                    if not line.endswith(b"\n"):
                        return
                    raise UserError(f"{self.path}:{number}: {error}") from None
                yield number, operation


class _Names:
    """The names given so far. `check` raises ValueError if an operation names what has no name."""

    def __init__(self) -> None:
        self._num_names = 0
        self._slots: set[int] = set()

    def check(self, operation: Operation) -> None:
        """Names were given before; one table has blocks only, or state slots only."""
        if isinstance(operation, Allocate):
            self._allocate(operation)
            return
        named: Blocks = ()
        if isinstance(operation, Pin | Release | Copy):
            named = operation.blocks
        if isinstance(operation, Copy):
            if len(operation.sources) != len(operation.blocks):
                num_sources, num_blocks = len(operation.sources), len(operation.blocks)
                raise ValueError(f"copy: {num_sources} sources of {num_blocks}")
            named += operation.sources
        if len({block in self._slots for block in named}) > 1:
            raise ValueError(f"{operation.op}: blocks and state slots together")
        if isinstance(operation, Submit | Host):
            touched = (*operation.reads, *operation.writes)
            named = tuple(part[0] for part in touched if len(part) == 3)
        if isinstance(operation, Commit):
            named = tuple(part[0] for part in operation.rows if len(part) == 3)
            if len(named) < len(operation.rows) or not self._slots.isdisjoint(named):
                raise ValueError("commit: rows are of blocks")
        highest = max(named, default=0)
        if highest > self._num_names:
            raise ValueError(f"{operation.op}: block a{highest} was not allocated before")

    def _allocate(self, operation: Allocate) -> None:
        first, count = self._num_names + 1, len(operation.blocks)
        if operation.blocks != tuple(range(first, first + count)):
            raise ValueError(f"allocate: blocks must go on with a{first}")
        if len(operation.ids) != count:
            raise ValueError(f"allocate: {len(operation.ids)} ids of {count} blocks")
        self._num_names += count
        if operation.pool:
            self._slots.update(operation.blocks)


def step_written(writes: Touched) -> int | None:
    """The step whose record an operation writes; None if it writes none."""
    return next((int(part[1]) for part in writes if part[0] == RECORD), None)
