"""What a collector yields: named figures, and for each one it could not read, why.

Knows no source of figures. Invariant: a figure that could not be read is None and has a reason;
reading never raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reading:
    """Figures by name, the unit in the name; `reason` is one line, empty if all were read."""

    values: dict[str, float | None] = field(default_factory=dict)
    reason: str = ""

    @classmethod
    def missing(cls, names: tuple[str, ...], reason: str) -> Reading:
        """None for each of `names`, all for the same reason."""
        return cls(dict.fromkeys(names), one_line(reason))


def one_line(text: object, length: int = 120) -> str:
    """`text` without line breaks and cut to a length, by default one for a footnote."""
    line = " ".join(str(text).split())
    return line if len(line) <= length else f"{line[: length - 3]}..."
