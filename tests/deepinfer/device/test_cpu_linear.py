"""The CPU's packed products: right for any rows, and replaced where torch lacks the kernel."""

import pytest
import torch

from deepinfer.device import cpu_linear as module
from deepinfer.device.cpu_linear import cpu_linear


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.double() @ weight.double().T).float()


@pytest.mark.parametrize("rows", [1, 2, 16, 33, 200])
@pytest.mark.parametrize(("out", "into"), [(256, 64), (64, 128), (97, 40)])
def test_products_are_right(rows, out, into):
    """Every shape agrees with float64 to float32's precision."""
    generator = torch.Generator().manual_seed(rows * out)
    x = torch.randn(rows, into, generator=generator)
    weight = torch.randn(out, into, generator=generator)
    assert torch.allclose(cpu_linear(weight)(x), exact(x, weight), atol=1e-4, rtol=1e-5)


def test_a_row_has_the_same_bits_in_any_batch():
    """With oneDNN, who shares the batch does not change a row at all."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(64, 512, generator=generator),
        torch.randn(768, 512, generator=generator),
    )
    linear = module._packed_linear(weight)
    if linear is None:
        pytest.skip("this torch has no packed oneDNN product")
    whole = linear(x)
    for count in (1, 2, 5, 16, 17, 33):
        assert torch.equal(linear(x[:count]), whole[:count])


@pytest.mark.parametrize("rows", [3, 64])
def test_mkl_serves_where_onednn_is_missing(monkeypatch, rows):
    """Without the operators, or if they answered something else, the product is MKL's."""
    x, weight = torch.randn(rows, 48), torch.randn(32, 48)

    def missing(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", missing)
    assert module._packed_linear(weight) is None
    assert torch.allclose(cpu_linear(weight)(x), exact(x, weight), atol=1e-4)


def test_a_kernel_that_answers_wrong_is_not_used(monkeypatch):
    """The operators are private: their answer is tried before it is trusted."""
    weight = torch.randn(32, 48)
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda x, *_: torch.zeros(len(x), 32)
    )
    assert module._packed_linear(weight) is None


def test_other_precisions_are_left_to_torch():
    """bfloat16 weights give bfloat16 results."""
    x, weight = torch.randn(4, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    assert cpu_linear(weight)(x).dtype == torch.bfloat16
