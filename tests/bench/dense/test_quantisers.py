"""The quantisers of the dense reference: the formulas' corner values, and the engine's formats."""

from __future__ import annotations

import pytest
import torch

from bench.dense.quantisers import quantised
from deepinfer.models.hybrid.formats import quantise


def padded(values: list[float], block: int) -> torch.Tensor:
    """The values, then zeros up to one block."""
    return torch.tensor(values + [0.0] * (block - len(values)))


def test_e2m1_rounds_halves_to_the_even_code() -> None:
    """With scale 1: 0.25 to 0, 0.75 and 1.25 to 1, 1.75 and 2.5 to 2, 3.5 and 5 to 4."""
    given = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75]
    expected = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -1.0]
    for kind, block in (("compressed", 16), ("index", 32)):
        assert torch.equal(quantised(kind, padded(given, block)), padded(expected, block))


def test_e4m3_keeps_three_bits() -> None:
    """With scale 1: 448 stays, 17 rounds to 16 and 19 to 20, the smallest step is 2^-9."""
    given = [448.0, 17.0, 19.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10]
    expected = [448.0, 16.0, 20.0, 2.0**-9, 0.0, 2.0**-8]
    assert torch.equal(quantised("window", padded(given, 32)), padded(expected, 32))


def test_scales_have_their_least() -> None:
    """A block of zeros stays zero, and values far below the least scale vanish."""
    for kind in ("window", "compressed", "index"):
        assert torch.equal(quantised(kind, torch.zeros(2, 32)), torch.zeros(2, 32))
    assert not quantised("compressed", torch.full((16,), 2.0**-12)).any()


@pytest.mark.parametrize("kind", ["window", "compressed", "index"])
def test_the_engines_formats_are_the_same(kind: str) -> None:
    """Bit for bit over values of every size, written apart from each other."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-12, 3, 200).repeat_interleave(5)[:, None]
    x = torch.randn(1000, 64, generator=generator) * sizes
    assert torch.equal(quantise(kind, x), quantised(kind, x))
