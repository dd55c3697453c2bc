"""Records of steps as their reader sees them: the same until the release point, then gone.

Reads every record that the caller may read, whenever a slot may have changed hands: it must show
what it showed at first, and behind the release point reading it must fail. Knows no pool and no
policy. Invariant: a record is watched from when it is told to the next release point, and makes at
most one finding.
"""

from __future__ import annotations

from typing import Protocol

from deepinfer.checks.findings import Findings
from deepinfer.errors import StaleRecordError
from deepinfer.plan import Int32

Shown = tuple[list[str], list[int]]  # request ids and tokens


class Record(Protocol):
    """The tokens of a step; reading one that is gone raises StaleRecordError."""

    @property
    def request_ids(self) -> list[str]: ...

    @property
    def token_ids(self) -> Int32: ...


class ToldChecker:
    """Keeps in mind what each record that is out showed at first."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._out: list[tuple[int, Record, Shown]] = []  # with the step each is of

    def told(self, step: int, record: Record) -> None:
        """The caller was given the record of a step; those told before are the caller's still."""
        kept = []
        for told, earlier, first in self._out:
            now = _read(earlier)
            if now == first:
                kept.append((told, earlier, first))
            else:
                self._add(
                    step,
                    f"the record of step {told}, told as {first[1]} of {first[0]}, {_words(now)} "
                    "before the next release point",
                )
        shown = _read(record)
        if shown is None:
            self._add(step, f"the record of step {step} cannot be read when it is told")
        else:
            kept.append((step, record, shown))
        self._out = kept

    def taken_back(self, step: int) -> None:
        """The release point of a step has passed: no record told before it may be read."""
        for told, record, _ in self._out:
            now = _read(record)
            if now is not None:
                self._add(
                    step,
                    f"the record of step {told} can be read behind the release point of step "
                    f"{step}: it {_words(now)}",
                )
        self._out = []

    def _add(self, step: int, message: str) -> None:
        self._findings.add("conservation", step, message)


def _read(record: Record) -> Shown | None:
    """What it shows; None if it refuses."""
    try:
        return list(record.request_ids), record.token_ids.tolist()
    except StaleRecordError:
        return None


def _words(shown: Shown | None) -> str:
    return "cannot be read" if shown is None else f"shows {shown[1]} of {shown[0]}"
