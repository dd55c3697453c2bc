"""Blocks for tokens that may never exist: what the formula says, and back as soon as they do not.

The formula, ceil((length + in flight + drafts) / block size), is worked out here from the plans
that were seen and the tokens that were told, and from nothing the scheduler counts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepinfer.drafters.acceptance import PATTERNS, Acceptance
from deepinfer.names import OVERLAPS, RELEASE_POLICIES
from deepinfer.sequence import SamplingParams
from tests.deepinfer.ahead.scenes import CONFIG, Stage, prompt_of, sampled

HALF = Acceptance(((0.5,),))
SAFE = ("deferred", "polled", "step", "ordered", "blocking")


class Book:
    """What each running request of a stage may hold, by plans and tokens seen.

    Attributes:
        num_shrunk: blocks that went back when a result was committed, requests that ended apart.
        widest: most blocks that one request wrote in one step.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.size = stage.config.block_size
        self.num_shrunk = self.widest = 0
        # By request: (step, epoch, tokens it brings at most).
        self._pending: dict[str, list[tuple[int, int, int]]] = {}

    def submit(self) -> bool:
        """Submit one step: every request in it holds what its plan needs, exactly."""
        stage = self.stage
        if not stage.submit():
            return False
        plan, seqs = stage.plans[-1], stage.seqs
        assert plan.ahead is not None
        for index, row in enumerate(plan.rows.tolist()):
            name, drafts = seqs.at(row).request_id, int(plan.ahead.num_drafts[index])
            assert seqs.num_blocks[row] == self.needed(name, drafts)
            brings = 1 + drafts if index in plan.sample_seq else 0
            entry = (plan.step, int(plan.epochs[index]), brings)
            self._pending.setdefault(name, []).append(entry)
            end = int(plan.context_lens[index])
            begin = end - int(plan.num_scheduled[index])
            self.widest = max(self.widest, (end - 1) // self.size - begin // self.size + 1)
        return True

    def collect(self) -> None:
        """Collect one step: what it made surplus is gone with it."""
        stage = self.stage
        step = stage.plans[0].step
        before = {name: self._held(name) for name in stage.running}
        stage.collect()
        for name, entries in self._pending.items():
            self._pending[name] = [entry for entry in entries if entry[0] != step]
        for name in stage.running:
            held = self._held(name)
            assert held == min(before[name], self.needed(name))
            self.num_shrunk += before[name] - held

    def run(self) -> None:
        """All requests to their end."""
        while self.stage.engine.has_unfinished():
            while self.submit():
                pass
            self.collect()
        self.stage.check_drained()

    def needed(self, name: str, drafts: int = 0) -> int:
        """ceil((length + in flight + drafts) / block size), within the request's last position."""
        stage = self.stage
        seq = stage.engine.scheduler.find(name)
        epoch = int(stage.seqs.epochs[seq.row])
        length = seq.num_prompt_tokens + len(stage.delivered[name])
        in_flight = sum(n for _, of_epoch, n in self._pending.get(name, []) if of_epoch == epoch)
        last = seq.num_prompt_tokens + stage.requests[name].max_tokens - 1
        return -(-min(length + in_flight + drafts, last) // self.size)

    def _held(self, name: str) -> int:
        return int(self.stage.seqs.num_blocks[self.stage.engine.scheduler.find(name).row])


@pytest.mark.parametrize("acceptance", [PATTERNS["all-reject"], PATTERNS["alternate"], HALF])
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_blocks_are_those_of_the_formula_at_every_length_around_a_block(size, overlap, acceptance):
    """Prompts of kB - 1, kB and kB + 1 tokens with five drafts, which lie in two blocks or more."""
    config = replace(
        CONFIG, block_size=size, num_blocks=161, overlap=overlap, drafts=5, release=SAFE[size]
    )
    with Stage("qwen3", config, acceptance) as stage:
        book = Book(stage)
        lengths = [k * size + more for k in (1, 2, 3) for more in (-1, 0, 1)]
        for number, length in enumerate(lengths):
            stage.add(f"r{number}", prompt_of(number, max(length, 1)), sampled(number, 15))
        book.run()
        assert len(stage.ended) == len(lengths)
        assert book.widest >= 2
        assert book.num_shrunk > 0
        assert stage.engine.scheduler.counters.num_blocks_shrunk >= book.num_shrunk


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_preempted_requests_are_booked_from_anew(overlap):
    """What steps in flight were to bring a request that lost its blocks counts no more."""
    config = replace(CONFIG, block_size=2, num_blocks=16, overlap=overlap, drafts=3)
    with Stage("qwen3", config, HALF) as stage:
        book = Book(stage)
        for number in range(5):
            stage.add(f"r{number}", prompt_of(number, 4 + number), sampled(number, 16))
        book.run()
        assert stage.engine.scheduler.counters.num_preemptions > 0
        assert len(stage.ended) == 5


@pytest.mark.parametrize("size", [1, 2])
def test_drafts_give_way_before_a_request_does(size):
    """In the smallest pool in which nobody is preempted without drafts nobody is with them."""

    def preemptions(num_blocks: int, drafts: int) -> tuple[int, set[int]]:
        config = replace(CONFIG, block_size=size, num_blocks=num_blocks, drafts=drafts)
        given = set()
        with Stage("qwen3", config, 0.0) as stage:
            stage.add("long", prompt_of(1, 5), SamplingParams(14))
            for _ in range(6):
                stage.step()
                given.add(int(stage.seqs.num_lookahead_slots.max()))
            stage.add("short", prompt_of(2, 3), SamplingParams(12))
            while stage.engine.has_unfinished():
                stage.submit()
                plan = stage.plans[-1]
                if plan.ahead is not None and len(plan.rows) == 2:
                    given |= set(plan.ahead.num_drafts.tolist())
                stage.collect()
            stage.check_drained()
            return stage.engine.scheduler.counters.num_preemptions, given

    smallest = next(n for n in range(20 // size, 60) if not preemptions(n, 0)[0])
    assert preemptions(smallest - 1, 0)[0] > 0
    count, given = preemptions(smallest, 5)
    assert count == 0
    assert {0, 5} <= given


# -- slots -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("release", RELEASE_POLICIES)
def test_a_state_slot_is_withheld_behind_the_step_queued_when_its_request_ended(release, overlap):
    """With two rows, the most held and withheld; a row of the table in docs/engine.md."""
    waits = overlap != "off" and release not in ("early", "blocking", "ordered")
    config = replace(CONFIG, overlap=overlap, release=release, max_num_seqs=2, num_state_slots=9)
    with Stage("v4", config) as stage:
        for number, count in enumerate((9, 14, 9, 9)):
            stage.add(f"r{number}", prompt_of(number, 5), sampled(number, count))
        stage.finish()
        in_use = [stats.slots_held + stats.slots_withheld for stats in stage.steps]
        assert max(in_use) == (3 if waits else 2)
        assert stage.engine.scheduler.counters.num_later_slots == 0


@pytest.mark.parametrize("overlap", OVERLAPS[1:])
@pytest.mark.parametrize("release", RELEASE_POLICIES)
def test_nobody_waits_for_a_draft_slot(release, overlap):
    """However soon requests end, and whatever is withheld behind steps in flight."""
    config = replace(CONFIG, overlap=overlap, release=release, max_num_seqs=2)
    with Stage("qwen3", config) as stage:
        for number in range(16):
            stage.add(f"r{number}", prompt_of(number % 3, 3), sampled(number % 3, 1 + number % 3))
        stage.finish()
        assert stage.engine.scheduler.counters.num_later == 0
