"""Which compressed rows a query reads: index scores, candidate blocks, the best k.

    score_j = sum_h  w_h * relu(q_h . k_j)         w scaled by heads^-1/2 * dim^-1/2

A publisher's candidates are the blocks of rows with the highest scores, the newest visible row's
block among them; later selectors choose from these rows only (V4.1). Of equal scores the smaller
index wins, everywhere.

Knows nothing of where rows lie. Invariant: no query gets a row it cannot see, or one twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW = 64  # numbers that are sorted faster than they are made keys


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows of each query of a tile, n sequences x q queries.

    Attributes:
        rows: int64 [n, q, k], row numbers; -1 where a query has fewer than k.
        places: int64 [n * q, k], where they are stored, if they are to be read one by one; None if
            the tile reads all rows and hides what is not selected.
        hidden: bool [n, q, 1, k], or [n, q, 1, L] without `places`.
    """

    rows: Tensor
    places: Tensor | None
    hidden: Tensor


def top_indices(scores: Tensor, k: int) -> Tensor:
    """Of the last dimension the `k` highest, of equal ones the smallest index: int64 [..., k].

    In order of score. `k` is at most the size.
    """
    size = scores.shape[-1]
    if scores.dtype != torch.float32 or size <= _FEW:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    # One integer per score, of which no two are equal: its bits, made to order like the number
    # (adding 0 turns -0 into 0), times 2^32, less its index. `topk` is 10 to 20 times as fast as a
    # stable sort of many, and does not say which of equal numbers it takes.
    bits = (scores + 0.0).view(torch.int32)
    bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))
    keys = (bits.long() << 32).sub_(torch.arange(size, device=scores.device))
    return keys.topk(k, dim=-1).indices


def index_scores(queries: Tensor, keys: Tensor, weights: Tensor, hidden: Tensor) -> Tensor:
    """Scores [n, q, L], -inf where hidden.

    Args:
        queries: [n, q, heads, dim].
        keys: [n, L, dim].
        weights: [n, q, heads], scaled.
        hidden: bool [n, q, 1, L].
    """
    num_seqs, num_queries, heads, _ = queries.shape
    dots = F.relu(torch.bmm(queries.flatten(1, 2), keys.mT), inplace=True)
    dots = dots.view(num_seqs * num_queries, heads, -1)
    scores = torch.bmm(weights.reshape(-1, 1, heads), dots)
    scores = scores.view(num_seqs, num_queries, -1)
    return scores.masked_fill_(hidden[:, :, 0], -torch.inf)


def candidate_rows(scores: Tensor, visible: Tensor, block_size: int, num_blocks: int) -> Tensor:
    """The rows that later selectors may choose from: bool [n, q, L].

    Args:
        scores: [n, q, L], -inf where hidden.
        visible: int64 [n, q], rows each query sees; the block of the newest is always kept.
        block_size: rows per block.
        num_blocks: blocks kept of each query.
    """
    num_rows = scores.shape[-1]
    padded = F.pad(scores, (0, -num_rows % block_size), value=-torch.inf)
    best = padded.view(*padded.shape[:-1], -1, block_size).amax(-1)
    newest = (visible - 1).clamp(min=0)[..., None] // block_size
    pin = torch.where(visible[..., None] > 0, torch.inf, -torch.inf).to(best.dtype)
    best = best.scatter(-1, newest, pin)
    kept = top_indices(best, min(num_blocks, best.shape[-1]))
    is_kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, kept, True)
    is_kept &= best > -torch.inf
    return is_kept.repeat_interleave(block_size, dim=-1)[..., :num_rows]


def best_rows(scores: Tensor, k: int) -> Tensor:
    """Numbers of each query's `k` best rows, int64 [n, q, k'], k' = min(k, L); -1 where a query has
    fewer above -inf."""
    rows = top_indices(scores, min(k, scores.shape[-1]))
    return rows.masked_fill(scores.gather(-1, rows) == -torch.inf, -1)


def hidden_but(rows: Tensor, num_rows: int) -> Tensor:
    """bool [n, q, 1, L]: True but for `rows`, int64 [n, q, k]; -1 is no row."""
    hidden = torch.ones((*rows.shape[:-1], num_rows + 1), dtype=torch.bool, device=rows.device)
    hidden.scatter_(-1, torch.where(rows < 0, num_rows, rows), False)
    return hidden[..., None, :num_rows]
