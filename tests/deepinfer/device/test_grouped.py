"""Both forms of a grouped product against each row's own."""

import pytest
import torch
import torch.nn.functional as F

from deepinfer.device.grouped import has_kernel, in_one_kernel, one_by_one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3, 0, 2, 4), (0, 0, 5, 0), (1, 1, 1, 1), (0, 7, 0, 1)])
def test_each_row_is_multiplied_with_the_weight_of_its_group(dtype, counts):
    """Groups without rows, first, last and between, take none from their neighbours."""
    generator = torch.Generator().manual_seed(sum(counts))
    weights = torch.randn(4, 16, 8, generator=generator).to(dtype)
    x = torch.randn(sum(counts), 8, generator=generator).to(dtype)
    groups = torch.arange(4).repeat_interleave(torch.tensor(counts))
    expected = torch.stack([F.linear(row, weights[g]) for row, g in zip(x, groups, strict=True)])
    ends = torch.tensor(counts).cumsum(0)
    linears = [lambda rows, weight=weight: F.linear(rows, weight) for weight in weights]
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for grouped in (one_by_one(linears), in_one_kernel(weights)):
        torch.testing.assert_close(grouped(x, ends), expected, atol=tolerance, rtol=tolerance)


def test_host_memory_has_no_kernel_of_its_own():
    """Whatever the dtype: the host knows the groups."""
    assert not has_kernel(torch.zeros(2, 8, 8, dtype=torch.bfloat16))


@pytest.mark.cuda
def test_a_gpu_has_a_kernel_for_whole_16_bytes_of_bfloat16():
    """From Hopper on; other floats and odd sizes go one by one."""
    weights = torch.zeros(2, 16, 8, dtype=torch.bfloat16, device="cuda")
    assert has_kernel(weights) == (torch.cuda.get_device_capability() >= (9, 0))
    assert not has_kernel(weights.half())
    assert not has_kernel(weights[..., :4].contiguous())
