"""The CPU's root mean square norm is torch's, up to rounding."""

import pytest
import torch

from deepinfer.device.cpu_norm import cpu_rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("has_weight", [True, False])
def test_it_agrees_with_torch(dtype, has_weight):
    """Every precision, with and without a weight, rows that are part of wider ones."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 40, generator=generator).to(dtype)[..., :24]
    weight = torch.randn(24, generator=generator).to(dtype) if has_weight else None
    given = x.clone()
    found = cpu_rms_norm(weight, 1e-2)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, torch.rms_norm(x, (24,), weight, 1e-2))
    assert torch.equal(x, given)


def test_a_row_of_zeros_stays_zero():
    """eps alone keeps the division finite, even one that float32's squares only just hold."""
    assert not cpu_rms_norm(None, 1e-20)(torch.zeros(2, 8)).any()
