"""Conservation: a clean host core is silent, and each thing made wrong is found once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer.block_manager import BlockManager
from deepinfer.checks.blocks import ObservedBlocks
from deepinfer.checks.conservation import ConservationChecker
from deepinfer.checks.findings import Findings
from deepinfer.names import DISCIPLINES, FREE_ORDERS, RELEASE_POLICIES
from deepinfer.plan import StepResult
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.scheduler import Scheduler
from deepinfer.sequence import SamplingParams
from tests.deepinfer.checks.books import CONFIG, SIZE, kv


class Core:
    """Scheduler, pool and queue of one engine under the checker; fences pass when collected."""

    def __init__(self, block_manager=BlockManager, **changes) -> None:
        config = replace(CONFIG, **{"release": "step", **changes})
        self.findings = Findings()
        self.checker = ConservationChecker(SIZE, self.findings)
        self.pool = block_manager(
            config.num_blocks, free_order=config.free_order, discipline=config.discipline
        )
        self.blocks = ObservedBlocks(self.pool, self.checker)
        self.queue = ReleaseQueue(self.blocks, config.release, observer=self.checker)
        self.scheduler = Scheduler(config, self.blocks, self.queue)
        self.checker.bind(self.scheduler)
        self.plan = None

    def add(self, request_id: str, num_tokens: int = 6, max_tokens: int = 8) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        self.scheduler.add(request_id, np.zeros(num_tokens, np.int32), params)

    def submit(self) -> None:
        plan = self.plan = self.scheduler.schedule()
        self.checker.planned(plan)
        fence = Fence(plan.step, _Passed())
        for sources, owner in zip(plan.copy_sources, plan.source_owners, strict=True):
            self.queue.give_up(sources, fence, owner=owner, path="fork source")
        self.scheduler.submitted(plan, fence)
        self.queue.release_point()
        self.checker.settled(plan.step)

    def collect(self) -> None:
        plan, count = self.plan, len(self.plan.sample_seq)
        self.queue.collected(plan.step)
        result = StepResult(plan.step, np.ones(count, np.int32), np.zeros(count, np.float32))
        self.scheduler.commit(plan, result)
        if not self.scheduler.num_running + self.scheduler.num_waiting:
            self.queue.flush()
        self.checker.settled(plan.step)

    def step(self) -> None:
        self.submit()
        self.collect()

    def table(self, request_id: str) -> list[int]:
        return self.scheduler.seqs.table(self.scheduler.find(request_id).row).tolist()

    @property
    def said(self) -> list[str]:
        return [finding.message for finding in self.findings.first]


class _Passed:
    def query(self) -> bool:
        return True

    def synchronize(self, timeout_s: float | None = None) -> None:
        pass


@pytest.fixture
def core():
    """Two requests, `a` with blocks 1 and 2, `b` with 3 and 4, one step done."""
    core = Core()
    core.add("a")
    core.add("b")
    core.step()
    assert not core.said
    return core


# -- silence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASE_POLICIES)
@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize("free_order", FREE_ORDERS)
def test_a_clean_core_is_silent(release, discipline, free_order):
    """Forks, aborts in flight and preemptions under every policy and order."""
    core = Core(release=release, discipline=discipline, free_order=free_order)
    core.add("a")
    core.step()
    core.scheduler.fork("a", "fork", SamplingParams(max_tokens=6))
    core.add("b", num_tokens=9, max_tokens=12)
    core.step()
    core.scheduler.fork("a", "late", SamplingParams(max_tokens=4))
    core.submit()
    core.scheduler.abort("b")
    core.checker.settled(core.plan.step)
    core.collect()
    for request_id in ("c", "d"):
        core.add(request_id, num_tokens=7, max_tokens=16)
    while core.scheduler.num_running + core.scheduler.num_waiting:
        core.step()
    assert not core.said
    assert core.scheduler.counters.num_preemptions > 0
    assert core.scheduler.counters.num_block_copies > 0


def test_a_manager_that_offers_less_is_checked_by_what_it_offers():
    """No free list and no orders to look at, but what it hands out still shows."""

    class Plain:
        def __init__(self, num_blocks, free_order, discipline):
            self._inner = BlockManager(num_blocks, free_order=free_order, discipline=discipline)
            for name in ("allocate", "pin", "release", "lift", "can_allocate"):
                setattr(self, name, getattr(self._inner, name))
            self.num_withheld = 0

        @property
        def num_free(self):
            return self._inner.num_free

    core = Core(Plain)
    core.add("a")
    core.step()
    assert not core.said
    core.checker.allocated([1])
    assert core.said == ["block 1 was handed out while owned by 'a'"]


# -- what changes hands ----------------------------------------------------------------------------


def test_a_block_handed_out_while_owned_is_found(core):
    """With its owner, and who gave it up before."""
    core.checker.allocated([3])
    assert core.said == ["block 3 was handed out while owned by 'b'"]


def test_a_block_handed_out_while_withheld_is_found_with_its_fence(core):
    """Who released it, why, and behind which fence."""
    core.submit()
    core.scheduler.abort("b")
    core.checker.allocated([4])
    assert core.said == [
        "block 4 was handed out while withheld; given up by 'b' (abort) behind step 2, "
        "withheld for it"
    ]


@pytest.mark.parametrize("ids", [[0], [9], [-1], [5, 5]])
def test_an_id_that_cannot_be_handed_out_is_found(core, ids):
    """Block 0, ids outside the pool, and one block twice at once."""
    core.checker.allocated(ids)
    assert core.said[0].startswith(f"handed out {ids}")


def test_handing_out_another_block_than_the_next_is_found(core):
    """The free list has one order, and it is kept."""
    core.checker.allocated([7])
    assert core.said == ["handed out [7]; next in the free list were [5]"]


def test_pinning_a_block_of_nobody_is_found(core):
    """A pin is one more owner, so there must be one."""
    core.checker.pinned([1, 5])
    assert core.said == ["blocks 5 were pinned, and nobody owns them"]


def test_releasing_a_block_twice_is_found(core):
    """The second time it has no owner; the first release is named."""
    core.checker.giving_up([1], None, "a", "finish")
    core.checker.released([1], [1], False)
    core.checker.released([1], [1], False)
    assert core.said == [
        "block 1 of 0 owners was released; before that given up by 'a' (finish) with nothing in "
        "flight"
    ]


@pytest.mark.parametrize(
    ("free_order", "wrong"),
    [("reverse", [1, 2]), ("forward", [2, 1]), ("by_id", [2, 1]), ("shuffled", [1, 1])],
)
def test_a_release_out_of_order_is_found(free_order, wrong):
    """`shuffled` may be any order, but of the same blocks."""
    core = Core(free_order=free_order)
    core.add("a", num_tokens=8)
    core.submit()
    core.checker.released([1, 2], wrong, True)
    assert core.said[0] == f"table [1, 2] was released as {wrong}, not {free_order}"


@pytest.mark.parametrize(
    ("lifts", "problem"),
    [
        ([[3, 4]], "the fences of blocks [3, 4] were lifted in this order, not in [4, 3]"),
        ([[2, 1], [4, 3]], "were lifted before those of [4, 3], released first"),
        ([[4, 3], [2, 1], [1]], "fences of blocks [1] were lifted that no release put there"),
    ],
)
def test_the_withheld_path_keeps_the_order_of_release(core, lifts, problem):
    """What waited joins the free list as if it had not waited."""
    core.submit()
    core.scheduler.abort("b")
    core.scheduler.abort("a")
    for ids in lifts:
        core.checker.lifted(ids)
    assert len(core.said) == 1
    assert core.said[0].endswith(problem)


# -- what must add up ------------------------------------------------------------------------------


def test_a_leaked_table_is_found_once_per_block(core):
    """Owned, and in no table; it stays so, and is not found again."""
    row, seqs = core.scheduler.find("a").row, core.scheduler.seqs
    seqs.shrink(row, 0)
    core.checker.settled(2)
    core.checker.settled(3)
    assert core.said == [
        f"block {block_id} has 1 owners and is in 0 tables; it was taken by 'a'; last never given "
        "up"
        for block_id in (1, 2)
    ]


def test_a_declared_pin_is_a_holder_and_an_undeclared_one_is_not(core):
    """Clients with pins of their own say what they hold."""
    held = [np.array([3, 4], np.int32)]
    core.checker.others.append(lambda: held)
    core.blocks.pin([3, 4])
    core.checker.settled(2)
    assert not core.said
    held.clear()
    core.checker.settled(2)
    assert [message.split(";")[0] for message in core.said] == [
        "block 3 has 2 owners and is in 1 tables",
        "block 4 has 2 owners and is in 1 tables",
    ]


@pytest.mark.parametrize(("column", "value"), [(1, 0), (1, -1), (1, 9), (2, 5)])
def test_a_hole_or_an_id_behind_the_end_of_a_table_is_found(core, column, value):
    """0 is padding and nothing else."""
    core.scheduler.seqs.block_tables[core.scheduler.find("a").row, column] = value
    core.checker.settled(2)
    expected = [1, 2, 0, 0, 0, 0]
    expected[column] = value
    assert core.said[0] == f"the table of 'a', 2 blocks long, is {expected}"


def test_counters_that_differ_from_the_books_are_found(core):
    """The manager's word is not taken for it."""
    core.pool._ref_counts[1] += 1
    core.checker.settled(2)
    assert core.said == ["the manager counts 2 owners of block 1, the books 1"]


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([5, 6, 7, 8, 5], "blocks 5 are in the free list twice"),
        ([5, 6, 7], "free blocks 8 are not in the free list"),
        ([5, 6, 7, 8, 1], "the free list holds 1, which are not free"),
        ([5, 7, 6, 8], "the free list has block 7 at place 1; in the order in which blocks came"),
    ],
)
def test_a_wrong_free_list_is_found(core, ids, problem):
    """Duplicates, lost blocks, blocks that are not free, and another order."""
    core.pool.free_ids = lambda: ids
    core.checker.settled(2)
    core.checker.settled(3)
    assert [message for message in core.said if message.startswith(problem)] == core.said[:1]
    assert len(core.said) == 1


