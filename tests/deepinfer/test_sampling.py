"""Greedy and Gumbel-max sampling, and the noise behind it."""

import math

import numpy as np
import pytest
import torch

from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.sampling import gumbel_noise, sample


def draw(
    device: SteppedCpuDevice, logits: torch.Tensor, temperature: list[float], seeds: list[int]
) -> tuple[list[int], list[float]]:
    """Sample row i at position 100 + i."""
    positions = np.arange(100, 100 + len(seeds), dtype=np.int32)
    token_ids, logprobs = sample(
        logits, np.array(temperature, np.float32), np.array(seeds, np.int64), positions, device
    )
    assert token_ids.dtype == torch.int32
    assert logprobs.dtype == torch.float32
    return token_ids.tolist(), logprobs.tolist()


def test_greedy_takes_the_lowest_of_equal_ids(device: SteppedCpuDevice) -> None:
    """At temperature 0 the best logit wins, and of equal ones the lowest id."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    assert draw(device, logits, [0.0, 0.0], [1, 2])[0] == [1, 0]


def test_logprobs_are_of_the_raw_logits(device: SteppedCpuDevice) -> None:
    """Log-probabilities are log_softmax at temperature 1 whatever the sampling temperature."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(4, 50)
    token_ids, logprobs = draw(device, logits, [0.0, 0.5, 1.0, 2.0], [1, 2, 3, 4])
    expected = logits.log_softmax(1)[torch.arange(4), token_ids]
    torch.testing.assert_close(torch.tensor(logprobs), expected)


def test_a_row_does_not_depend_on_its_batch(device: SteppedCpuDevice) -> None:
    """A row gets the same token alone, beside greedy rows and in another order."""
    torch.manual_seed(0)
    logits = torch.randn(6, 300)
    temperature = [0.0, 1.0, 0.7, 0.0, 2.0, 1.0]
    seeds, positions = np.arange(6) + 7, np.arange(6, dtype=np.int32) * 3
    together, _ = sample(logits, np.array(temperature, np.float32), seeds, positions, device)
    for i in (5, 1, 0, 4, 2, 3):
        alone, _ = sample(
            logits[[i]],
            np.array(temperature[i : i + 1], np.float32),
            seeds[i : i + 1],
            positions[i : i + 1],
            device,
        )
        assert alone[0] == together[i]


def test_inputs_are_left_alone(device: SteppedCpuDevice) -> None:
    """Sampling writes neither the logits nor the host's arrays."""
    logits = torch.randn(2, 9)
    before, seeds, positions = logits.clone(), np.array([1, 2]), np.array([3, 4], np.int32)
    sample(logits, np.array([0.5, 0.0], np.float32), seeds, positions, device)
    assert torch.equal(logits, before)
    assert seeds.tolist() == [1, 2]
    assert positions.tolist() == [3, 4]


def test_tokens_are_drawn_with_their_probability(device: SteppedCpuDevice) -> None:
    """Over 20,000 seeds the counts fit softmax(logits / T): chi-square below its 0.999 quantile."""
    num = 20_000
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -0.5]])
    token_ids, _ = sample(
        logits.expand(num, -1),
        np.full(num, 0.8, np.float32),
        np.arange(num),
        np.full(num, 5, np.int32),
        device,
    )
    expected = (logits[0] / 0.8).softmax(0) * num
    counts = torch.bincount(token_ids, minlength=6)
    assert ((counts - expected) ** 2 / expected).sum() < 20.5


@pytest.mark.parametrize("axis", ["token", "seed", "position", "high_seed"])
def test_noise_is_uniform_along_every_axis(axis: str) -> None:
    """exp(-exp(-noise)) fills 256 bins evenly along tokens, seeds and positions (chi-square)."""
    num = 1 << 16
    counter, fixed = torch.arange(num), torch.full((num,), 11)
    if axis == "token":
        noise = gumbel_noise(fixed[:1], fixed[:1], num)
    elif axis == "seed":
        noise = gumbel_noise(counter, fixed, 1)
    elif axis == "high_seed":
        noise = gumbel_noise(counter << 32, fixed, 1)
    else:
        noise = gumbel_noise(fixed, counter, 1)
    uniform = (-(-noise).exp()).exp().flatten()
    counts = torch.histc(uniform, bins=256, min=0, max=1)
    chi_square = float(((counts - num / 256) ** 2 / (num / 256)).sum())
    assert 180 < chi_square < 330  # 255 degrees of freedom: within 0.1 % and 99.9 %


def test_noise_of_neighbours_is_uncorrelated() -> None:
    """Neighbouring seeds, positions and tokens share nothing."""
    seeds = torch.tensor([1, 2, 1, 1 + (1 << 32), -1])
    positions = torch.tensor([10, 10, 11, 10, 10])
    rows = gumbel_noise(seeds, positions, 1 << 14)
    shifted = torch.cat([rows, rows[:1].roll(1, dims=1)])
    correlation = torch.corrcoef(shifted).fill_diagonal_(0)
    assert correlation.abs().max() < 0.04  # 5 standard errors


def test_noise_follows_its_definition() -> None:
    """The noise equals the definition in Python's integers, so it never changes unseen."""
    low = 0xFFFFFFFF

    def middle(x: int) -> int:
        x = x * 0x7FEB352D & low
        x ^= x >> 15
        return x * 0x846CA68B & low

    def lowbias32(x: int) -> int:
        x = middle(x ^ x >> 16)
        return x ^ x >> 16

    def gumbel(seed: int, position: int, token: int) -> float:
        first = lowbias32(seed & low ^ lowbias32(position ^ 0x9E3779B9))
        second = lowbias32(lowbias32(seed >> 32 & low ^ 0x85EBCA6B) ^ first)
        x = token ^ first
        x = middle(middle(x ^ x >> 16) ^ second)
        x = (x ^ x >> 16) & 0x7FFFFF
        return -math.log(-math.log((x + 0.5) / 2**23))

    pairs = [(0, 0), (12345, 77), (-3, 8191), (1 << 40, 1)]
    noise = gumbel_noise(
        torch.tensor([s for s, _ in pairs]), torch.tensor([p for _, p in pairs]), 9
    )
    expected = torch.tensor([[gumbel(s, p, token) for token in range(9)] for s, p in pairs])
    torch.testing.assert_close(noise, expected, atol=1e-5, rtol=1e-5)


def test_noise_is_finite_and_bounded() -> None:
    """No noise is infinite: the uniform behind it is never 0 or 1."""
    noise = gumbel_noise(torch.arange(64), torch.arange(64), 8192)
    assert noise.isfinite().all()
    assert noise.min() > -3
    assert noise.max() < 17


@pytest.mark.cuda
def test_noise_is_the_same_on_cuda() -> None:
    """CPU and CUDA hash to the same bits."""
    seeds, positions = torch.arange(8) - (1 << 40), torch.arange(8) * 1000
    on_cuda = gumbel_noise(seeds, positions, 8192, torch.device("cuda"))
    torch.testing.assert_close(on_cuda.cpu(), gumbel_noise(seeds, positions, 8192))
