"""Attention over several sets of rows equals one softmax over all of them."""

from __future__ import annotations

import torch

from deepinfer.models.hybrid.attention import softmax_over


def test_parts_share_one_softmax_with_the_sink() -> None:
    """Rows common to a sequence, rows of each query, hidden rows, and the sink, which adds nothing
    but to the sum."""
    torch.manual_seed(0)
    q, sink = torch.randn(2, 3, 4, 8), torch.randn(4)
    common, own = torch.randn(2, 5, 8), torch.randn(6, 2, 8)
    hide_common, hide_own = torch.rand(2, 3, 1, 5) < 0.4, torch.rand(2, 3, 1, 2) < 0.4
    ours = softmax_over(q, [(common, hide_common), (own, hide_own)], sink)
    rows = torch.cat([common[:, None].expand(2, 3, 5, 8), own.view(2, 3, 2, 8)], 2)
    scores = torch.einsum("nqhd,nqld->nqhl", q, rows)
    scores = scores.masked_fill(torch.cat([hide_common, hide_own], -1), -torch.inf).exp()
    weights = scores / (scores.sum(-1, keepdim=True) + sink.exp()[:, None])
    torch.testing.assert_close(ours, torch.einsum("nqhl,nqld->nqhd", weights, rows))


def test_a_query_may_see_nothing() -> None:
    """Then the sink has all the weight and the output is zero, not NaN."""
    q, rows = torch.randn(1, 1, 2, 4), torch.randn(1, 3, 4)
    hidden = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    assert not softmax_over(q, [(rows, hidden)], torch.zeros(2)).any()
