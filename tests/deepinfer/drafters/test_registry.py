"""The drafters by name."""

from __future__ import annotations

import pytest

from deepinfer import names
from deepinfer.drafters.base import Drafter
from deepinfer.drafters.ngram import NgramDrafter
from deepinfer.drafters.registry import DRAFTERS, make_drafter
from deepinfer.errors import UserError


def test_every_listed_drafter_has_code():
    """A listed drafter can be made, and one in the code is listed."""
    assert tuple(DRAFTERS) == names.DRAFTERS


def test_every_class_is_a_drafter():
    """Each has the methods of the interface; only the one that is part of a model has no class."""
    methods = [name for name in vars(Drafter) if not name.startswith("_")]
    assert methods == ["prepare", "start", "propose"]
    assert [name for name, drafter in DRAFTERS.items() if drafter is None] == ["mtp"]
    for drafter in filter(None, DRAFTERS.values()):
        assert all(callable(getattr(drafter, method)) for method in methods)


def test_a_name_is_enough_for_prompt_lookup():
    """`ngram` works with nothing but its name."""
    assert isinstance(make_drafter("ngram"), NgramDrafter)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("replay", "needs the tokens of a reference run"),
        ("mtp", "asks the model's own draft layers"),
        ("ngramm", "unknown name 'ngramm'"),
    ],
)
def test_a_name_that_is_not_enough_is_refused(name, message):
    """A replay without references, and a name nobody has, are errors of the user."""
    with pytest.raises(UserError, match=message):
        make_drafter(name)
