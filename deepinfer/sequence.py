"""What the engine remembers of each request: `Sequence` for one, `SequenceTable` for all running.

A running sequence has a row in the table. Counters are numpy arrays over the rows and block tables
are one int32 matrix, so a step touches all sequences with a handful of array operations, and Python
objects only where something changes (per-request objects cost other engines 1.5 to 45 us a request
and step).

    tokens of a row      t0 t1 ... t5 | t6        num_tokens = 7 (prompt + output)
    rows in the cache    k0 k1 ... k5 |           num_computed_tokens = 6
                                        ^ written by the step that computes t6

Knows neither pool nor scheduler. Invariants: num_computed <= num_tokens; positions >=
num_computed are never read as committed; a row's epoch changes when the row changes hands, so a
result planned for an older epoch is recognised as stale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.config import MIN_TEMPERATURE
from deepinfer.errors import UserError, is_int, is_number
from deepinfer.plan import Float32, Int32, Rows

NO_STOP_TOKEN = -1
CACHE_LINE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen.

    Attributes:
        max_tokens: most output tokens, >= 1.
        temperature: 0 = greedy; from `MIN_TEMPERATURE` on, Gumbel-max over logits / temperature.
        seed: of the request's noise; noise depends on (seed, position) only.
        stop_token_id: ends the request when sampled; None = run to `max_tokens`.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    stop_token_id: int | None = None

    def check(self, request_id: str) -> None:
        """Raise UserError for a value that could only fail later, in the middle of a step."""
        problem = None
        temperature, stop = self.temperature, self.stop_token_id
        if not is_int(self.max_tokens) or self.max_tokens < 1:
            problem = f"max_tokens {self.max_tokens!r}; expected an integer, at least 1"
        elif not is_number(temperature) or not (
            temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf
        ):
            problem = (
                f"temperature {temperature!r}; expected 0 (greedy) or a number from "
                f"{MIN_TEMPERATURE:g} on, finite"
            )
        elif not is_int(self.seed) or not -(2**63) <= self.seed < 2**63:
            problem = f"seed {self.seed!r} is not a 64-bit integer"
        elif stop is not None and (not is_int(stop) or not 0 <= stop < 2**31):
            problem = f"stop_token_id {stop!r}; expected a token id"
        if problem:
            raise UserError(f"request {request_id!r}: {problem}")


@dataclass(slots=True, eq=False)
class Sequence:
    """One request, from arrival to its end.

    While it runs, the truth about its tokens is in the table; `token_ids` and `logprobs` are
    brought up to date when it leaves its row.

    Attributes:
        request_id: unique among the engine's live requests.
        arrival: position in the order of arrival; waiting is in this order.
        token_ids: int32 [num_tokens], prompt and output so far.
        num_prompt_tokens: tokens that were given, not sampled for this request.
        logprobs: float32 [num_output_tokens].
        row: row in the sequence table, -1 while it has none.
        forked_table: int32, blocks a waiting fork has pinned; empty for all others.
        num_computed_tokens: rows of `forked_table` that are committed; 0 without one.
        num_written_tokens: how far the state that a fork takes over was ever written.
        state_id: its state slot; 0 = none.
        draft_slot: its draft slot; 0 = none.
        admission: position in the order in which rows were given.
        num_preemptions: times its blocks were taken back.
        num_failed_loads: times the store did not have what it had promised.
        block_keys: of its first full blocks, where blocks are found by what they hold.
    """

    request_id: str
    arrival: int
    token_ids: Int32
    num_prompt_tokens: int
    sampling: SamplingParams
    logprobs: Float32 = field(default_factory=lambda: np.empty(0, np.float32))
    row: int = -1
    forked_table: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    num_computed_tokens: int = 0
    num_written_tokens: int = 0
    state_id: int = 0
    draft_slot: int = 0
    admission: int = -1
    num_preemptions: int = 0
    num_failed_loads: int = 0
    block_keys: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far; of a running sequence, when it got its row."""
        return len(self.token_ids)

    @property
    def max_total_tokens(self) -> int:
        """Tokens it has when it ends by length."""
        return self.num_prompt_tokens + self.sampling.max_tokens


class RowCounters(NamedTuple):
    """The counters of some rows, gathered at one moment; int32 [S] each, copies."""

    num_tokens: Int32
    num_computed_tokens: Int32
    num_in_flight_tokens: Int32
    num_lookahead_slots: Int32
    num_blocks: Int32
    num_reserved_blocks: Int32
    max_total_tokens: Int32
    stop_token_ids: Int32
    epochs: Int32

    def blocks_needed(self, block_size: int) -> Int32:
        """ceil((length + in flight + lookahead) / block_size), or the reservation if it is more.

        `num_in_flight_tokens` counts for positions that the history does not show yet. A draft
        beyond the last position a request can use needs no slot, so this never exceeds what the
        request was accepted with.
        """
        length = self.num_tokens + self.num_in_flight_tokens
        length += self.num_lookahead_slots
        np.minimum(length, self.max_total_tokens - 1, out=length)
        length += block_size - 1
        length //= block_size
        np.maximum(length, self.num_reserved_blocks, out=length)
        return length


