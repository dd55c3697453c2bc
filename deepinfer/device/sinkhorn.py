"""Sinkhorn's balancing of small matrices: columns and rows divided by their sums in turn.

A matrix [n, n] is a row of n * n numbers, and a product with a fixed matrix of 0 and 1 gives each
of them the sum that it is divided by. So one half of a round is two calls, a product and a
division, and the calls are what takes the time. Two forms: torch's, and for few matrices in host
memory numpy's, whose calls take half as long.

Knows nothing of models. Invariant: both forms divide in the same order, columns first and last.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Sinkhorn = Callable[[Tensor], Tensor]

FEW_MATRICES = 256  # up to here numpy is faster on two cores


def torch_sinkhorn(
    size: int, rounds: int, eps: float, dtype: torch.dtype, device: torch.device
) -> Sinkhorn:
    """See `deepinfer.device.base.Device.sinkhorn`."""
    columns, rows = _sums(size, dtype)
    columns, rows = columns.to(device), rows.to(device)
    epsilons = columns.new_full((size * size,), eps)

    def sinkhorn(x: Tensor) -> Tensor:
        x = x.reshape(-1, size * size) + eps
        sums = torch.empty_like(x)
        for half in range(2 * rounds - 1):
            x.div_(torch.addmm(epsilons, x, rows if half % 2 else columns, out=sums))
        return x.view(-1, size, size)

    return sinkhorn


def cpu_sinkhorn(size: int, rounds: int, eps: float, dtype: torch.dtype) -> Sinkhorn:
    """The same by numpy for few matrices, whose sums have `eps` from a column of ones beside them;
    by torch, which has more threads, for many."""
    of_many = torch_sinkhorn(size, rounds, eps, dtype, torch.device("cpu"))
    columns, rows = (_with_eps(sums.numpy(), eps) for sums in _sums(size, dtype))
    dot, divide, count = np.dot, np.divide, size * size

    def sinkhorn(x: Tensor) -> Tensor:
        if len(x) > FEW_MATRICES:
            return of_many(x)
        given = x.numpy()
        wide = np.ones((len(given), count + 1), given.dtype)
        np.add(given, eps, out=wide[:, :-1].reshape(given.shape))
        sums = np.empty_like(wide)
        for half in range(2 * rounds - 1):
            dot(wide, rows if half % 2 else columns, sums)
            divide(wide, sums, wide)
        return torch.from_numpy(wide)[:, :-1].view(-1, size, size)

    return sinkhorn


def _sums(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[n * n, n * n] of 0 and 1, by which each number becomes its column's sum, and its row's."""
    one, eye = torch.ones(size, size, dtype=dtype), torch.eye(size, dtype=dtype)
    return torch.kron(one, eye), torch.kron(eye, one)


def _with_eps(sums: np.ndarray, eps: float) -> np.ndarray:
    """[m + 1, m + 1] of `sums` [m, m]: adds `eps` times the last number, which keeps its own."""
    extended = np.pad(sums, (0, 1))
    extended[-1] = eps
    extended[-1, -1] = 1
    return extended
