"""Which rows of a cache mean something: ring addresses, final rows, and the committed prefix.

That bytes are there says nothing: rejected drafts leave theirs, a ring's rows are replaced by later
ones, a copied block has none until the copy has run. A row belongs to the committed prefix, which
later steps, a fork or a store may read, if four conditions hold together (`why_not_valid`).

The step that is being computed may read more, namely what it has itself written; that range is in
its plan and is not decided here.

Plain numbers: knows no tables, no storage, no devices; no torch. Invariant: a row is valid here if
and only if it has been written for good by its owner's own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from deepinfer.errors import check_int


class _Integers(Protocol):
    """An integer, or an array of them on host or device."""

    def __add__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __mod__(self, other: Any, /) -> Any: ...


Integers = TypeVar("Integers", bound=_Integers)


def ring_rows(state_ids: Integers, positions: Integers, ring_len: int) -> Integers:
    """The rows of `positions` in the rings of state slots, all rings seen as one array of rows.

        row = state_id * ring_len + position % ring_len

    Args:
        state_ids: of each position's request; an integer or an int array of numpy or torch.
        positions: from 0; same shape.
        ring_len: rows of a ring.
    """
    rows: Integers = state_ids * ring_len + positions % ring_len
    return rows


def ring_position(row: int, num_written: int, ring_len: int) -> int | None:
    """The position that a row of a ring holds after positions 0 to `num_written` were written.

    None if it was never written.
    """
    if row >= num_written:
        return None
    return num_written - 1 - (num_written - 1 - row) % ring_len


def final_rows(num_committed: int, ratio: int) -> int:
    """Compressed rows that no later token changes: those whose last token is committed."""
    check_int("ratio", ratio, 1)
    return num_committed // ratio


def closing_position(row: int, ratio: int) -> int:
    """The position whose token completes compressed row `row`; the row is final with it."""
    return (row + 1) * ratio - 1


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of one row, at one moment.

    Attributes:
        position: it holds; of a compressed row the last it covers (`closing_position`).
        num_committed: the request's processed tokens (`num_computed_tokens`).
        owned: the request holds the block or state slot, alone or through a pin.
        found: the position that its place was last written for: of a ring by the tag there or by
            `ring_position`, None = never written; of a paged row always `position`, for no other is
            written there.
        filled: every queued copy that fills the row has completed.
    """

    position: int
    num_committed: int
    owned: bool
    found: int | None
    filled: bool


def why_not_valid(row: Row) -> str | None:
    """Why a row may not be read as part of the committed prefix; None if it may."""
    if not row.owned:
        return "its block or state slot is not the request's"
    if not 0 <= row.position < row.num_committed:
        return f"position {row.position} is not below the {row.num_committed} processed tokens"
    if row.found != row.position:
        there = "nothing" if row.found is None else f"position {row.found}"
        return f"position {row.position} is not there any more, or not yet: {there} is"
    if not row.filled:
        return "the copy that fills it has not completed"
    return None
