"""Both forms of Sinkhorn's balancing against the sums written out."""

import pytest
import torch

from deepinfer.device.sinkhorn import FEW_MATRICES, cpu_sinkhorn, torch_sinkhorn

EPS = 1e-3  # large, so that leaving it out would show


def written_out(x: torch.Tensor, rounds: int) -> torch.Tensor:
    x = x + EPS
    for number in range(rounds):
        x = x / (x.sum(-2, keepdim=True) + EPS)
        if number < rounds - 1:
            x = x / (x.sum(-1, keepdim=True) + EPS)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 16, FEW_MATRICES + 1])
@pytest.mark.parametrize("rounds", [1, 7])
def test_columns_and_rows_are_divided_in_turn(dtype, count, rounds):
    """Columns first and last; the matrices given are not written, nor need they be contiguous."""
    generator = torch.Generator().manual_seed(count)
    given = torch.rand(count, 3, 5, dtype=dtype, generator=generator)[..., :3]
    before, expected = given.clone(), written_out(given, rounds)
    for balance in (
        torch_sinkhorn(3, rounds, EPS, dtype, torch.device("cpu")),
        cpu_sinkhorn(3, rounds, EPS, dtype),
    ):
        torch.testing.assert_close(balance(given), expected)
        assert torch.equal(given, before)
