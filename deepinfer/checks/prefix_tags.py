"""The tag that each KV row must carry: whose row it is and where, known on the host.

The tag of position p of a request with tokens t[0], t[1], ... is one int64:

    bits 63 ... 20   of the sum, modulo 2^64, of mix(t[i], i) over i = 0 ... p
    bits 19 ... 0    p + 1

so a tag tells the position, and two requests have the same tag where they have the same tokens up
to there: then the rows are the same too. Other prefixes collide once in 2^44. 0 is the tag of a row
that was never written.

Knows no device: `deepinfer.checks.row_tags` and `deepinfer.models.hybrid.tags` keep the tags beside
the rows and compare.
Invariant: behind the positions a row's tags are known for, its cells are 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import UserError
from deepinfer.plan import Int32, Int64, Rows, StepPlan, WrongRows
from deepinfer.sequence import SequenceTable

POSITION_BITS = 20
MAX_POSITIONS = 1 << POSITION_BITS
NUM_ENDED = 64  # requests remembered beyond their end, to name the owner of a row found

UInt64 = NDArray[np.uint64]
Names = Callable[[Rows], NDArray[np.object_]]

_POSITION_MASK = np.uint64(MAX_POSITIONS - 1)


@dataclass(frozen=True, slots=True)
class _Ended:
    """The tags, int64 [n], of a request that has left its row."""

    request_id: str
    row: int
    epoch: int
    tags: Int64


class PrefixTags:
    """The tags of the known tokens of all rows of a sequence table, brought up to date when asked.

    Args:
        names: the request ids of running rows.

    Raises UserError if `max_model_len` has more positions than a tag can tell.
    """

    def __init__(self, seqs: SequenceTable, max_model_len: int, names: Names) -> None:
        if max_model_len > MAX_POSITIONS:
            raise UserError(
                f"max_model_len: {max_model_len}; expected at most {MAX_POSITIONS} where rows are "
                "tagged",
                hint="leave `tags` out of checks, or lower max_model_len",
            )
        num_rows = len(seqs.num_tokens)
        self._seqs, self._names = seqs, names
        self._tags = np.zeros(seqs.token_ids.shape, np.int64)
        self._sums = np.zeros(num_rows, np.uint64)  # over the positions known
        self._num_known = np.zeros(num_rows, np.int32)
        self._epochs = seqs.epochs.copy()
        self._ended: deque[_Ended] = deque(maxlen=NUM_ENDED)

    def up_to(
        self, rows: Rows, epochs: Int32, context_lens: Int32, width: int | None = None
    ) -> tuple[Int64, UInt64]:
        """The tags of the first `context_lens` positions of `rows`, a fresh array.

        Args:
            rows: intp [S], distinct.
            epochs: int32 [S], as the table has them.
            context_lens: int32 [S], >= 1 each; so many tokens are known.
            width: of the result, where more than the longest context is wanted.

        Returns:
            int64 [S, width], 0 behind each context; and uint64 [S], from which `go_on` makes the
            tags of further tokens.
        """
        known = self._num_known[rows]
        stale = (self._epochs[rows] != epochs) | (known > context_lens)
        if np.count_nonzero(stale):
            for row in rows[stale].tolist():
                self._forget(row)
            known = self._num_known[rows]
        missing = context_lens - known
        one = missing == 1
        if np.count_nonzero(one) == len(rows):
            self._append(rows, known)
        else:
            self._append(rows[one], known[one])
            for index in np.flatnonzero(missing > 1).tolist():
                self._extend(int(rows[index]), int(known[index]), int(context_lens[index]))
        longest = int(context_lens.max()) if width is None else width
        return self._tags[rows, :longest], self._sums[rows]

    def ended(self, row: int, request_id: str) -> None:
        """A request is about to leave its row: keep its tags, to name it by."""
        if self._epochs[row] == self._seqs.epochs[row]:
            tags = self._tags[row, : self._num_known[row]].copy()
            self._ended.append(_Ended(request_id, row, int(self._epochs[row]), tags))
        self._forget(row)

    def describe(self, plan: StepPlan, wrong: WrongRows) -> Iterator[str]:
        """A sentence for each of the first wrong rows, naming whose row was read instead."""
        assert plan.tags is not None, "rows were compared"
        places = wrong.places or [""] * len(wrong.seqs)
        columns = (column.tolist() for column in (wrong.seqs, wrong.positions, wrong.found))
        for seq, position, found, in_slot in zip(*columns, places, strict=True):
            row, epoch = int(plan.rows[seq]), int(plan.epochs[seq])
            block_size = self._seqs.block_size
            if in_slot:
                place, expected = f"position {position} ({in_slot})", "its own row"
            elif position < plan.context_lens[seq]:
                block = int(plan.block_tables[seq, position // block_size])
                place, expected = f"position {position} (block {block})", "its own row"
            else:
                place, expected = "padding (block 0)", "a row never written"
            yield (
                f"request {self._reader(row, epoch)!r} {place}: expected {expected}, "
                f"found {self._owner(found, row)}"
            )

    # -- tags ------------------------------------------------------------------------------------

    def _append(self, rows: Rows, positions: Int32) -> None:
        """One position more for each of `rows`, intp [n]."""
        sums = self._sums[rows]
        sums += _mix(self._seqs.token_ids[rows, positions], positions)
        self._sums[rows] = sums
        self._tags[rows, positions] = _tags_of(sums, positions)
        self._num_known[rows] = positions + 1

    def _extend(self, row: int, start: int, end: int) -> None:
        """The positions `start` to `end` of one row."""
        sums = _sums(self._sums[row], start, self._seqs.token_ids[row, start:end])
        self._sums[row] = sums[-1]
        self._tags[row, start:end] = _tags_of(sums, np.arange(start, end, dtype=np.int32))
        self._num_known[row] = end

    def _forget(self, row: int) -> None:
        self._tags[row, : self._num_known[row]] = 0
        self._sums[row] = self._num_known[row] = 0
        self._epochs[row] = self._seqs.epochs[row]

    # -- names -----------------------------------------------------------------------------------

    def _reader(self, row: int, epoch: int) -> str:
        """Who had the row in that epoch."""
        if self._seqs.epochs[row] == epoch:
            return self._name(row)
        past = (e.request_id for e in self._ended if (e.row, e.epoch) == (row, epoch))
        return next(past, "?")

    def _owner(self, tag: int, reader: int) -> str:
        """Whose row has the tag, in words; of several with the same prefix the reader, or any."""
        if not tag:
            return "a row never written"
        position = (tag & (MAX_POSITIONS - 1)) - 1
        where = f"position {position}"
        if 0 <= position < self._tags.shape[1]:
            rows = np.flatnonzero(self._tags[:, position] == tag)
            rows = rows[self._epochs[rows] == self._seqs.epochs[rows]]
            if len(rows):
                row = reader if reader in rows else int(rows[0])
                return f"the row of request {self._name(row)!r} {where}"
        for past in reversed(self._ended):
            if position < len(past.tags) and past.tags[position] == tag:
                return f"the row of request {past.request_id!r}, which has ended, {where}"
        return f"an unknown row of {where}"

    def _name(self, row: int) -> str:
        return str(self._names(np.array([row], np.intp))[0])


def go_on(tag_sum: np.uint64, start: int, token_ids: Int32) -> Int64:
    """The tags of tokens from position `start` on, int64 [n]; `tag_sum` is of all before."""
    positions = np.arange(start, start + len(token_ids), dtype=np.int32)
    return _tags_of(_sums(tag_sum, start, token_ids), positions)


def _sums(tag_sum: np.uint64, start: int, token_ids: Int32) -> UInt64:
    """The sums up to each of the tokens from position `start` on, uint64 [n]."""
    mixed = _mix(token_ids, np.arange(start, start + len(token_ids), dtype=np.int32))
    mixed[:1] += tag_sum
    sums: UInt64 = np.cumsum(mixed, dtype=np.uint64)
    return sums


def _mix(token_ids: Int32, positions: Int32) -> UInt64:
    """A hash of each (token, position), uint64 [n]: splitmix64 (G. Steele and others, 2014)."""
    mixed = token_ids.astype(np.uint64)
    mixed <<= np.uint64(32)
    mixed += positions.astype(np.uint64)
    mixed += np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _tags_of(sums: UInt64, positions: Int32) -> Int64:
    tags = sums & ~_POSITION_MASK
    tags |= (positions + 1).astype(np.uint64)
    return tags.view(np.int64)
