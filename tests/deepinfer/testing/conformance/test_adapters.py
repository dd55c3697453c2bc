"""How a manager is found: by registered name or `module:Class`, with errors that help."""

from __future__ import annotations

import pytest

from deepinfer.errors import UserError
from deepinfer.testing.conformance.adapters import Unavailable, as_family, find, registered
from deepinfer.testing.conformance.managers.own import VARIANTS
from deepinfer.testing.conformance.managers.reference import Reference


def test_three_come_with_the_package():
    """The entry-point group has them, each under its name."""
    assert {"deepinfer", "reference", "vllm"} <= set(registered())
    assert find("reference") == (Reference,)
    assert find("deepinfer") == VARIANTS


def test_a_class_is_found_by_its_place():
    """`module:Class` needs no registration."""
    assert find("deepinfer.testing.conformance.managers.reference:Reference") == (Reference,)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("referense", "unknown name 'referense'"),
        ("no_such_module:Class", "No module named 'no_such_module'"),
        (
            "deepinfer.testing.conformance.managers.reference:Referense",
            "has no attribute 'Referense'",
        ),
        ("collections:Counter", "has no method 'allocate'"),
    ],
)
def test_what_is_no_manager_is_refused(name, text):
    """The error names what was asked for and what is wrong."""
    with pytest.raises(UserError, match="block manager") as error:
        find(name)
    assert text in str(error.value)


def test_the_nearest_name_is_named():
    """A typing error is told what may have been meant."""
    with pytest.raises(UserError) as error:
        find("referense")
    assert error.value.hint is not None
    assert "did you mean 'reference'?" in error.value.hint


def test_what_cannot_be_imported_is_unavailable():
    """A constructor's ImportError is no fault of the manager: its text is the reason."""

    class NeedsMore(Reference):
        def __init__(self, num_blocks):
            import no_such_engine  # noqa: F401

    with pytest.raises(Unavailable, match="No module named 'no_such_engine'"):
        as_family(NeedsMore, "mine")


def test_a_constructor_that_fails_is_named():
    """Other errors of a constructor are the user's, in one line."""

    class Wrong(Reference):
        def __init__(self, num_blocks, more):
            pass

    with pytest.raises(UserError, match=r"'mine': Wrong\(2\) raised TypeError"):
        as_family(Wrong, "mine")


def test_an_instance_is_no_adapter():
    """A manager that exists already cannot be made anew for each run."""
    with pytest.raises(UserError, match=r"'mine': .* is not a class"):
        as_family(Reference(4), "mine")


@pytest.mark.parametrize("promise", ["free_order", "discipline"])
def test_a_promise_that_nobody_knows_is_refused(promise):
    """It could not be checked, and must not show as kept."""
    odd = type("Odd", (Reference,), {promise: "upside_down"})
    with pytest.raises(UserError, match=f"{promise}: unknown promise 'upside_down'"):
        as_family(odd, "mine")