class SequenceTable:
    """Counters, tokens and block tables of all running sequences, by row.

    Args:
        max_num_seqs: rows.
        max_model_len: most tokens of a row.
        block_size: token positions per block.

    The counters are one int32 matrix [counter, row], so that one `gather` fetches all of a step's;
    each is also an array by row of its own:

        num_tokens            prompt and output
        num_computed_tokens   committed rows in the cache
        num_in_flight_tokens  scheduled, not committed
        num_lookahead_slots   positions reserved for drafts
        num_blocks            length of the block table
        num_reserved_blocks   kept even where fewer are needed
        max_total_tokens      where it ends by length
        stop_token_ids        where it ends by token, or NO_STOP_TOKEN
        epochs                changes when the row changes hands

    Beside them, for steps planned before the last result is known and for drafts, int32 [R] each:

        num_pending_tokens    tokens that steps in flight bring at most
        num_in_flight_drafts  drafts that steps in flight verify
        num_proposed_drafts   drafts that wait on the device, as of the last result
        num_written_tokens    how far the state was ever written, as of the last result: rejected
                              drafts too, rows planned for drafts that nobody proposed, and what
                              the parent of a fork had written in it

    and `temperature` float32 [R], `seeds` int64 [R], `state_ids` and `draft_slots` int32 [R],
    `num_published_blocks` int32 [R], how many of its blocks others can find, `token_ids` int32 and
    `logprobs` float32 [R, >= max_model_len], and `block_tables` int32 [R, max_blocks], 0 behind a
    table's last block. `sequences` object [R] has whoever owns each row, or None.
    `tables_version` changes with every change of a block table.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        rows, max_blocks = max_num_seqs, -(-max_model_len // block_size)
        self.block_size = block_size
        self._counters = np.zeros((len(RowCounters._fields), rows), np.int32)
        by_row = RowCounters(*self._counters)
        self.num_tokens = by_row.num_tokens
        self.num_computed_tokens = by_row.num_computed_tokens
        self.num_in_flight_tokens = by_row.num_in_flight_tokens
        self.num_lookahead_slots = by_row.num_lookahead_slots
        self.num_blocks = by_row.num_blocks
        self.num_reserved_blocks = by_row.num_reserved_blocks
        self.max_total_tokens = by_row.max_total_tokens
        self.stop_token_ids = by_row.stop_token_ids
        self.epochs = by_row.epochs
        self.num_pending_tokens = np.zeros(rows, np.int32)
        self.num_in_flight_drafts = np.zeros(rows, np.int32)
        self.num_proposed_drafts = np.zeros(rows, np.int32)
        self.num_written_tokens = np.zeros(rows, np.int32)
        self.temperature = np.zeros(rows, np.float32)
        self.seeds = np.zeros(rows, np.int64)
        self.state_ids = np.zeros(rows, np.int32)
        self.draft_slots = np.zeros(rows, np.int32)
        self.num_published_blocks = np.zeros(rows, np.int32)
        # Rows a power of two apart share a few cache sets, and the cells a step touches would evict
        # one another: a line of padding makes a step of 4096 rows a fifth cheaper.
        width = max_model_len + CACHE_LINE_TOKENS
        self.token_ids = np.zeros((rows, width), np.int32)
        self.logprobs = np.zeros((rows, width), np.float32)
        self.block_tables = np.zeros((rows, max_blocks), np.int32)
        self.sequences = np.full(rows, None, object)  # of Sequence | None
        self.tables_version = 0
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        """Rows a sequence could take now."""
        return len(self._free_rows)

    def at(self, row: int) -> Sequence:
        """The sequence that has the row."""
        seq = self.sequences[row]
        assert isinstance(seq, Sequence), f"row {row} belongs to nobody"
        return seq

    def names(self, rows: Rows) -> NDArray[np.object_]:
        """The request ids of running `rows`, object [n]."""
        return np.array([self.at(row).request_id for row in rows.tolist()], object)

    def gather(self, rows: Rows) -> RowCounters:
        """The counters of `rows`, intp [S], as they are now."""
        # Rows are valid; "clip" only spares the copy that numpy's own check would make.
        return RowCounters(*self._counters.take(rows, axis=1, mode="clip"))

    def gather_ahead(self, rows: Rows) -> RowCounters:
        """As `gather`, as they will be when all steps in flight have brought what they can.

        Of `rows` that go on after that: a request that goes on lacks at least one token.
        """
        counters = self.gather(rows)
        in_flight = counters.num_in_flight_tokens
        num_tokens = counters.num_tokens + self.num_pending_tokens[rows]
        np.minimum(num_tokens, counters.max_total_tokens - 1, out=num_tokens)
        return counters._replace(
            num_tokens=num_tokens,
            num_computed_tokens=np.minimum(
                counters.num_computed_tokens + in_flight, num_tokens - 1
            ),
            num_in_flight_tokens=np.zeros_like(in_flight),
        )

    def state_end(self, row: int) -> int:
        """How far the state of a row will ever have been written once nothing is in flight."""
        return int(self.state_ends(np.array([row], np.intp))[0])

    def state_ends(self, rows: Rows) -> Int32:
        """The same of each row, int32 [n]."""
        ends: Int32 = self.num_computed_tokens[rows] + self.num_in_flight_tokens[rows]
        return np.maximum(ends, self.num_written_tokens[rows])

    def num_sure_tokens(self, rows: Rows) -> Int32:
        """Tokens each row has at least when nothing is in flight any more, int32 [n].

        A step brings one for each sequence it samples, whatever becomes of its drafts.
        """
        brought = self.num_pending_tokens[rows] - self.num_in_flight_drafts[rows]
        sure: Int32 = self.num_tokens[rows] + brought
        return sure

    def num_unsure(self, rows: Rows, ahead: RowCounters) -> Int32:
        """How many positions before those of `gather_ahead` each row may be, int32 [n].

        So it is if all drafts in flight are rejected: then a step brings one token.
        """
        least = self.num_sure_tokens(rows) - 1
        samples = self.num_pending_tokens[rows] > 0
        unsure: Int32 = np.where(samples, ahead.num_computed_tokens - least, 0)
        return unsure

    def add(self, seq: Sequence, table: Int32, num_reserved_blocks: int = 0) -> int:
        """Give `seq` a row with `table` as its blocks; returns the row."""
        row = self._free_rows.pop()
        count, sampling = seq.num_tokens, seq.sampling
        self.num_tokens[row] = count
        self.num_computed_tokens[row] = seq.num_computed_tokens
        self.num_written_tokens[row] = seq.num_written_tokens
        self.max_total_tokens[row] = seq.max_total_tokens
        stop = sampling.stop_token_id
        self.stop_token_ids[row] = NO_STOP_TOKEN if stop is None else stop
        self.temperature[row] = sampling.temperature
        self.seeds[row] = sampling.seed
        self.state_ids[row] = seq.state_id
        self.draft_slots[row] = seq.draft_slot
        self.num_published_blocks[row] = 0
        self.token_ids[row, :count] = seq.token_ids
        self.logprobs[row, seq.num_prompt_tokens : count] = seq.logprobs
        self.block_tables[row, : len(table)] = table
        self.num_blocks[row] = len(table)
        self.num_reserved_blocks[row] = num_reserved_blocks
        self.tables_version += 1
        self.sequences[row] = seq
        seq.row = row
        return row

    def remove(self, seq: Sequence) -> Int32:
        """Take the row back and bring `seq` up to date; returns the blocks it had, int32."""
        row = seq.row
        count = int(self.num_tokens[row])
        seq.token_ids = self.token_ids[row, :count].copy()
        seq.logprobs = self.logprobs[row, seq.num_prompt_tokens : count].copy()
        table = self.shrink(row, 0)
        for counter in (
            *(self.num_in_flight_tokens, self.num_pending_tokens, self.num_in_flight_drafts),
            *(self.num_lookahead_slots, self.num_proposed_drafts),
        ):
            counter[row] = 0
        self.epochs[row] += 1
        self.sequences[row] = None
        self._free_rows.append(row)
        seq.row, seq.num_computed_tokens, seq.num_written_tokens = -1, 0, 0
        return table

    def table(self, row: int) -> Int32:
        """The block table of one row, int32 [num_blocks], a copy."""
        return self.block_tables[row, : self.num_blocks[row]].copy()

    def grow(self, rows: Rows, counts: Int32, ids: Int32) -> None:
        """Append `ids` to the tables, `counts[i]` of them to `rows[i]`, in order."""
        starts = np.cumsum(counts) - counts
        columns = np.arange(len(ids)) + np.repeat(self.num_blocks[rows] - starts, counts)
        self.block_tables[np.repeat(rows, counts), columns] = ids
        self.num_blocks[rows] += counts
        self.tables_version += 1

    def shrink(self, row: int, num_blocks: int) -> Int32:
        """Cut one table to `num_blocks`; returns the blocks cut off, in table order."""
        surplus = self.block_tables[row, num_blocks : self.num_blocks[row]].copy()
        self.block_tables[row, num_blocks : self.num_blocks[row]] = 0
        self.num_blocks[row] = num_blocks
        self.tables_version += 1
        return surplus

    def replace_block(self, row: int, column: int, block_id: int) -> None:
        """Point one table entry at another block."""
        self.block_tables[row, column] = block_id
        self.tables_version += 1


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` positions: ceil(num_tokens / block_size)."""
    return -(-num_tokens // block_size)
