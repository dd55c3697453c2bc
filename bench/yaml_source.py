"""YAML text to plain data that still knows where each value stands.

Job: read one UTF-8 file strictly. What YAML 1.1 reads differently from what its writer meant
(`off`, `017`, a key without a value or written twice) is an error; but `on` and `off` are text at
keys whose names say so to the reader. Knows nothing of workloads or profiles.
Invariant: every key path in the data has a position, and every problem names file, line and key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from deepinfer.errors import UserError

KeyPath = tuple[str | int, ...]
MAX_BYTES = 1_000_000
MAX_VALUES = 20_000  # with aliases expanded: nine lines of "a billion laughs" stop here
MAX_DEPTH = 30
_LONGEST_NUMBER = 40  # characters; Python refuses to read numbers of thousands of digits

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+][0-9]+)?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")
_NUMBER_TO_US = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+")
_BOOL_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_OTHER_1_1 = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|[0-9]+(:[0-5]?[0-9])+|\.(inf|nan))", re.I)
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null")}
# Given by the look of a plain scalar (dates, `<<`, `=`), not written; such values stay text.
_IMPLICIT_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("timestamp", "merge", "value")}
_TEXT_TAG = "tag:yaml.org,2002:str"


@dataclass(frozen=True, slots=True)
class Position:
    """Line and column of a value, counted from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a file, as the single line a user sees."""

    text: str
    line: int
    hint: str | None = None


class SourceError(UserError):
    """A file that cannot be used; `problems` has every one found, ordered by line."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line))
        first, more = self.problems[0], len(self.problems) - 1
        others = f" ({more} more: see `deepinfer-bench validate`)" if more else ""
        super().__init__(first.text + others, hint=first.hint)


def show_path(path: KeyPath) -> str:
    """`("requests", 0, "fork")` as `requests[0].fork`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def show_value(value: object) -> str:
    """A value as one short line."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def is_number_in_disguise(value: object) -> bool:
    """Whether a string is a number to a person and text to YAML 1.1, as `1e-3` is."""
    return isinstance(value, str) and _NUMBER_TO_US.fullmatch(value) is not None


@dataclass(slots=True)
class Source:
    """A file's data, the position of every key path in it, and the problems met while reading.

    `data` holds only dict, list, str, int, float and bool. A value with a problem is in
    `bad_paths`; its entry in `data` is the text as written. Without a path (values from the command
    line) problems name the key alone.
    """

    path: Path | None
    data: dict[str, Any] = field(default_factory=dict)
    positions: dict[KeyPath, Position] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    bad_paths: set[KeyPath] = field(default_factory=set)

    def known(self, path: KeyPath) -> KeyPath:
        """The longest leading part of `path` that stands in the file."""
        while path and path not in self.positions:
            path = path[:-1]
        return path

    def problem(
        self, path: KeyPath, text: str, *, hint: str | None = None, line: int | None = None
    ) -> Problem:
        """`FILE:LINE: key.path: text`; the line is by default that of the nearest known value."""
        if line is None:
            line = self.positions.get(self.known(path), Position(1, 1)).line
        place = f"{self.path}:{line}: " if self.path else ""
        key = f"{show_path(path)}: " if path else ""
        return Problem(f"{place}{key}{text}", line, hint)


