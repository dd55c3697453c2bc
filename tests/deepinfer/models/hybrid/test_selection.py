"""Selection: ties, hidden rows, candidate blocks."""

from __future__ import annotations

import pytest
import torch

from deepinfer.models.hybrid.selection import (
    best_rows,
    candidate_rows,
    hidden_but,
    index_scores,
    top_indices,
)

INF = float("inf")


@pytest.mark.parametrize("size", [40, 200])
def test_top_indices_are_those_of_a_stable_sort(size: int) -> None:
    """Also among many equal scores, negative ones, both zeros and infinities."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 4, (50, size), generator=generator).float() / 2
    scores[torch.rand(50, size, generator=generator) < 0.1] = -0.0
    scores[torch.rand(50, size, generator=generator) < 0.1] = -INF
    scores[:5, 7] = INF
    for k in (1, 7, size):
        expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(top_indices(scores, k), expected)
        assert torch.equal(top_indices(scores.double(), k), expected)


def test_scores_are_weighted_sums_of_relus() -> None:
    """Each head counts where its product is positive; hidden rows get -inf."""
    queries = torch.randn(2, 3, 4, 8)
    keys, weights = torch.randn(2, 5, 8), torch.randn(2, 3, 4)
    hidden = torch.rand(2, 3, 1, 5) < 0.3
    expected = torch.einsum("nqhd,nld->nqlh", queries, keys).relu() @ weights[..., None]
    expected = expected[..., 0].masked_fill(hidden[:, :, 0], -INF)
    torch.testing.assert_close(index_scores(queries, keys, weights, hidden), expected)


def test_fewer_rows_than_asked_for() -> None:
    """What is not visible is never selected; the rest of the row is -1."""
    scores = torch.tensor([[[1.0, -INF, 3.0, -INF]]])
    assert best_rows(scores, 3).tolist() == [[[2, 0, -1]]]
    assert best_rows(scores, 9).tolist() == [[[2, 0, -1, -1]]]
    hidden = hidden_but(torch.tensor([[[2, 0, -1]]]), 4)
    assert hidden.tolist() == [[[[False, True, False, True]]]]


@pytest.mark.parametrize(
    ("visible", "scores", "kept"),
    [
        (7, [0, 0, 9, 0, 5, 5, 1], [2, 3, 6]),  # the best block, and the newest
        (7, [0, 0, 9, 0, 5, 5, 99], [2, 3, 6]),  # the newest is the best: it counts once
        (4, [1, 1, 1, 1, -INF, -INF, -INF], [0, 1, 2, 3]),  # of equal blocks the first
        (1, [1, *[-INF] * 6], [0, 1]),  # no other block has a visible row
        (0, [-INF] * 7, []),
    ],
)
def test_candidates_are_the_best_blocks_and_the_newest(
    visible: int, scores: list[float], kept: list[int]
) -> None:
    """Two blocks of two rows out of seven."""
    found = candidate_rows(torch.tensor([[scores]]).float(), torch.tensor([[visible]]), 2, 2)
    assert found[0, 0].nonzero()[:, 0].tolist() == kept
