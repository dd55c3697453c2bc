"""What errors say of a name that does not exist."""

from __future__ import annotations

import pytest

from deepinfer.errors import MAX_LISTED, nearest_hint


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("polld", "did you mean 'polled'? valid: deferred, polled, step"),
        ("xyz", "valid: deferred, polled, step"),
    ],
)
def test_a_few_names_are_all_listed(name: str, hint: str) -> None:
    """The nearest first, if one is near."""
    assert nearest_hint(name, ["deferred", "polled", "step"]) == hint


@pytest.mark.parametrize(("name", "said"), [("name-07", "did you mean 'name-7'? "), ("xyz", "")])
def test_of_very_many_names_the_nearest_are_listed(name: str, said: str) -> None:
    """Four, and how many there are; one that is not near at all is answered too."""
    names = [f"name-{n}" for n in range(MAX_LISTED + 1)]
    hint = nearest_hint(name, names)
    assert hint.startswith(f"{said}nearest of {len(names)}: name-")
    assert len(hint.split(", ")) == 4
