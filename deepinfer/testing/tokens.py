"""A model of a network: it moves numbers that say which tokens a row stands for.

The row of position p holds one number for the tokens 0 ... p, as a KV row holds what the network
made of them. A step writes its rows, reads every row of its context, and derives the next token
from what it found there: a wrong row shows up as a count, and as a wrong answer, as it would with a
network. Implements `worker.Runner`; it knows plans alone, as they run.

Where requests have state, a slot is the smallest ring there can be: of the last positions written
it holds the number of each prefix. A step goes on from the number before its first token, token by
token, and its answer depends on where that led.

Drafts are the last tokens of a sequence that samples more than once: their rows are what follows
from them, right or wrong.

Knows nothing of who owns a block. Invariant: the same tokens give the same numbers and the same
answers in every process and on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from deepinfer.plan import Int32, StepPlan
from deepinfer.step_inputs import Sampled, StepInputs

EMPTY = 0  # what a row holds that was never written; no tokens have this number
_MASK = (1 << 61) - 1


def extend(prefix: int, token: int) -> int:
    """The number of a prefix with one token more; the empty prefix is `EMPTY`."""
    return ((prefix * 6364136223846793005 + token * 2 + 1) & _MASK) or 1


def prefixes(tokens: Iterable[int]) -> list[int]:
    """What the rows of these tokens hold."""
    rows, prefix = [], EMPTY
    for token in tokens:
        prefix = extend(prefix, token)
        rows.append(prefix)
    return rows


def next_token(rows: Sequence[int], vocab_size: int) -> int:
    """The token that follows a context, from all rows of it."""
    mixed = 0
    for row in rows:
        mixed = (mixed * 31 + row) & _MASK
    return (mixed ^ (mixed >> 29)) % vocab_size


class TokenRunner:
    """A pool of rows, and steps over them.

    Args:
        num_states: state slots, slot 0 included; 0 = requests have no state.
        max_rewind: positions that a ring holds beside the one before a step.

    Attributes:
        rows: what each slot holds, [num_blocks * block_size].
        states: what each state slot holds, [num_states][max_rewind + 1], position p at p % length.
        wrong_rows: rows, and rows of states, that a step read and that did not hold what belongs
            there.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        num_states: int = 0,
        max_rewind: int = 0,
    ) -> None:
        self.rows = [EMPTY] * (num_blocks * block_size)
        self.states = [[EMPTY] * (max_rewind + 1) for _ in range(num_states)]
        self.wrong_rows = 0
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._truth: dict[int, dict[int, list[int]]] = {}  # by step

    def expect(self, step: int, truth: dict[int, list[int]]) -> None:
        """By row of the sequence table, the rows that the sequences of a planned step must find.

        At least up to their drafts; more where the plan does not say how far it goes.
        """
        self._truth[step] = truth

    def slots(self, table: Sequence[int], num_rows: int) -> list[int]:
        """Where the first `num_rows` rows of a table are."""
        size = self._block_size
        return [table[row // size] * size + row % size for row in range(num_rows)]

    def count_wrong(self, table: Sequence[int], truth: list[int]) -> int:
        """How many of a table's first rows do not hold `truth`."""
        rows = self.rows
        found = [rows[slot] for slot in self.slots(table, len(truth))]
        return 0 if found == truth else sum(map(int.__ne__, found, truth))

    def copy_blocks(self, pairs: Int32) -> None:
        """Inside submitted work: see `worker.Runner`."""
        size, rows = self._block_size, self.rows
        contents = [rows[source * size : (source + 1) * size] for source, _ in pairs.tolist()]
        for (_, target), content in zip(pairs.tolist(), contents, strict=True):
            rows[target * size : (target + 1) * size] = content

    def copy_states(self, pairs: Int32) -> None:
        """Inside submitted work: see `worker.Runner`."""
        contents = [self.states[source][:] for source, _ in pairs.tolist()]
        for (_, target), content in zip(pairs.tolist(), contents, strict=True):
            self.states[target] = content

    def forward(self, inputs: StepInputs) -> Sampled:
        """Inside submitted work: see `worker.Runner`."""
        plan = inputs.plan
        assert inputs.back is None, "the plan says where its sequences are"
        rows, expected = self.rows, self._expected(plan)
        slots, starts = plan.slot_mapping.tolist(), plan.query_start.tolist()
        token_ids = plan.token_ids.tolist()
        for index, context in enumerate(expected):
            start, end = starts[index], starts[index + 1]
            first = len(context) - (end - start)
            row = context[first - 1] if first else EMPTY
            for slot, token in zip(slots[start:end], token_ids[start:end], strict=True):
                rows[slot] = row = extend(row, token)
        found = []
        for table, context in zip(plan.block_tables.tolist(), expected, strict=True):
            found.append([rows[slot] for slot in self.slots(table, len(context))])
            if found[-1] != context:
                self.wrong_rows += sum(map(int.__ne__, found[-1], context))
        states = self._go_on(plan, expected) if self.states else None
        tokens = []
        sampling = plan.sample_seq.tolist(), plan.sample_tokens.tolist()
        for index, token in zip(*sampling, strict=True):
            behind = starts[index + 1] - 1 - token  # drafts that this one comes before
            context = found[index][: len(found[index]) - behind]
            if states is not None:
                context.append(states[token])
            tokens.append(next_token(context, self._vocab_size))
        if not tokens:
            return Sampled()
        return Sampled(torch.tensor(tokens, dtype=torch.int32), torch.zeros(len(tokens)))

    def _expected(self, plan: StepPlan) -> list[list[int]]:
        """The rows of each sequence's context: the true ones, and what follows from its drafts."""
        truth = self._truth.pop(plan.step)
        num_drafts = np.bincount(plan.sample_seq, minlength=plan.num_seqs) - 1
        ends = plan.query_start[1:].tolist()
        expected = []
        for row, length, end, count in zip(
            plan.rows.tolist(), plan.context_lens.tolist(), ends, num_drafts.tolist(), strict=True
        ):
            drafts = plan.token_ids[end - max(count, 0) : end].tolist()
            context = truth[row][: length - len(drafts)]
            for token in drafts:
                context.append(extend(context[-1], token))
            expected.append(context)
        return expected

    def _go_on(self, plan: StepPlan, expected: list[list[int]]) -> list[int]:
        """Bring each sequence's state from before its first token to its last: one per token."""
        ends, counts = plan.context_lens.tolist(), plan.num_scheduled.tolist()
        tokens = iter(plan.token_ids.tolist())
        reached = []
        for slot, end, count, right in zip(
            plan.state_ids.tolist(), ends, counts, expected, strict=True
        ):
            ring, start = self.states[slot], end - count
            state = ring[(start - 1) % len(ring)] if start else EMPTY
            self.wrong_rows += start > 0 and state != right[start - 1]
            for position in range(start, end):
                state = extend(state, next(tokens))
                ring[position % len(ring)] = state
                reached.append(state)
        return reached


class TokenRows:
    """What transfers move in the pool of a runner. Implements `transfers.Rows`.

    Args:
        truth: by live request what its rows hold.
    """

    def __init__(self, runner: TokenRunner, truth: Mapping[str, list[int]]) -> None:
        self._runner, self._truth = runner, truth

    def committed(self, request_id: str, num_rows: int) -> list[int]:
        """What a request's committed rows hold."""
        return self._truth[request_id][:num_rows]

    def write(self, block_ids: Int32, num_rows: int, content: str) -> None:
        """Rows of a load hold numbers of its own."""
        slots = self._runner.slots(block_ids.tolist(), num_rows)
        for slot, row in zip(slots, _load_rows(content, num_rows), strict=True):
            self._runner.rows[slot] = row

    def read(self, block_ids: Int32, num_rows: int, content: str | list[int]) -> int:
        """Wrong ones among the first rows."""
        truth = _load_rows(content, num_rows) if isinstance(content, str) else content
        return self._runner.count_wrong(block_ids.tolist(), truth)


def _load_rows(name: str, num_rows: int) -> list[int]:
    return prefixes([-1, *name.encode(), *range(num_rows)])[-num_rows:]
