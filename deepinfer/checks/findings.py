"""What the checkers of one engine found: how often, and the first few in words.

Knows no checker. Invariant: `counts` is complete, however many there were; the words are not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

MAX_KEPT = 32  # of each checker, in words


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a checker found wrong.

    Attributes:
        check: the checker, a name in `deepinfer.names.CHECKS`.
        step: during or after which it showed.
        message: one line.
    """

    check: str
    step: int
    message: str

    def __str__(self) -> str:
        return f"{self.check}, step {self.step}: {self.message}"


class Findings:
    """Everything found so far.

    Attributes:
        counts: by checker: wrong rows (`tags`), hazards (`order`), contradictions
            (`conservation`).
        first: the first of each checker, at most `MAX_KEPT` each, in order.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: list[Finding] = []
        self._kept: Counter[str] = Counter()

    def __len__(self) -> int:
        return self.counts.total()

    def add(self, check: str, step: int, message: str, count: int = 1) -> None:
        """Note `count` occurrences that `message` describes."""
        self.counts[check] += count
        if self._kept[check] < MAX_KEPT:
            self._kept[check] += 1
            self.first.append(Finding(check, step, message))
