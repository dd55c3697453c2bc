"""Random operations against a whole engine, with every invariant checked after each of them.

The model and the checks are `host_world`; this file says which operations there are.
`DEEPINFER_STATEFUL_EXAMPLES` sets how many runs of `STEPS` operations each policy gets.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deepinfer.config import MAX_DRAFTS, EngineConfig
from deepinfer.names import (
    ADMISSIONS,
    DISCIPLINES,
    FENCES,
    FORK_COPIES,
    FREE_ORDERS,
    OVERLAPS,
    PREEMPTIONS,
    RELEASE_POLICIES,
)
from tests.deepinfer.host_world import World

STEPS = 50
CHUNKS = 5  # runs with a seed of their own each
EXAMPLES = int(os.environ.get("DEEPINFER_STATEFUL_EXAMPLES", "250"))

CONFIGS = st.builds(
    EngineConfig,
    block_size=st.integers(1, 4),
    num_blocks=st.integers(3, 14),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(5, 14),
    max_model_len=st.just(24),
    free_order=st.sampled_from(FREE_ORDERS),
    discipline=st.sampled_from(DISCIPLINES),
    fence=st.sampled_from(FENCES),
    admission=st.sampled_from(ADMISSIONS),
    preemption=st.sampled_from(PREEMPTIONS),
    fork_copy=st.sampled_from(FORK_COPIES),
    overlap=st.sampled_from(["off", *OVERLAPS]),
    drafts=st.sampled_from([0, 0, 1, 3, MAX_DRAFTS]),
    checks=st.sampled_from(["off", "off", "order+conservation"]),
    seed=st.integers(0, 3),
)
TOKENS = st.integers(0, 8)
CHOICE = st.integers(0, 999)  # which of those there are


class Ownership(RuleBasedStateMachine):
    """Requests come, fork, are aborted, run and are preempted over a tiny pool."""

    release: str  # set by the test, with the two below
    num_operations: int
    seen: set[str]

    @initialize(config=CONFIGS)
    def start(self, config):
        self.world = World(replace(config, release=self.release))
        self.num_requests = 0

    def new_id(self):
        self.num_requests += 1
        return f"r{self.num_requests}"

    def running(self):
        return self.world.running_ids()

    def rows_without_drafts(self):
        """Rows that get slots for guesses from here, where the engine makes none itself."""
        scheduler = self.world.scheduler
        return [] if scheduler.looks_ahead else [seq.row for seq in scheduler.running]

    @precondition(lambda self: len(self.world.tokens) < 9)
    @rule(
        prompt=st.lists(TOKENS, min_size=1, max_size=12),
        max_tokens=st.integers(1, 7),
        stop=st.none() | TOKENS,
    )
    def add(self, prompt, max_tokens, stop):
        self.world.add(self.new_id(), prompt, max_tokens, stop)

    @precondition(lambda self: self.running() and len(self.world.tokens) < 9)
    @rule(which=CHOICE, max_tokens=st.integers(1, 7))
    def fork_to_decode(self, which, max_tokens):
        parents = self.running()
        self.world.fork(parents[which % len(parents)], self.new_id(), max_tokens=max_tokens)

    @precondition(lambda self: self.running() and len(self.world.tokens) < 9)
    @rule(which=CHOICE, own=st.lists(TOKENS, max_size=5), shared=CHOICE)
    def fork_a_prefix(self, which, own, shared):
        parents = self.running()
        parent = parents[which % len(parents)]
        num_shared = 1 + shared % len(self.world.tokens[parent])
        self.world.fork(parent, self.new_id(), own=own, num_shared=num_shared)

    @precondition(lambda self: self.world.tokens)
    @rule(which=CHOICE)
    def abort(self, which):
        live = list(self.world.tokens)
        self.world.abort(live[which % len(live)])
        self.seen.add("abort in flight" if self.world.plan else "abort")

    @precondition(lambda self: self.world.can_submit)
    @rule()
    def submit(self):
        self.world.submit()

    @precondition(lambda self: self.world.in_flight)
    @rule()
    def collect(self):
        behind = len(self.world.in_flight) > 1
        output = self.world.collect()
        self.seen.update({"end ahead"} if behind and output.finished else ())

    @precondition(lambda self: not self.world.in_flight)
    @rule(count=st.integers(1, 4), slots=st.integers(0, 5))
    def run_steps(self, count, slots):
        for index in range(count):
            for row in self.rows_without_drafts():
                seqs = self.world.scheduler.seqs
                seqs.num_lookahead_slots[row] = (slots + 3 * index + row) % 6
            if self.world.step() is None:
                break
            self.world.check()

    @precondition(lambda self: self.world.device.runnable())
    @rule(which=CHOICE)
    def advance(self, which):
        streams = self.world.device.runnable()
        self.world.device.advance(streams[which % len(streams)])

    @precondition(lambda self: len(self.world.transfers.held) < 2)
    @rule(num_rows=st.integers(1, 9))
    def load(self, num_rows):
        if self.world.load(self.new_id(), num_rows):
            self.seen.add("load")

    @precondition(lambda self: self.world.transfers.held)
    @rule(which=CHOICE, read=st.booleans())
    def give_up_load(self, which, read):
        loads = list(self.world.transfers.held)
        (self.world.use if read else self.world.drop)(loads[which % len(loads)])

    @precondition(lambda self: self.world.readable_ids())
    @rule(which=CHOICE, num_steps=st.integers(1, 3), then_abort=st.booleans())
    def transfer(self, which, num_steps, then_abort):
        readable = self.world.readable_ids()
        request_id = readable[which % len(readable)]
        self.world.transfer(request_id, num_steps)
        if then_abort:
            self.world.abort(request_id)

    @precondition(lambda self: not self.world.in_flight and self.rows_without_drafts())
    @rule(which=CHOICE, slots=st.integers(0, 5))
    def set_lookahead(self, which, slots):
        seqs, rows = self.world.scheduler.seqs, self.rows_without_drafts()
        seqs.num_lookahead_slots[rows[which % len(rows)]] = slots

    @invariant()
    def everything_adds_up(self):
        if hasattr(self, "world"):
            type(self).num_operations += 1
            self.world.check()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        self.world.drain()
        if self.release != "early":
            assert not self.world.wrong_tokens()
        counters, release = self.world.scheduler.counters, self.world.release.counters
        seen = {
            "preemption": counters.num_preemptions,
            "copy": counters.num_block_copies,
            "stream wait": release.num_stream_waits,
            "host wait": release.num_waits,
            "shrink": counters.num_blocks_shrunk,
            "early corrupts": self.world.wrong_rows,
        }
        self.seen.update(name for name, count in seen.items() if count)


RARE = {  # what must have happened, or the run has shown nothing about the policy
    "early": "early corrupts",
    "blocking": "host wait",
    "deferred": "host wait",
    "polled": "copy",
    "step": "copy",
    "ordered": "stream wait",
}


@pytest.mark.parametrize("release", RELEASE_POLICIES)
def test_every_invariant_holds_after_random_operations(release):
    """Thousands of operations a policy, over every order and mode, the rare paths among them."""
    machine = type("Ownership", (Ownership,), {"release": release, "num_operations": 0})
    machine.seen = set()
    needed = {RARE[release], "abort in flight", "end ahead", "preemption", "shrink", "copy", "load"}
    for number in range(4 * CHUNKS):  # one long run can miss a rare path altogether
        if number >= CHUNKS and (EXAMPLES < 100 or machine.seen >= needed):
            break
        run_state_machine_as_test(
            seed(number)(machine),
            settings=settings(
                max_examples=-(-EXAMPLES // CHUNKS),
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    assert machine.num_operations >= 20 * EXAMPLES
    if EXAMPLES >= 100:
        assert machine.seen >= needed
