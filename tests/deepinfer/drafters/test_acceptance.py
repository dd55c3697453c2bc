"""The grammar of `acceptance` and the schedules it stands for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from deepinfer.drafters import acceptance
from deepinfer.drafters.acceptance import PATTERNS, Acceptance, parse_acceptance
from deepinfer.errors import UserError

H, L = 0.9, 0.25
PAGE = Path(__file__).resolve().parents[3] / "docs" / "drafts.md"


def schedule(text: str, num_proposals: int, num_positions: int = 1) -> list[list[float]]:
    """Probabilities of the first proposals, by position, of what a YAML file says."""
    parsed = parse_acceptance(yaml.safe_load(text))
    return [
        [parsed.probability(number, k) for k in range(num_positions)]
        for number in range(num_proposals)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.7", [[0.7, 0.7]] * 3),
        ("1", [[1.0, 1.0]] * 3),
        ("all-accept", [[1.0, 1.0]] * 3),
        ("all-reject", [[0.0, 0.0]] * 3),
        ("alternate", [[1.0, 1.0], [0.0, 0.0]] * 3),
        ("{pattern: alternate}", [[1.0, 1.0], [0.0, 0.0]] * 3),
        ("[0.9, 0.25]", [[H, L]] * 3),
        ("{over_time: [0.9, [0.25, 0.9]]}", [[H, H], [L, H]] * 2),
        ("{over_time: [0.9, 0.25], length: 2}", [[H, H], [H, H], [L, L], [L, L]] * 2),
        ("bursts", [[1.0, 1.0]] * 8 + [[0.0, 0.0]] * 8 + [[1.0, 1.0]]),
        ("{pattern: bursts, length: 2}", [[1.0, 1.0]] * 2 + [[0.0, 0.0]] * 2 + [[1.0, 1.0]]),
        (
            "{pattern: bursts, high: 0.9, low: 0.25, length: 3}",
            [[H, H]] * 3 + [[L, L]] * 3 + [[H, H]],
        ),
    ],
)
def test_every_form_means_its_schedule(text: str, expected: list[list[float]]) -> None:
    """Each form of the grammar gives the probabilities that its line in the docstring says."""
    assert schedule(text, len(expected), 2) == expected


@pytest.mark.parametrize("text", [acceptance.__doc__, PAGE.read_text(encoding="utf-8")])
def test_what_the_docs_say_can_be_typed(text: str) -> None:
    """Every example of the docstring and of the page is understood, and every pattern is there."""
    examples = re.findall(r"^ *acceptance: (\S.*?)(?:  .*)?$", text, re.MULTILINE)
    assert len({parse_acceptance(yaml.safe_load(example)) for example in examples}) >= 6
    assert all(any(name in example for example in examples) for name in PATTERNS)


def test_the_last_value_holds_for_later_positions() -> None:
    """A list shorter than the proposal goes on with its last value."""
    assert schedule("[0.9, 0.9, 0.25]", 1, 5) == [[H, H, L, L, L]]


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_its_mapping_without_settings(name: str) -> None:
    """A pattern by name and a mapping that says nothing else are one schedule."""
    assert parse_acceptance(name) == parse_acceptance({"pattern": name})


def test_a_schedule_is_a_value() -> None:
    """Equal texts give equal, hashable schedules."""
    once, twice = (parse_acceptance(yaml.safe_load("{over_time: [1, [0.5]]}")) for _ in "ab")
    assert once == twice == Acceptance(((1.0,), (0.5,)))
    assert hash(once) == hash(twice)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.5", "acceptance: 1.5; expected a probability, 0 to 1"),
        ("-0.1", "acceptance: -0.1; expected a probability, 0 to 1"),
        (".nan", "acceptance: nan; expected a probability, 0 to 1"),
        (
            "true",
            "acceptance: True; expected a probability, a list of them, a pattern or a mapping",
        ),
        (
            "null",
            "acceptance: None; expected a probability, a list of them, a pattern or a mapping",
        ),
        ("[]", "acceptance: an empty list; expected at least one probability"),
        ("[0.9, high]", "acceptance[1]: 'high'; expected a probability, 0 to 1"),
        ("[0.9, [0.1]]", "acceptance[1]: [0.1]; expected a probability, 0 to 1"),
        ("all-acept", "acceptance: unknown name 'all-acept'"),
        ("{pattern: 3}", "acceptance: unknown name '3'"),
        ("{pattern: bursts, hihg: 1}", "acceptance: unknown key 'hihg'"),
        ("{pattern: alternate, length: 2}", "acceptance: unknown key 'length'"),
        ("{patern: bursts}", "acceptance: unknown key 'patern'"),
        ("{1: 2}", "acceptance: unknown key 1"),
        ("{high: 1}", "acceptance: {'high': 1}; expected a key 'pattern' or 'over_time'"),
        ("{}", "acceptance: {}; expected a key 'pattern' or 'over_time'"),
        ("{pattern: bursts, high: 2}", "acceptance.high: 2; expected a probability, 0 to 1"),
        ("{pattern: bursts, low: x}", "acceptance.low: 'x'; expected a probability, 0 to 1"),
        (
            "{pattern: bursts, length: 0}",
            "acceptance.length: 0; expected a number of proposals, at least 1",
        ),
        (
            "{over_time: [1], length: 1.5}",
            "acceptance.length: 1.5; expected a number of proposals, at least 1",
        ),
        ("{over_time: []}", "acceptance.over_time: []; expected a list of at least one entry"),
        ("{over_time: 0.5}", "acceptance.over_time: 0.5; expected a list of at least one entry"),
        (
            "{over_time: [0.5, [1, 7]]}",
            "acceptance.over_time[1][1]: 7; expected a probability, 0 to 1",
        ),
        ("{over_time: [1], pattern: bursts}", "acceptance: unknown key 'pattern'"),
    ],
)
def test_a_bad_value_is_named(text: str, message: str) -> None:
    """Every error names the key, the value and what is valid."""
    with pytest.raises(UserError) as error:
        parse_acceptance(yaml.safe_load(text))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("all-acept", "did you mean 'all-accept'?"),
        ("brusts", "did you mean 'bursts'?"),
        ("{pattern: bursts, lenght: 1}", "did you mean 'length'?"),
        ("{patern: bursts}", "did you mean 'pattern'?"),
        ("{overtime: [1]}", "did you mean 'over_time'?"),
    ],
)
def test_a_slip_gets_the_nearest_name(text: str, hint: str) -> None:
    """A mistyped pattern or key is answered with the right one."""
    with pytest.raises(UserError) as error:
        parse_acceptance(yaml.safe_load(text))
    assert (error.value.hint or "").startswith(hint)


def test_errors_begin_with_what_the_caller_says() -> None:
    """The caller names file and key."""
    with pytest.raises(UserError, match=r"^storm\.yaml: drafts\.acceptance\[0\]: 2; expected"):
        parse_acceptance([2], "storm.yaml: drafts.acceptance")
