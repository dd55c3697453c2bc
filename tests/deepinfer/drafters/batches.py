"""Asks a drafter for many requests at once, from lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.drafters.base import Asked, Drafter

JUNK = 2**31 - 1  # no token, and no index of anything


def ask(
    drafter: Drafter,
    histories: Sequence[Sequence[int]],
    room: Sequence[int],
    *,
    slots: Sequence[int] | None = None,
    num_drafts: int | None = None,
    longest: int | None = None,
) -> list[list[int]]:
    """The proposals for requests of these histories, after checks of their form.

    Args:
        slots: theirs; 0, 1, ... if None.
        num_drafts, longest: as little as `room` and the histories allow if None.

    Everything of the tokens that is nobody's, columns behind `longest` among them, is junk.
    """
    slots = list(range(len(histories))) if slots is None else list(slots)
    lengths = [len(history) for history in histories]
    longest = max(lengths) if longest is None else longest
    num_drafts = max(1, *room) if num_drafts is None else num_drafts
    tokens = torch.full((max(slots) + 2, longest + 7), JUNK, dtype=torch.int32)
    for slot, history in zip(slots, histories, strict=True):
        tokens[slot, : len(history)] = torch.tensor(list(history), dtype=torch.int32)
    before = tokens.clone()
    asked = Asked(
        slots=torch.tensor(slots),
        tokens=tokens,
        lengths=torch.tensor(lengths),
        room=torch.tensor(list(room)),
        state_ids=torch.empty(0, dtype=torch.int64),
        num_drafts=num_drafts,
        longest=longest,
    )
    token_ids, counts = drafter.propose(asked)
    assert torch.equal(tokens, before)
    assert token_ids.dtype in (torch.int32, torch.int64)
    assert counts.dtype == torch.int64
    assert token_ids.shape[0] == len(histories)
    assert token_ids.shape[1] <= num_drafts
    assert counts.shape == (len(histories),)
    assert (counts >= 0).all()
    assert (counts <= asked.room.clamp(max=token_ids.shape[1])).all()
    # Valid behind the counts too.
    assert (token_ids >= 0).all()
    assert (token_ids < JUNK).all()
    return [row[:count] for row, count in zip(token_ids.tolist(), counts.tolist(), strict=True)]
