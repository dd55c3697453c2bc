"""A world that holds all the engine does against its own books, at every moment of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.drafters.acceptance import Acceptance
from deepinfer.observer import KV, Access, Observer
from deepinfer.plan import StepPlan
from deepinfer.testing.world import HALF_RIGHT
from deepinfer.testing.world import World as UncheckedWorld

EMPTY = np.empty(0, np.int32)


class OpenWork(Observer):
    """What is queued and not done, and whether blocks are handed out under it.

    `problems` gets a line if a block with open work is handed out, or (`ordered`) if its next
    writer does not wait for that work.
    """

    def __init__(self, device: SteppedCpuDevice, release: str, safe: bool) -> None:
        self.problems: list[str] = []
        self._device, self._safe = device, safe
        self._is_ordered = release == "ordered"
        self._queued: list[tuple[str, int, frozenset[int]]] = []  # stream, ticket, blocks
        self._events: dict[int, list[tuple[str, int]]] = {}  # what each comes behind
        self._waited: dict[str, list[tuple[str, int]]] = {}
        self._to_wait_for: list[tuple[str, int, frozenset[int]]] = []

    def touching(self, ids: Iterable[int]) -> list[tuple[str, int, frozenset[int]]]:
        """Open operations that touch one of these blocks."""
        wanted = frozenset(map(int, ids))
        self._queued = [op for op in self._queued if not self._is_done(op[0], op[1])]
        return [op for op in self._queued if op[2] & wanted]

    def allocated(self, ids: Sequence[int]) -> None:
        still_open = self.touching(ids)
        given = frozenset(map(int, ids))
        if self._is_ordered:
            self._to_wait_for += [(name, at, blocks & given) for name, at, blocks in still_open]
        elif self._safe and still_open:
            self.problems.append(f"{sorted(given)} handed out while work on it is open")

    def recorded(self, stream: str, event: int) -> None:
        own = stream, self._device.stream(stream).queued
        self._events[event] = [own, *self._waited.get(stream, ())]

    def waited(self, stream: str, event: int) -> None:
        behind = self._waited.setdefault(stream, [])
        behind += self._events.get(event, [])
        behind[:] = [at for at in dict.fromkeys(behind) if not self._is_done(*at)]

    def submitted(
        self, stream: str, label: str, reads: Sequence[Access], writes: Sequence[Access]
    ) -> None:
        written = _blocks(writes)
        for name, ticket, ids in self._to_wait_for:
            waited = any(s == name and t >= ticket for s, t in self._waited.get(stream, ()))
            if ids & written and name != stream and not waited and not self._is_done(name, ticket):
                self.problems.append(f"{label!r} does not wait for open work on its block")
        self._to_wait_for = [op for op in self._to_wait_for if not self._is_done(op[0], op[1])]
        ticket = self._device.stream(stream).queued
        self._queued.append((stream, ticket, _blocks(reads) | written))

    def _is_done(self, stream: str, ticket: int) -> bool:
        return self._device.stream(stream).passed >= ticket


def _blocks(accesses: Sequence[Access]) -> frozenset[int]:
    return frozenset(i for access in accesses if access.kind == KV for i in access.ids.tolist())


class World(UncheckedWorld):
    """A world whose calls raise AssertionError where something does not add up."""

    def __init__(self, config: EngineConfig, acceptance: Acceptance = HALF_RIGHT) -> None:
        device = SteppedCpuDevice()
        self.open_work = OpenWork(device, config.release, config.release != "early")
        self._due: list[tuple[int, object]] = []  # (step, fence) of saves
        super().__init__(config, device=device, observers=[self.open_work], acceptance=acceptance)

    def planned(self, plan: StepPlan | None) -> None:
        super().planned(plan)
        if plan is not None:
            self.check(plan.copy_sources, len(plan.state_copies))
            if not self.scheduler.looks_ahead:  # what is open in a plan is known when it has run
                self.check_plan(plan)

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        assert not self.problems

    def submit(self) -> bool:
        queued = super().submit()
        assert not self.problems
        return queued

    def collect(self, sampled: Sequence[int] | None = None):
        step = self.in_flight[0].plan.step
        for due, fence in self._due:
            if due <= step:
                fence.wait()
        self._due = [(due, fence) for due, fence in self._due if due > step]
        output = super().collect(sampled)
        assert not self.problems
        return output

    def drain(self, max_steps: int = 2000) -> None:
        super().drain(max_steps)
        assert not self.tokens, "requests are still live"
        self.check()
        assert self.blocks.num_free == self.blocks.num_usable
        assert self.slots is None or self.slots.num_free == self.slots.num_usable

    def transfer(self, request_id: str, num_steps: int = 1) -> None:
        """Save a running request's committed rows; done at the latest `num_steps` steps on."""
        last = self.scheduler.num_steps
        fence = self.save(f"save {self.num_actions}", request_id)
        self._due.append((last + num_steps, fence))

    def holders(self, sources: Iterable[np.ndarray] = ()) -> Counter[int]:
        """Owners of each block, counted from whoever is alive."""
        counts: Counter[int] = Counter()
        for request_id in self.tokens:
            seq = self.scheduler.find(request_id)
            counts.update(self.table(request_id) if seq.row >= 0 else seq.forked_table.tolist())
        for ids in [*sources, *self.transfers.held.values()]:
            counts.update(ids.tolist())
        return counts

    # -- checks ----------------------------------------------------------------------------------

    def check(self, sources: Iterable[np.ndarray] = (), num_pins: int = 0) -> None:
        """Conservation, owner counts, counters and coverage, against the model.

        `sources`: what forks let go with the plan; `num_pins`: state slots that are.
        """
        blocks, holders = self.blocks, self.holders(sources)
        blocks.check_integrity()
        refs = blocks.ref_counts(np.arange(blocks.num_blocks)).tolist()
        assert refs == [holders[block_id] for block_id in range(blocks.num_blocks)]
        free = blocks.free_ids()
        assert len(set(free)) == len(free) == blocks.num_free
        assert not set(free) & holders.keys()
        assert 0 not in free
        withheld = set(range(1, blocks.num_blocks)) - set(free) - holders.keys()
        assert len(withheld) == blocks.num_withheld
        assert blocks.num_free + blocks.num_held + blocks.num_withheld + 1 == blocks.num_blocks
        assert self.release.num_entries or not withheld, "withheld, and no fence will lift it"
        if self.release.policy.safe and self.config.release != "ordered":
            assert not self.open_work.touching(free), "free while work on it is open"
        assert not self.problems
        assert not self.open_work.problems
        if self.release.policy.safe:
            assert not self.wrong_rows
            assert not self.engine.findings.first
        self._check_rows()
        self._check_slots(num_pins)

    def _check_slots(self, num_pins: int) -> None:
        """Each slot is one live request's, but for pins that await their copy."""
        states = self.engine.states
        if states is None:
            return
        held = [self.scheduler.find(request_id).state_id for request_id in self.tokens]
        owned = [slot for slot in held if slot]
        assert len(set(owned)) == len(owned)
        refs = states.slots.ref_counts(np.arange(states.slots.num_blocks))
        assert int(refs.sum()) == len(owned) + len(states.pinned) + num_pins
        assert {seq.state_id for seq in self.scheduler.running} <= set(owned)
        assert states.release.num_entries or not states.slots.num_withheld

    def _check_rows(self) -> None:
        seqs = self.scheduler.seqs
        live = self.scheduler.num_running + self.scheduler.num_waiting
        assert live == len(self.tokens)
        for seq in self.scheduler.running:
            row, tokens = seq.row, self.tokens[seq.request_id]
            computed = self.computed[seq.request_id]
            assert seqs.token_ids[row, : seqs.num_tokens[row]].tolist() == tokens
            assert seqs.num_computed_tokens[row] == computed < len(tokens)
            assert seqs.num_blocks[row] * self.config.block_size >= computed
            assert not seqs.block_tables[row, seqs.num_blocks[row] :].any()
            if not self.in_flight:
                assert seqs.num_in_flight_tokens[row] == 0

    def check_plan(self, plan: StepPlan) -> None:
        """What the plan says against the model: tokens, positions, slots, tables, copies."""
        size, seqs = self.config.block_size, self.scheduler.seqs
        pending = Counter(np.concatenate([EMPTY, *plan.copy_sources]).tolist())
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(set(plan.slot_mapping.tolist())) == plan.num_tokens
        assert plan.query_start.tolist() == [0, *np.cumsum(plan.num_scheduled).tolist()]
        for index, request_id in enumerate(self.planned_ids):
            row, tokens = int(plan.rows[index]), self.tokens[request_id]
            computed, table = self.computed[request_id], self.table(request_id)
            count = int(plan.num_scheduled[index])
            part = slice(int(plan.query_start[index]), int(plan.query_start[index + 1]))
            positions = list(range(computed, computed + count))
            assert count >= 1
            assert plan.positions[part].tolist() == positions
            assert plan.token_ids[part].tolist() == tokens[computed : computed + count]
            assert plan.context_lens[index] == computed + count
            assert (index in plan.sample_seq) == (computed + count == len(tokens))
            slots = [table[p // size] * size + p % size for p in positions]
            assert plan.slot_mapping[part].tolist() == slots
            width = plan.block_tables.shape[1]
            assert plan.block_tables[index].tolist() == table + [0] * (width - len(table))
            assert min(table) > 0
            lookahead = int(seqs.num_lookahead_slots[row])
            needed = min(len(tokens) + lookahead, max(self.limits[request_id] - 1, len(tokens)))
            if self.config.admission == "lifetime":
                needed = max(needed, self.limits[request_id] - 1)
            assert len(table) == -(-needed // size)
            for block_id in {slot // size for slot in slots}:
                owners = self.blocks.ref_count(block_id) - pending[block_id]
                assert owners == 1, f"{request_id} writes block {block_id} of {owners} owners"
        self._check_copies(plan, pending)

    def _check_copies(self, plan: StepPlan, pending: Counter[int]) -> None:
        sources, destinations = plan.block_copies.T.tolist()
        assert len(set(destinations)) == len(destinations)
        assert not set(sources) & set(destinations)
        for source, destination in zip(sources, destinations, strict=True):
            assert pending[source], "the source is not held until its copy is done"
            assert self.blocks.ref_count(destination) == 1
