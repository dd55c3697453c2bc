"""Our own block manager under the kit, and its variants' promises."""

from __future__ import annotations

import pytest

from deepinfer.testing.conformance.checking import HOLDS, check
from deepinfer.testing.conformance.invariants import INVARIANTS
from deepinfer.testing.conformance.managers.own import VARIANTS


@pytest.mark.parametrize("invariant", INVARIANTS, ids=lambda i: i.name)
def test_the_block_manager_holds_every_invariant(invariant):
    """Over all free orders and disciplines."""
    outcome = check(VARIANTS, invariant, 60)
    assert outcome.verdict == HOLDS, f"{outcome.detail}: {outcome.program}"


def test_every_variant_promises_what_it_is_called():
    """All but the shuffled ones promise a free order; each promises its discipline."""
    assert len(VARIANTS) == 12
    for variant in VARIANTS:
        _, free_order, discipline = variant.__name__.split("_", 2)
        if free_order == "by":
            free_order, discipline = "by_id", discipline.removeprefix("id_")
        assert variant.discipline == discipline
        assert getattr(variant, "free_order", "shuffled") == free_order