def test_withheld_blocks_need_a_fence_that_waits(core):
    """A release that the queue forgot keeps its blocks for ever."""
    core.submit()
    core.scheduler.abort("b")
    core.queue._entries.clear()
    core.checker.settled(2)
    assert [message.split(";")[0] for message in core.said] == [
        "block 3 has 1 fences, and 0 releases of it wait",
        "block 4 has 1 fences, and 0 releases of it wait",
    ]


def test_a_fence_that_can_never_pass_is_found(core):
    """It waits for a result, and nothing is in flight."""
    core.queue.withhold(core.table("b"), Fence(9))
    core.scheduler.seqs.shrink(core.scheduler.find("b").row, 0)
    core.checker.settled(2)
    assert core.said == ["blocks [4, 3] wait for the result of a step, and none is in flight"]


def test_an_idle_engine_withholds_nothing():
    """With no request left and nothing in flight every block is free."""
    core = Core()
    core.blocks.allocate(1)
    core.queue.withhold([1], Fence(1, _Passed()))
    core.checker.settled(1)
    assert core.said == ["no request is live, and blocks 1 are still withheld"]


def test_a_request_that_can_never_fit_must_not_wait(core):
    """NEVER taken for LATER would block the queue for ever; found once."""
    core.add("c")
    core.scheduler.waiting[0].sampling = SamplingParams(max_tokens=99)
    core.checker.settled(2)
    core.checker.settled(3)
    assert core.said == ["'c' waits, and can never fit this pool"]


