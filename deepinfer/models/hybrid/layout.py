"""Which rows every layer of one step reads and writes.

Sequences with the same number of tokens Q are computed together, in tiles of n sequences x q
queries: decodes are one tile with q = 1, a long chunk is several with n = 1. What a tile's queries
see of their windows:

    Q + window - 1 <= ring_len    the step's rows are written first, and all is read from the ring
    otherwise                     the ring as it was before the step, and the chunk's own rows:

        ring   ... s-3 s-2 s-1 |                s: first position of the chunk
        own                    | s s+1 ... e-1      [max(0, b-W+1), e) for queries [b, e)

What a step's tokens need of earlier tokens (an open group's projections, ids of an n-gram) is a
`Lookback`; what later steps will need of them is a `Kept`.

Data only; `deepinfer.models.hybrid.layout_builder` makes it of a plan. Where only the device knows
where sequences are, sizes are the plan's, and what may or may not be there is masked.

Invariant: the indices of one `Kept`, and of one `Closing.rows`, are distinct; but rows that do not
close after all are all written to row 0, which is of block 0, so nobody's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.models.hybrid.geometry import IDS, OPEN, STREAMS
from deepinfer.models.hybrid.layer_plan import Compressor
from deepinfer.plan import Ints

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Lookback:
    """Where the values of n wanted (sequence, position) pairs are.

    A token may have several series of values side by side, of which one is wanted. `tokens` and
    `old_rows` then count series: token * num_series + series.

    Attributes:
        tokens: int64 [n], the step's token; of another step: any.
        old: int64 [k], which of the n an earlier step had, or None if none; they are in row
            `old_rows` of state slot `old_slots`, int64 [k]. Where the host does not know which,
            bool [n], and of all n where they would be.
        missing: bool [n], which of the n lie before the start of their sequence; None if none.
        old_seqs, old_positions: of the k, on the host's side: indices into the step's sequences,
            and where in these; empty where it does not know.
        num_series: of each token's values.
    """

    tokens: Tensor
    old: Tensor | None
    old_slots: Tensor | None
    old_rows: Tensor | None
    missing: Tensor | None
    old_seqs: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    old_positions: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    num_series: int = 1

    def gather(self, new: Tensor, kept: Tensor) -> Tensor:
        """The n values, [n, width / num_series]; missing ones are any.

        Args:
            new: [T, width], of the step's tokens.
            kept: [num_slots, num_rows, width], before this step's are stored.
        """
        num = self.num_series
        found = new.view(len(new) * num, -1).index_select(0, self.tokens)
        if self.old is None:
            return found
        kept = kept.view(len(kept), kept.shape[1] * num, -1)
        earlier = kept[self.old_slots, self.old_rows].to(found.dtype)
        if self.old.dtype == torch.bool:
            return torch.where(self.old[:, None], earlier, found)
        return found.index_copy_(0, self.old, earlier)

    def old_of(self, kept: Tensor) -> Tensor:
        """Of `kept` [num_slots, num_rows], one value per token, those of the k old ones."""
        assert self.old_rows is not None, "none is old"
        return kept[self.old_slots, self.old_rows // self.num_series]


@dataclass(frozen=True, slots=True)
class Kept:
    """The last tokens of each sequence: `tokens` of the step go to `rows` of state slots `slots`.

    All int64 [k], `tokens` a slice if it can be one; `num_rows` are in each slot.
    """

    tokens: slice | Tensor
    slots: Tensor
    rows: Tensor
    num_rows: int

    def of(self, x: Tensor) -> Tensor:
        """[k, ...] of `x` [T, ...], which may be a view."""
        return x[self.tokens] if isinstance(self.tokens, slice) else x.index_select(0, self.tokens)


@dataclass(frozen=True, slots=True)
class Closing:
    """The C compressed rows of one kind of compressor that the step makes.

    Some of them may be of groups that do not close, where the host does not know: these are made of
    any tokens.

    Attributes:
        rows: int64 [C], where they go: block * rows_per_block + row; 0 if they do not close.
        positions: int64 [C], of their rotation: the first token of each group.
        members: of C * span tokens; with overlap those of two groups, and one of the two series of
            each (`layers.Pool`). None if no row closes, or for ratio 1 without a gate, whose rows
            are the step's tokens in order.
        phases: int64 [T], place of each token in its group.
        kept: what of the step's projections later groups need; None without a gate.
    """

    rows: Tensor
    positions: Tensor
    members: Lookback | None
    phases: Tensor
    kept: Kept | None


@dataclass(frozen=True, slots=True)
class RowsOf:
    """What a tile sees of the compressed rows of one ratio.

    Attributes:
        num_rows: L, no query sees more, > 0.
        blocks: int64 [n, b], the blocks that hold them, in order of rows.
        places: int64 [n, at least L], where each row is stored: block * rows_per_block + row.
        visible: int64 [n, q], rows each query sees.
        hidden: bool [n, q, 1, L], True where a row is not visible to a query.
    """

    num_rows: int
    blocks: Tensor
    places: Tensor
    visible: Tensor
    hidden: Tensor

    def places_of(self, rows: Tensor) -> Tensor:
        """Where compressed rows, int64 [n, ...], are stored; those < 0 read row 0."""
        return self.places.gather(1, rows.clamp(min=0).flatten(1)).view(rows.shape)


@dataclass(frozen=True, slots=True)
class RingRead:
    """Rings that a tile's queries see.

    Attributes:
        before: read before this step's rows are written.
        hidden: bool [n, q, 1, ring_len], True where a row is not in a query's window, or not the
            row of that position.
    """

    before: bool
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Rows of the chunk itself: k `tokens` per sequence; `hidden` bool [1, q, 1, k]."""

    tokens: slice | Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """n sequences x q queries.

    Attributes:
        tokens: int64 [n * q] or a slice, the queries among the step's tokens.
        slots: int64 [n], state slots; a slice, if it can be one, where the step's own rows are in
            the rings by the time they are read.
        rows: by ratio; without the ratios of which no query sees a row.
    """

    tokens: slice | Tensor
    num_seqs: int
    num_queries: int
    slots: slice | Tensor
    ring: RingRead | None
    own: OwnRows | None
    rows: dict[int, RowsOf]

    def of(self, x: Tensor) -> Tensor:
        """The tile's part of `x` [T, ...]: [n, q, ...]."""
        part = x[self.tokens]
        return part.view(self.num_seqs, self.num_queries, *x.shape[1:])


