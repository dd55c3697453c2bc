"""pytest plug-in: the invariants as tests of your own block manager.

    from deepinfer.testing.conformance.pytest_plugin import BlockManagerConformance

    class TestMine(BlockManagerConformance):
        adapter = MyAdapter

or, with no file at all:

    pytest --block-manager mypkg:MyAdapter --pyargs deepinfer.testing.conformance.suite

Every pytest session of an environment with this package loads this module. Invariant: it imports
neither torch nor numpy nor hypothesis until such a test runs.
"""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.testing.conformance.adapters import Unavailable, as_family, find
from deepinfer.testing.conformance.invariants import INVARIANTS, Invariant

OPTION = "--block-manager"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--block-manager NAME|module:Class` for `deepinfer.testing.conformance.suite`."""
    parser.getgroup("deepinfer").addoption(
        OPTION,
        metavar="NAME",
        help="a registered block manager, or module:Class of an adapter; "
        "use with --pyargs deepinfer.testing.conformance.suite",
    )


class BlockManagerConformance:
    """One test for each invariant; skipped where the adapter does not offer what it takes.

    Attributes:
        adapter: an adapter class, or a tuple of them; default: the one of `--block-manager`.
        examples: runs for each invariant; None for the kit's own number.
    """

    adapter: Any = None
    examples: int | None = None

    @pytest.mark.parametrize("invariant", INVARIANTS, ids=lambda i: i.name.replace(" ", "-"))
    def test_invariant(self, invariant: Invariant, request: pytest.FixtureRequest) -> None:
        """The invariant holds, or the failure is the shortest program that breaks it."""
        from deepinfer.testing.conformance.checking import EXAMPLES, HOLDS, NOT_OFFERED, check

        name = request.config.getoption(OPTION)
        if self.adapter is None and name is None:
            pytest.fail(f"which manager? set `adapter`, or give {OPTION}", pytrace=False)
        try:
            family = find(name) if self.adapter is None else as_family(self.adapter, "adapter")
        except Unavailable as reason:
            pytest.skip(str(reason))
        outcome = check(family, invariant, self.examples or EXAMPLES)
        if outcome.verdict == NOT_OFFERED:
            pytest.skip(f"not offered: {outcome.detail}")
        if outcome.verdict != HOLDS:
            lines = [f"{invariant.says}: {outcome.verdict}", outcome.detail, *outcome.calls]
            pytest.fail("\n    ".join(lines), pytrace=False)
