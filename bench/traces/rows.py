"""What every trace reader gives, and the line reading and checks they share.

Knows no format. Invariant: lines are read one at a time, so a limit reads no more of a file than it
needs, and every complaint names file, line, column, value and what is valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.yaml_source import show_value
from deepinfer.errors import UserError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_s: seconds since the first request of the trace.
        num_prompt: prompt tokens, >= 1.
        num_output: output tokens, >= 1.
        hash_ids: one id per chunk of prompt tokens, where equal ids mean equal chunks; None if the
            format has none.
    """

    arrival_s: float
    num_prompt: int
    num_output: int
    hash_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a trace, for complaints."""

    path: Path
    line: int

    def error(self, column: str, problem: str, value: object, expected: str) -> UserError:
        """`FILE:LINE: column: problem (got VALUE); expected ...`."""
        got = show_value(value)
        return UserError(
            f"{self.path}:{self.line}: {column}: {problem} (got {got}); expected {expected}"
        )


def text_lines(path: Path) -> Iterator[tuple[Place, str]]:
    """Non-blank lines without their ends (CRLF or LF, the last one with or without).

    Raises UserError for a file that cannot be read, or a line that is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                place = Place(path, number)
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    byte = f"0x{raw[error.start]:02x}"
                    what = f"not UTF-8 (got byte {byte}); expected UTF-8 text"
                    raise UserError(f"{path}:{number}: {what}") from error
                if line.strip():
                    yield place, line
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"{path}: cannot be read ({reason}); expected a trace file") from error


def check_arrival(place: Place, column: str, written: object, now: float, before: float) -> None:
    """UserError if a request arrives before the one above it. Both times in the file's own unit."""
    if now < before:
        raise place.error(column, "out of order", written, "no earlier than the row above")