@dataclass(frozen=True, slots=True)
class RingTags:
    """The tags of the rings read, on the host's side: what must be found where.

    Attributes:
        seqs: int64 [n], indices into the step's sequences.
        wanted: int64 [n, ring_len], the position each ring row must hold.
        read: bool [n, ring_len], whether anybody reads it. Both empty where the host does not know
            (`StepLayout.asked_tags`).
        before: read before this step's rows are written.
    """

    seqs: Ints
    wanted: Ints
    read: Bools
    before: bool


@dataclass(frozen=True, slots=True)
class RowsRead:
    """Compressed rows that sequences read in a step, on the host's side.

    Attributes:
        ratio: of the rows.
        seqs: int64 [n], indices into the step's sequences.
        visible: int64 [n], rows that the last query of each sees; none sees more.
        rows: where they are.
    """

    ratio: int
    seqs: Ints
    visible: Ints
    rows: RowsOf


@dataclass(slots=True)
class StepLayout:
    """What all layers of one step share. `token_ids`, `positions`: int64 [T].

    `ids`: of each token's own and the ones before it. `streams`: of the token before each of
    `window.tokens`. Both with what of the step's own is kept.

    `found_tags`: int64 [n, ring_len] for each of `tags`, position + 1 of what the ring rows hold.
    `asked_tags`: the same of the positions that are read, -1 where none is; empty where `tags` has
    them.
    """

    token_ids: Tensor
    positions: Tensor
    window: Kept
    closings: dict[Compressor, Closing]
    ids: Lookback | None
    kept_ids: Kept | None
    streams: Lookback | None = None
    kept_streams: Kept | None = None
    tiles: list[Tile] = field(default_factory=list)
    tags: list[RingTags] = field(default_factory=list)
    found_tags: list[Tensor] = field(default_factory=list)
    asked_tags: list[Tensor] = field(default_factory=list)
    rows_read: list[RowsRead] = field(default_factory=list)

    @property
    def beside_rings(self) -> list[tuple[str, Lookback | None, Kept]]:
        """What lies in state slots beside the rings: by kind of region what the step reads of
        earlier steps, if anything, and what of its own it then leaves there."""
        parts = [(OPEN, closing.members, closing.kept) for closing in self.closings.values()]
        parts += [(IDS, self.ids, self.kept_ids), (STREAMS, self.streams, self.kept_streams)]
        return [(kind, back, kept) for kind, back, kept in parts if kept]