def read_text(path: Path) -> str:
    """The file's text. UserError if it is missing, unreadable, too large, empty or not UTF-8."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"{path}: cannot be read ({reason}); expected a YAML file") from error
    if len(raw) > MAX_BYTES:
        raise UserError(f"{path}: too large (got {len(raw)} bytes); expected at most {MAX_BYTES}")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        byte = raw[error.start]
        raise UserError(
            f"{path}:{line}: not UTF-8 (got byte 0x{byte:02x}); expected UTF-8 text"
        ) from error
    if not text.strip():
        raise UserError(f"{path}: empty file; expected a mapping of keys")
    return text


def parse(path: Path, switches: Container[str] = ()) -> Source:
    """Read a file whose top level is a mapping; `switches` are keys with the values `on` and `off`.

    Problems with single values are collected in the result, so that a caller can show all of them.
    Raises SourceError or UserError where there is nothing to go on with: no file, no YAML.
    """
    source = Source(path)
    text = read_text(path)
    try:
        # Not the C loader: its messages are poorer, and it is not on every machine.
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise SourceError([_syntax_problem(path, error)]) from error
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not YAML ({reason}); expected YAML text") from error
    except RecursionError as error:
        raise UserError(
            f"{path}: nested too deeply; expected at most {MAX_DEPTH} levels"
        ) from error
    if not isinstance(root, yaml.MappingNode):
        line = root.start_mark.line + 1 if root else 1
        kinds = {"sequence": "a list", "scalar": "a single value"}
        got = kinds.get(getattr(root, "id", ""), "nothing")
        what = f"top level is not a mapping (got {got}); expected `key: value` lines"
        raise SourceError([Problem(f"{path}:{line}: {what}", line)])
    source.data = _Reader(source, switches).value(root, ())
    return source


def load(path: Path) -> Source:
    """As `parse`, but any problem raises SourceError."""
    source = parse(path)
    if source.problems:
        raise SourceError(source.problems)
    return source


def _syntax_problem(path: Path, error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    what = error.problem or "not YAML"
    hint = "indent with spaces" if "\\t" in what else None
    if "single document" in str(error):
        what, hint = "more than one document (`---`)", "one file, one workload or profile"
    return Problem(f"{path}:{line}: {what}; expected YAML", line, hint)


class _Reader:
    """Walks a node tree once; one instance per file."""

    def __init__(self, source: Source, switches: Container[str]) -> None:
        self.source = source
        self.switches = switches
        self.num_values = 0

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        mark = node.start_mark
        self.source.positions.setdefault(path, Position(mark.line + 1, mark.column + 1))
        self.num_values += 1
        # Both limits end the walk: what they stop is an alias that contains itself or too much.
        if self.num_values > MAX_VALUES or len(path) > MAX_DEPTH:
            limit = f"{MAX_DEPTH} levels" if len(path) > MAX_DEPTH else f"{MAX_VALUES} values"
            what = f"too much once aliases are followed; expected {limit} at most"
            raise SourceError([self.source.problem(path[:3], what)])
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(child, (*path, i)) for i, child in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self.scalar(node, path)

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.complain(path, "a key that is not a name; expected `key: value`", line=line)
                continue
            key = key_node.value
            if key == "<<":
                what = "merge keys are not supported; expected the keys themselves"
                self.complain((*path, key), what, line=line)
                continue
            if key in result:
                text = f"key written twice (first in line {first_line[key]}); expected it once"
                self.complain((*path, key), text, line=line)
                continue
            first_line[key] = line
            # A key's line is where a reader looks; its value may start lines below.
            self.source.positions[(*path, key)] = Position(line, key_node.start_mark.column + 1)
            result[key] = self.value(value_node, (*path, key))
        return result

    def complain(
        self, path: KeyPath, text: str, *, hint: str | None = None, line: int | None = None
    ) -> None:
        self.source.problems.append(self.source.problem(path, text, hint=hint, line=line))
        self.source.bad_paths.add(path)

    def scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        text: str = node.value
        is_plain = node.style is None
        if node.tag not in (_PLAIN_TAGS | _IMPLICIT_TAGS if is_plain else {_TEXT_TAG}):
            self.complain(path, f"a YAML tag (got {node.tag}); expected a plain value")
            return text
        return self.plain(text, path) if is_plain else text

    def plain(self, text: str, path: KeyPath) -> Any:
        lower = text.lower()
        if lower in ("", "~", "null"):
            self.complain(path, "no value; expected one, or the key left out")
            return text
        if len(text) > _LONGEST_NUMBER:
            return text
        if text in ("true", "false"):
            return text == "true"
        if _INT.fullmatch(text):
            return int(text.replace("_", ""))
        if _FLOAT.fullmatch(text):
            return float(text)
        if lower in ("on", "off") and path and path[-1] in self.switches:
            return lower
        if lower in _BOOL_WORDS or lower in ("true", "false"):
            meant = _BOOL_WORDS.get(lower, lower)
            self.complain(
                path,
                f"a word that YAML reads as a boolean (got {text}); expected true, false or text",
                hint=f'write {meant}, or "{text}" for the text',
            )
        elif _LEADING_ZERO.fullmatch(text):
            decimal = int(text.replace("_", ""))
            self.complain(
                path,
                f"a leading zero makes a number octal (got {text}); expected a decimal number",
                hint=f'write {decimal}, or "{text}" for the text',
            )
        elif _OTHER_1_1.fullmatch(text):
            self.complain(
                path,
                f"a number in an unusual form (got {text}); expected a decimal number",
                hint=f'write it in decimal, or "{text}" for the text',
            )
        return text
