"""From logits to tokens: greedy, or a draw whose randomness belongs to the request.

Drawing is Gumbel-max: argmax(logits / temperature + g) with g Gumbel(0, 1) noise is a sample of
softmax(logits / temperature). The noise is a pure function of (seed, position, token): nothing is
consumed, so a request's tokens do not depend on its batch, on preemption or on the device.

The function is the 32-bit finaliser `lowbias32` (see `deepinfer.hashing`), applied twice to the
token id, each time behind a 32-bit key made from seed and position the same way. Where the two
meet, the closing shift of one and the opening shift of the other undo each other and are left out:
shifts are the slow part. The lower 23 bits become a uniform in (0, 1).

Knows nothing of requests. Invariant: a row's token and log-probability depend on that row alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.device.base import Device
from deepinfer.hashing import lowbias32_, middle_, shift_xor_, signed
from deepinfer.plan import Float32, Int32, Int64


def gumbel_noise(
    seeds: Tensor, positions: Tensor, vocab_size: int, device: torch.device | None = None
) -> Tensor:
    """Gumbel(0, 1) noise of each (seed, position, token).

    Args:
        seeds: int64 [M], all 64 bits count.
        positions: int32 or int64 [M], of the token to be drawn.
        device: where to compute; that of `seeds` if None.

    Returns:
        float32 [M, vocab_size]; the bits hashed are the same on every device, the logarithms equal
        up to rounding.
    """
    seeds = seeds.to(device)
    positions = positions.to(seeds.device, torch.int32)
    low, high = seeds.to(torch.int32), (seeds >> 32).to(torch.int32)
    first = lowbias32_(low ^ lowbias32_(positions ^ signed(0x9E3779B9)))
    second = lowbias32_(lowbias32_(high ^ signed(0x85EBCA6B)) ^ first)
    x = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device) ^ first[:, None]
    middle_(shift_xor_(x, 16)).bitwise_xor_(second[:, None])
    shift_xor_(middle_(x), 16)
    # (n + 0.5) / 2^23 is exact in float32 and never 0 or 1.
    uniform = x.bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


@torch.inference_mode()
def sample(
    logits: Tensor, temperature: Float32, seeds: Int64, positions: Int32 | Tensor, device: Device
) -> tuple[Tensor, Tensor]:
    """One token per row; of equal scores the lowest id.

    Args:
        logits: [M, vocab_size].
        temperature: float32 [M] on the host; 0 = greedy. Rows of 0 cost no noise.
        seeds: int64 [M] on the host.
        positions: int32 [M] on the host, or int64 [M] on the device, position each token will have.

    Returns:
        Token ids int32 [M] and log-probabilities float32 [M], of softmax(logits) at temperature 1.
    """
    logits = logits.float()
    scores = logits
    drawn = np.flatnonzero(temperature > 0)
    if len(drawn):
        every = len(drawn) == len(temperature)
        rows = None if every else device.upload(drawn)
        if isinstance(positions, np.ndarray):
            where = device.upload(positions[drawn])
        else:
            where = positions if rows is None else positions.index_select(0, rows)
        noise = gumbel_noise(device.upload(seeds[drawn]), where, logits.shape[1])
        picked = logits if rows is None else logits.index_select(0, rows)
        noisy = noise.addcdiv_(picked, device.upload(temperature[drawn])[:, None])
        scores = noisy if rows is None else logits.index_copy(0, rows, noisy)
    token_ids = scores.argmax(dim=1)
    logprobs = logits.log_softmax(dim=1).gather(1, token_ids[:, None])[:, 0]
    return token_ids.int(), logprobs