def test_a_preempted_request_forgets_its_committed_rows(core):
    """Without pinned blocks it has none."""
    core.add("c")
    core.scheduler.waiting[0].num_computed_tokens = 6
    core.checker.settled(2)
    assert core.said == ["'c' waits with 6 committed rows in 0 blocks"]


@pytest.mark.parametrize(
    ("counter", "found"),
    [
        ("num_in_flight_tokens", "(2, 0, 0)"),
        ("num_pending_tokens", "(1, 1, 0)"),
        ("num_in_flight_drafts", "(1, 0, 1)"),
    ],
)
def test_what_is_counted_in_flight_is_what_the_plans_say(core, counter, found):
    """Found once while a step is in flight, and nothing once its result was taken off."""
    core.submit()
    assert not core.said
    row = core.scheduler.find("a").row
    getattr(core.scheduler.seqs, counter)[row] += 1
    core.checker.settled(2)
    core.checker.settled(2)
    assert core.said == [
        f"'a' counts (tokens computed, tokens brought, drafts) in flight as {found}; by the plans "
        "it is (1, 0, 0)"
    ]


def test_nothing_is_in_flight_when_all_is_collected(core):
    """Then no request counts anything."""
    core.scheduler.seqs.num_in_flight_tokens[core.scheduler.find("a").row] = 1
    core.checker.settled(2)
    assert core.said == [
        "'a' counts (tokens computed, tokens brought, drafts) in flight as (1, 0, 0); by the plans "
        "it is (0, 0, 0)"
    ]


def test_rows_counted_as_committed_were_written_since_the_block_was_handed_out(core):
    """A table entry pointed at a new block without a copy reads what nobody wrote."""
    core.checker.submitted("compute", "forward 1", (), (kv(1, 3), kv(2, 4, rows=(0, 2))))
    row = core.scheduler.find("a").row
    new = core.blocks.allocate_one()
    core.scheduler.seqs.replace_block(row, 1, new)
    core.blocks.release([2])
    core.submit()
    assert core.said == ["'a' reads 2 rows of block 5; 0 were written since it was handed out"]
