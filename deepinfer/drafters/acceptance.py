"""How often a replayed draft is to be right: one probability per proposal and position.

What a file may say:

    acceptance: 0.7                               every draft
    acceptance: [0.9, 0.9, 0.1]                   by position in the proposal; the last value holds
                                                  for later positions
    acceptance: all-accept                        the same as 1
    acceptance: all-reject                        the same as 0
    acceptance: alternate                         one proposal all right, the next all wrong
    acceptance: {pattern: bursts, high: 0.9, low: 0.0, length: 8}
                                                  `length` proposals at `high`, as many at `low`;
                                                  left out: 1, 0 and 8; `bursts` alone: all three
    acceptance: {over_time: [0.9, [0.9, 0.1]], length: 4}
                                                  each entry, a number or a list by position, for
                                                  `length` proposals (left out: 1), then from the
                                                  first again

Proposals are counted per request, from 0. The probability at position k is that of the draft being
accepted once all before it were: with p everywhere, j drafts or more are accepted with p^j.

Knows nothing of tokens. Invariant: every probability is within 0 and 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deepinfer.errors import UserError, check_name, is_int, is_number, nearest_hint


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A schedule of acceptance probabilities, as parsed.

    Attributes:
        entries: what holds in turn: the probabilities by position in a proposal.
        length: proposals for which one entry holds.
    """

    entries: tuple[tuple[float, ...], ...]
    length: int = 1

    def probability(self, proposal_number: int, position: int) -> float:
        """Of the draft at `position` of a request's proposal, both counted from 0."""
        entry = self.entries[proposal_number // self.length % len(self.entries)]
        return entry[min(position, len(entry) - 1)]


PATTERNS: dict[str, Acceptance] = {
    "all-accept": Acceptance(((1.0,),)),
    "all-reject": Acceptance(((0.0,),)),
    "alternate": Acceptance(((1.0,), (0.0,))),
    "bursts": Acceptance(((1.0,), (0.0,)), length=8),
}
_BURST_KEYS = ("pattern", "high", "low", "length")


def parse_acceptance(value: object, what: str = "acceptance") -> Acceptance:
    """The schedule that a value of a YAML file stands for (the module says what it may be).

    Args:
        what: what errors call the value: its key, with the file in front if there is one.

    Raises:
        UserError: names the key, the value and what is valid.
    """
    if isinstance(value, str):
        return _pattern({"pattern": value}, what)
    if isinstance(value, (list, tuple)) or is_number(value):
        return Acceptance((_by_position(value, what),))
    if not isinstance(value, Mapping):
        raise UserError(
            f"{what}: {value!r}; expected a probability, a list of them, a pattern or a mapping"
        )
    if "over_time" in value:
        return _over_time(value, what)
    if "pattern" in value:
        return _pattern(value, what)
    _check_keys(value, (*_BURST_KEYS, "over_time"), what)
    raise UserError(f"{what}: {dict(value)}; expected a key 'pattern' or 'over_time'")


def _pattern(settings: Mapping[object, object], what: str) -> Acceptance:
    name = str(settings["pattern"])
    check_name(what, name, PATTERNS)
    pattern = PATTERNS[name]
    if name != "bursts":
        _check_keys(settings, ("pattern",), what)
        return pattern
    _check_keys(settings, _BURST_KEYS, what)
    (high,), (low,) = pattern.entries
    high = _probability(settings.get("high", high), f"{what}.high")
    low = _probability(settings.get("low", low), f"{what}.low")
    return Acceptance(((high,), (low,)), _length(settings.get("length", pattern.length), what))


def _over_time(settings: Mapping[object, object], what: str) -> Acceptance:
    _check_keys(settings, ("over_time", "length"), what)
    entries = settings["over_time"]
    if not isinstance(entries, (list, tuple)) or not entries:
        raise UserError(f"{what}.over_time: {entries!r}; expected a list of at least one entry")
    return Acceptance(
        tuple(_by_position(entry, f"{what}.over_time[{i}]") for i, entry in enumerate(entries)),
        _length(settings.get("length", 1), what),
    )


def _by_position(value: object, what: str) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)):
        return (_probability(value, what),)
    if not value:
        raise UserError(f"{what}: an empty list; expected at least one probability")
    return tuple(_probability(entry, f"{what}[{i}]") for i, entry in enumerate(value))


def _probability(value: object, what: str) -> float:
    if not is_number(value) or not 0 <= value <= 1:
        raise UserError(f"{what}: {value!r}; expected a probability, 0 to 1")
    return float(value)


def _length(value: object, what: str) -> int:
    if not is_int(value) or value < 1:
        raise UserError(f"{what}.length: {value!r}; expected a number of proposals, at least 1")
    return int(value)


def _check_keys(given: Iterable[object], valid: tuple[str, ...], what: str) -> None:
    for key in given:
        if key not in valid:
            raise UserError(f"{what}: unknown key {key!r}", hint=nearest_hint(str(key), valid))
