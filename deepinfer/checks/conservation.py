"""Conservation of blocks: tables, plans and requests add up after every call.

What holds for any pool is checked by `pool`, what the caller is told by `told`; here are the
holders of blocks, counted from tables and pins, the plan, and the counters of requests. Knows no
policy. Invariant: as of `PoolChecker`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from deepinfer.checks.findings import Findings
from deepinfer.checks.host import Host
from deepinfer.checks.plans import Contradiction, PlanCheck, what_ran
from deepinfer.checks.pool import PoolChecker
from deepinfer.checks.slots import SlotChecker
from deepinfer.checks.told import Record, ToldChecker
from deepinfer.observer import KV, Access, BlockIds
from deepinfer.plan import Int32, StepPlan
from deepinfer.sequence import Sequence as Request
from deepinfer.sequence import blocks_for

Holder = Callable[[], Iterable[BlockIds]]


class ConservationChecker(PoolChecker):
    """Follows every change, looks at every plan (`planned`) and after every call (`settled`).

    Attributes:
        others: clients that hold pins of their own; each gives the blocks it holds now. A hook: an
            engine has no such clients itself.
        states: the checker of state slots; silent where the host has none.
    """

    states: SlotChecker

    def __init__(self, block_size: int, findings: Findings) -> None:
        super().__init__(findings, "block")
        self.states = SlotChecker(findings)
        self._told = ToldChecker(findings)
        self.others: list[Holder] = []
        self._block_size = block_size
        self._newest = -1  # arrival of the last request looked at
        self._in_flight: deque[StepPlan] = deque()  # oldest first

    def bind(self, host: Host) -> None:
        """Whose requests and blocks these are."""
        self.watch(host, host.blocks, host.release, host.config.num_blocks)
        self._filled = np.zeros(self.num_blocks, np.int32)  # rows written in this epoch
        self._sees_writes = False
        self._has_states = host.states is not None
        if self._has_states:
            self.states.bind(host)

    def allocated(self, ids: BlockIds) -> None:
        """As of any pool; what is in a block now is nothing its owner wrote."""
        super().allocated(ids)
        self._filled[self.usable(ids)] = 0

    def submitted(
        self, stream: str, label: str, reads: Sequence[Access], writes: Sequence[Access]
    ) -> None:
        """Rows written count as filled, up to the last one."""
        for access in writes:
            if access.kind == KV:
                self._sees_writes = True
                inside = (access.ids > 0) & (access.ids < self.num_blocks)
                end = self._block_size if access.end is None else access.end[inside]
                np.maximum.at(self._filled, access.ids[inside].astype(np.intp), end)

    def release_point(self) -> None:
        """The caller's records are taken back."""
        self._told.taken_back(self.host.num_steps)

    # -- what must hold --------------------------------------------------------------------------

    def told(self, step: int, record: Record) -> None:
        """The record of a step is the caller's until the next release point."""
        self._told.told(step, record)

    def planned(self, plan: StepPlan) -> None:
        """The plan stays inside what its requests own."""
        filled = self._filled if self._sees_writes else None
        check = PlanCheck(plan, self.host.seqs, self.refs, filled, self._name)
        self._report("plan", plan.step, check.contradictions())
        self._in_flight.append(plan)
        self._report("holders", plan.step, self._holders(plan.copy_sources))
        if self._has_states:
            self.states.planned(plan)

    def collected(self, step: int) -> None:
        """The step is in flight no longer."""
        while self._in_flight and self._in_flight[0].step <= step:
            self._in_flight.popleft()

    def ran(self, plan: StepPlan) -> None:
        """A step came back, and is not committed: it went on where its requests were.

        `plan`: as it really ran; of one that left nothing open all was said when it was planned.
        """
        if plan.ahead is not None:
            self._report("step", plan.step, what_ran(plan, self.host.seqs, self._name))

    def settled(self, step: int) -> None:
        """Everything adds up."""
        self._report("counters", step, self._counters())
        self._report("holders", step, self._holders(()))
        self._report("fences", step, self._fences())
        self._report("requests", step, self._requests())
        if self._has_states:
            self.states.settled(step)

    def _holders(self, pending: Sequence[Int32]) -> Iterator[Contradiction]:
        """Each block has as many owners as there are tables and pins that name it; no table has a
        hole in it, or an id behind its end."""
        host, seqs = self.host, self.host.seqs
        rows = np.array([seq.row for seq in host.running], np.intp)
        lengths = seqs.num_blocks[rows]
        tables = seqs.block_tables[rows, : int(lengths.max(initial=0)) + 1]
        inside = np.arange(tables.shape[1]) < lengths[:, None]
        held = tables[inside]
        wrong = np.where(inside, (tables <= 0) | (tables >= self.num_blocks), tables != 0).any(1)
        for row in rows[wrong].tolist():
            yield (
                ("table", row),
                f"the table of {self._name(row)}, {int(seqs.num_blocks[row])} blocks long, is "
                f"{seqs.block_tables[row].tolist()}",
            )
        parts = [held, *pending, *(ids for other in self.others for ids in other())]
        parts += [seq.forked_table for seq in host.waiting if len(seq.forked_table)]
        yield from self._held(parts)

    def _requests(self) -> Iterator[Contradiction]:
        """Counters of requests fit together, and whoever waits can run some day."""
        seqs, waiting = self.host.seqs, self.host.waiting
        rows = np.array([seq.row for seq in self.host.running], np.intp)
        counters = seqs.gather(rows)
        wrong = counters.num_computed_tokens > counters.num_tokens
        for i in np.flatnonzero(wrong).tolist():
            row = int(rows[i])
            yield (
                ("counters", row),
                f"{self._name(row)} has {int(counters.num_tokens[i])} tokens and "
                f"{int(counters.num_computed_tokens[i])} committed rows",
            )
        yield from self._what_is_in_flight(rows)
        for seq in waiting:
            if seq.num_computed_tokens > len(seq.forked_table) * self._block_size:
                yield (
                    ("computed", seq.request_id),
                    f"{seq.request_id!r} waits with {seq.num_computed_tokens} committed rows in "
                    f"{len(seq.forked_table)} blocks",
                )
        for seq in reversed(waiting):  # by arrival; who was accepted once stays so
            if seq.arrival <= self._newest:
                break
            if self._never_fits(seq):
                self._add(f"{seq.request_id!r} waits, and can never fit this pool")
        self._newest = max(self._newest, waiting[-1].arrival if waiting else -1)

    def _what_is_in_flight(self, rows: NDArray[np.intp]) -> Iterator[Contradiction]:
        """Each request counts what the steps in flight compute, bring and verify for it."""
        seqs = self.host.seqs
        expected = np.zeros((3, len(seqs.epochs)), np.int32)
        for plan in self._in_flight:
            alive = seqs.epochs[plan.rows] == plan.epochs
            expected[0, plan.rows] += np.where(alive, plan.num_scheduled, 0)
            if plan.ahead is not None:
                expected[1, plan.rows] += np.where(alive, plan.ahead.num_pending, 0)
                expected[2, plan.rows] += np.where(alive, plan.ahead.num_drafts, 0)
        counters = (seqs.num_in_flight_tokens, seqs.num_pending_tokens, seqs.num_in_flight_drafts)
        found = np.stack(counters)
        for row in rows[(found != expected)[:, rows].any(0)].tolist():
            yield (
                ("in flight", row),
                f"{self._name(row)} counts (tokens computed, tokens brought, drafts) in flight as "
                f"{tuple(found[:, row].tolist())}; by the plans it is "
                f"{tuple(expected[:, row].tolist())}",
            )

    # -- small change ----------------------------------------------------------------------------

    def _never_fits(self, seq: Request) -> bool:
        longest = max(seq.num_tokens, seq.max_total_tokens - 1)
        too_many = blocks_for(longest, self._block_size) > self.num_blocks - 1
        return too_many or seq.max_total_tokens > self.host.config.max_model_len

    def _name(self, row: int) -> str:
        return next((repr(seq.request_id) for seq in self.host.running if seq.row == row), "nobody")
