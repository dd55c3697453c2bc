"""Whether a plan may go to the device: tables that cover it, slots that are its own.

Compares a `StepPlan` with the sequence table it was made from and with the books, and what ran in
its place with what is known by then. Knows no
scheduler rule: what a plan wants to do is its own choice, where it does it is not. Invariant: a
contradiction is found on the host, before any device work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from deepinfer.checks.ledger import Index
from deepinfer.plan import PLACEHOLDER, StepPlan
from deepinfer.sequence import SequenceTable

Contradiction = tuple[tuple[object, ...], str]  # what it is about, and in words


class PlanCheck:
    """One plan held against the tables.

    Args:
        refs: int32 [num_blocks], owners of each block.
        filled: int32 [num_blocks], rows of each block written since it was handed out; None if
            nobody told.
        name: the request id of a row.
    """

    def __init__(
        self,
        plan: StepPlan,
        seqs: SequenceTable,
        refs: NDArray[np.int32],
        filled: NDArray[np.int32] | None,
        name: Callable[[int], str],
    ) -> None:
        self._plan = plan
        self._seqs = seqs
        self._refs = refs
        self._filled = filled
        self._name = name
        self._size = seqs.block_size
        sources = np.concatenate([np.empty(0, np.int32), *plan.copy_sources]).astype(np.intp)
        self._pending = np.bincount(sources[sources >= 0], minlength=len(refs))[: len(refs)]

    def contradictions(self) -> Iterator[Contradiction]:
        """All that is wrong with the plan."""
        broken = [*self._sizes(), *self._tables()]
        yield from broken
        if not broken:  # what follows relies on sizes and tables
            yield from self._positions()
            yield from self._tokens()
            yield from self._slots()
            yield from self._rows_read()
        yield from self._copies()

    def _tokens(self) -> Iterator[Contradiction]:
        """The tokens computed are those that the requests have at these positions."""
        plan, seqs = self._plan, self._seqs
        rows = plan.rows.repeat(plan.num_scheduled)
        inside = (plan.positions >= 0) & (plan.positions < seqs.token_ids.shape[1])
        known = seqs.token_ids[rows, np.where(inside, plan.positions, 0)]
        wrong = inside & (plan.token_ids != known)
        if plan.ahead is not None:  # the host does not know the others, and says so
            unknown = plan.positions >= seqs.num_tokens[rows]
            wrong = np.where(unknown, plan.token_ids != PLACEHOLDER, wrong)
        for at in np.flatnonzero(wrong).tolist():
            row = int(rows[at])
            yield (
                ("token", row),
                f"position {int(plan.positions[at])} of {self._name(row)} is computed with token "
                f"{int(plan.token_ids[at])}; its token there is {int(known[at])}",
            )

    def _sizes(self) -> Iterator[Contradiction]:
        """As many positions and slots as tokens were scheduled."""
        plan = self._plan
        counts = {len(plan.positions), len(plan.slot_mapping), int(plan.num_scheduled.sum())}
        ends = [0, *np.cumsum(plan.num_scheduled).tolist()]
        if len(counts) > 1 or plan.query_start.tolist() != ends:
            yield ("sizes",), f"{sorted(counts)} tokens, positions and slots in one plan"

    def _tables(self) -> Iterator[Contradiction]:
        """The plan's tables are those of its rows, padded with 0, and long enough."""
        plan, seqs = self._plan, self._seqs
        width = plan.block_tables.shape[1]
        expected = np.zeros_like(plan.block_tables)
        known = seqs.block_tables[plan.rows, :width]
        expected[:, : known.shape[1]] = known
        different = (plan.block_tables != expected).any(1) | (seqs.num_blocks[plan.rows] > width)
        for i in np.flatnonzero(different).tolist():
            row = int(plan.rows[i])
            yield (
                ("stale table", row),
                f"the plan has table {trimmed(plan.block_tables[i])} for {self._name(row)}, "
                f"which has {seqs.table(row).tolist()}",
            )
        strange = (plan.block_tables < 0) | (plan.block_tables >= len(self._refs))
        for i in np.flatnonzero(strange.any(1)).tolist():
            row = int(plan.rows[i])
            yield (
                ("no block", row),
                f"the table of {self._name(row)} is {trimmed(plan.block_tables[i])}; ids run from "
                f"1 to {len(self._refs) - 1}",
            )
        num_needed = -(-plan.context_lens // self._size)
        for i in np.flatnonzero(seqs.num_blocks[plan.rows] < num_needed).tolist():
            row = int(plan.rows[i])
            yield (
                ("short table", row),
                f"{self._name(row)} has {int(seqs.num_blocks[row])} blocks for "
                f"{int(plan.context_lens[i])} positions of {self._size} a block",
            )

    def _positions(self) -> Iterator[Contradiction]:
        """Each row goes on where its committed rows, and those in flight, end."""
        plan = self._plan
        computed = self._seqs.num_computed_tokens[plan.rows]
        if plan.ahead is not None:
            computed = self._seqs.gather_ahead(plan.rows).num_computed_tokens
        starts = plan.context_lens - plan.num_scheduled
        first = plan.positions[plan.query_start[:-1]]
        for i in np.flatnonzero((starts != computed) | (first != computed)).tolist():
            row = int(plan.rows[i])
            yield (
                ("position", row),
                f"{self._name(row)} has {int(computed[i])} committed rows, and the plan computes "
                f"from position {int(first[i])} to {int(plan.context_lens[i]) - 1}",
            )

    def _slots(self) -> Iterator[Contradiction]:
        """Each token's slot is the one of its position, and its block is nobody else's."""
        plan = self._plan
        columns, offsets = np.divmod(plan.positions, self._size)
        at = plan.token_seqs
        inside = columns < plan.block_tables.shape[1]
        blocks = plan.block_tables[at, np.where(inside, columns, 0)].astype(np.intp)
        expected = np.where(inside, blocks * self._size + offsets, -1)
        for token in np.flatnonzero(plan.slot_mapping != expected).tolist():
            row = int(plan.rows[at[token]])
            yield (
                ("slot", row),
                f"position {int(plan.positions[token])} of {self._name(row)} goes to slot "
                f"{int(plan.slot_mapping[token])}; by its table it is slot {int(expected[token])}",
            )
        written = plan.slot_mapping
        if len(np.unique(written)) < len(written):
            twice = np.flatnonzero(np.bincount(written[written >= 0]) > 1).tolist()
            yield ("slot twice", *twice), f"slots {twice} are written twice in one step"
        owners = self._refs[blocks] - self._pending[blocks]
        for token in np.flatnonzero((owners != 1) & (blocks != 0)).tolist():
            row, block_id = int(plan.rows[at[token]]), int(blocks[token])
            yield (
                ("shared", row, block_id),
                f"{self._name(row)} writes block {block_id} of {int(self._refs[block_id])} owners, "
                f"{int(self._pending[block_id])} of which only await their copy",
            )

    def _rows_read(self) -> Iterator[Contradiction]:
        """The committed rows were written, by a step or a copy, since the block was handed out."""
        if self._filled is None:
            return
        plan = self._plan
        filled = self._filled.copy()
        pairs = plan.block_copies.astype(np.intp)
        filled[pairs[:, 1]] = filled[pairs[:, 0]]
        starts = np.arange(plan.block_tables.shape[1], dtype=np.int32) * self._size
        committed = plan.context_lens - plan.num_scheduled
        needed = np.clip(committed[:, None] - starts, 0, self._size)
        for i, column in np.argwhere(filled[plan.block_tables] < needed).tolist():
            row, block_id = int(plan.rows[i]), int(plan.block_tables[i, column])
            yield (
                ("unwritten", row),
                f"{self._name(row)} reads {int(needed[i, column])} rows of block {block_id}; "
                f"{int(filled[block_id])} were written since it was handed out",
            )

    def _copies(self) -> Iterator[Contradiction]:
        """A copy goes from a block still owned for it to one of a single owner, each its own."""
        copies = self._plan.block_copies.astype(np.intp)
        if not len(copies):
            return
        if copies.min() <= 0 or copies.max() >= len(self._refs):
            yield (
                ("copy ids",),
                f"{copies.tolist()} are copied; ids run from 1 to {len(self._refs) - 1}",
            )
            return
        sources, destinations = copies.T
        twice = np.flatnonzero(np.bincount(destinations) > 1).tolist()
        if twice:
            yield ("copied twice", *twice), f"blocks {twice} are copied to twice in one step"
        both = np.intersect1d(sources, destinations).tolist()
        if both:
            yield ("copy chain", *both), f"blocks {both} are copied from and to in one step"
        for source in np.unique(sources[self._pending[sources] == 0]).tolist():
            yield (
                ("copy source", source),
                f"block {source} is copied, and nobody holds it until the copy is done",
            )
        for block_id in destinations[self._refs[destinations] != 1].tolist():
            yield (
                ("copy to", block_id),
                f"block {block_id} of {int(self._refs[block_id])} owners is copied to",
            )


def what_ran(
    plan: StepPlan, seqs: SequenceTable, name: Callable[[int], str]
) -> Iterator[Contradiction]:
    """What is wrong with a step as it really ran, by what is known when its result arrives.

    All steps before it are committed by then, so only its drafts are tokens the host does not know.
    """
    alive = seqs.epochs[plan.rows] == plan.epochs
    first = plan.positions[plan.query_start[:-1]]
    computed = seqs.num_computed_tokens[plan.rows]
    for i in np.flatnonzero(alive & (first != computed)).tolist():
        row = int(plan.rows[i])
        yield (
            ("ran from", row),
            f"{name(row)} has {int(computed[i])} committed rows, and the step computed from "
            f"position {int(first[i])} on",
        )
    rows = plan.rows.repeat(plan.num_scheduled)
    is_known = alive.repeat(plan.num_scheduled) & (plan.positions < seqs.num_tokens[rows])
    known = seqs.token_ids[rows, plan.positions]
    for at in np.flatnonzero(is_known & (plan.token_ids != known)).tolist():
        row = int(rows[at])
        yield (
            ("ran with", row),
            f"position {int(plan.positions[at])} of {name(row)} was computed with token "
            f"{int(plan.token_ids[at])}; its token there is {int(known[at])}",
        )


def trimmed(table: NDArray[np.int32]) -> list[int]:
    """A table without the zeros at its end."""
    ids: list[int] = table[: int(np.max(np.flatnonzero(table), initial=-1)) + 1].tolist()
    return ids


def first_of(ids: Index, count: int = 8) -> str:
    """The first few ids in words."""
    shown = ", ".join(map(str, ids[:count].tolist()))
    return shown if len(ids) <= count else f"{shown} and {len(ids) - count} more"
