"""The rotary embedding as complex multiplication."""

import pytest
import torch

from deepinfer.models.rope import apply_rope, rope_table
from deepinfer.models.weights import interleave
from tests.deepinfer.step_plans import TINY


def test_rotation_equals_the_half_split_form() -> None:
    """Reordering channels and rotating pairs equals rotating halves and reordering."""
    torch.manual_seed(0)
    x = torch.randn(7, 16)
    angle = torch.arange(7.0)[:, None] / TINY.rope_theta ** (torch.arange(8.0) / 8)
    a, b = x[:, :8], x[:, 8:]
    halves = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 1)
    table = rope_table(TINY, 7, torch.device("cpu"))
    rotated = apply_rope(interleave(x.T, 16).T, table)
    torch.testing.assert_close(rotated, interleave(halves.T, 16).T)


def test_scores_depend_on_distance_only() -> None:
    """q at p against k at r gives the same product for equal p - r."""
    torch.manual_seed(0)
    table = rope_table(TINY, 200, torch.device("cpu"))
    q, k = torch.randn(16), torch.randn(16)
    products = [apply_rope(q, table[p]) @ apply_rope(k, table[p - 9]) for p in (9, 50, 199)]
    torch.testing.assert_close(products[0], products[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(products[0], products[2], atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inplace_gives_the_same(dtype: torch.dtype) -> None:
    """In place or not, the result is the same and keeps its dtype; float32 reuses its memory."""
    torch.manual_seed(0)
    x = torch.randn(3, 2, 5, 16).to(dtype)
    table = rope_table(TINY, 5, torch.device("cpu"))
    expected = apply_rope(x, table)
    rotated = apply_rope(x, table, inplace=True)
    assert rotated.dtype == dtype
    assert torch.equal(rotated, expected)
    assert (rotated.data_ptr() == x.data_ptr()) == (dtype == torch.float32)


def test_strided_input_is_accepted() -> None:
    """A slice of a transposed matrix rotates like its copy."""
    torch.manual_seed(0)
    x = torch.randn(32, 5).T.view(5, 2, 16)
    table = rope_table(TINY, 5, torch.device("cpu"))[:, None]
    assert torch.equal(apply_rope(x, table), apply_rope(x.contiguous(), table))
