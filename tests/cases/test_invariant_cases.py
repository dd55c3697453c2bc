"""Reports from public trackers, as cases with the right value for each.

Every test names its report (repository#number). Cases of loads and saves beside the engine are in
`test_transfer_cases.py`, those of what it hands to its caller in `test_record_cases.py`, those of
the harness and of sizing beside the tests of the module they are about. Those that wait for a
feature this engine does not have yet are listed in `pending.md`, with the feature.
"""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.block_manager import BlockManager, Verdict
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.errors import OwnershipError
from deepinfer.names import FREE_ORDERS, PREEMPTIONS, RELEASE_POLICIES
from deepinfer.planning import PlanBuilder, StepCopies
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.sequence import SamplingParams, Sequence, SequenceTable
from tests.cases.case_worlds import HOST_HOLDS_BACK, world


def row_of(num_tokens, table, block_size, lookahead=0):
    """A sequence table with one sequence, all but its last token computed."""
    seqs = SequenceTable(1, 200, block_size)
    tokens = np.arange(num_tokens, dtype=np.int32)
    seq = Sequence("a", 0, tokens, num_tokens, SamplingParams(max_tokens=100))
    row = seqs.add(seq, np.array(table, np.int32))
    seqs.num_computed_tokens[row] = num_tokens - 1
    seqs.num_lookahead_slots[row] = lookahead
    return seqs, np.array([row], np.intp)


# -- A. counts, double free ----------------------------------------------------------------------


def test_r2_one_block_twice_in_one_release():
    """vllm#42571: both entries see 0 owners and the block is appended twice. Right: once."""
    blocks = BlockManager(16)
    x = blocks.allocate_one()
    blocks.pin([x])
    free = blocks.num_free
    blocks.release([x, x])
    assert blocks.num_free == len(blocks.free_ids()) == free + 1
    y = blocks.allocate_one()
    with pytest.raises(OwnershipError):
        blocks.release([y, y])
    assert blocks.ref_count(y) == 1
    blocks.check_integrity()


def test_r3_counter_is_compared_with_a_walk():
    """dynamo#13398: decrement all, then filter, counted one block twice (14 -> 16). Right: 15."""
    blocks = BlockManager(16)
    x = blocks.allocate_one()
    blocks.pin([x])
    assert blocks.num_free == 14
    blocks.release([x, x])
    assert blocks.num_free == len(list(blocks.free_ids())) == 15


def test_r6_a_fork_counts_on_its_parent():
    """apache/tvm#16666: the child was not counted. Right: 1, 2, 1, 0 owners and an empty pool."""
    w = world(4, 9)
    w.add("parent", range(10), max_tokens=4)
    w.step([1])
    counts = [w.blocks.ref_count(1)]
    w.fork("parent", "child", num_shared=8)
    counts.append(w.blocks.ref_count(1))
    w.abort("child")
    counts.append(w.blocks.ref_count(1))
    w.abort("parent")
    counts.append(w.blocks.ref_count(1))
    assert counts == [1, 2, 1, 0]
    assert w.blocks.num_free == w.blocks.num_usable


# -- B. freed while somebody still uses it -------------------------------------------------------


@pytest.mark.parametrize("release", ["polled", "step"])
def test_r12_blocks_of_a_request_that_ends_in_flight(release):
    """vllm#45357: blocks came back with a step in flight. Right: LATER until its result is in."""
    w = world(4, 5, release=release)
    w.add("a", range(5), max_tokens=4)
    w.submit()
    held = w.table("a")
    w.abort("a")
    assert w.add("b", range(16), max_tokens=1) is Verdict.LATER
    assert not set(w.blocks.free_ids()) & set(held)
    w.collect()
    w.submit()
    assert sorted(w.table("b")) == [1, 2, 3, 4]
    w.collect()
    w.drain()


def test_r17_a_plan_in_flight_is_never_rewritten():
    """TensorRT-LLM#15546: one table buffer for all steps. Right: each plan keeps its own."""
    w = world(2, 20)
    w.add("a", [1, 2], max_tokens=6)
    w.step([3])
    w.submit()
    plan, table = w.plan, w.plan.block_tables.tolist()
    slots, tokens = plan.slot_mapping.tolist(), plan.token_ids.tolist()
    w.collect([4])
    for _ in range(3):
        w.step([5])
    assert plan.block_tables.tolist() == table
    assert (plan.slot_mapping.tolist(), plan.token_ids.tolist()) == (slots, tokens)


@pytest.mark.parametrize("release", HOST_HOLDS_BACK)
def test_r19_a_pool_of_one_waits_for_its_open_copy(release):
    """LMCache#4830: a buffer was handed out mid-copy. Right: refused until the event passed."""
    blocks = BlockManager(2)
    queue = ReleaseQueue(blocks, release)
    device = SteppedCpuDevice()
    stream, event = device.stream("load"), device.event()
    stream.submit(lambda: None)
    stream.record(event)
    queue.give_up(blocks.allocate(1), Fence(1, event))
    assert not queue.make_room(1)
    assert queue.counters.num_refused_while_withheld == 1
    queue.flush()
    assert event.query()
    assert queue.make_room(1)


@pytest.mark.parametrize("release", RELEASE_POLICIES)
def test_r23_a_delay_without_work_in_flight(release):
    """vllm-ascend#10843: delayed with nothing to wait for, never freed. Right: free at once."""
    w = world(4, 5, release=release)
    w.add("a", range(5), max_tokens=4)
    w.step([1])
    w.abort("a")
    assert w.blocks.num_free == 4
    assert w.release.num_entries == 0


# -- C. leaks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASE_POLICIES)
def test_r28_random_aborts_leak_nothing(release):
    """TensorRT-LLM#699: leaked tables after disconnects. Right: the drained pool is the start's."""
    rng = np.random.default_rng(28)
    w = world(4, 24, release=release, max_num_seqs=8, max_num_batched_tokens=24)
    for index in range(120):
        prompt = rng.integers(0, 9, rng.integers(1, 20))
        w.add(f"r{index}", prompt.tolist(), max_tokens=int(rng.integers(1, 12)))
        if rng.random() < 0.3 and w.running_ids():
            w.fork(str(rng.choice(w.running_ids())), f"fork{index}", max_tokens=3)
        if w.plan is None:
            w.submit()
        if rng.random() < 0.6 and w.tokens:
            w.abort(str(rng.choice(list(w.tokens))))
        if w.plan is not None and rng.random() < 0.8:
            w.collect()
        w.check()
    w.drain()


# -- D. boundaries and lookahead -----------------------------------------------------------------


def test_r29_a_new_block_at_exactly_the_multiple():
    """MinivLLM#85: a modulo test one off. Right: 3 -> 4 tokens 0 new blocks, 4 -> 5 one."""
    needed = {}
    for num_tokens in (3, 4, 5):
        seqs, rows = row_of(num_tokens, [1], 4)
        needed[num_tokens] = int(seqs.gather(rows).blocks_needed(4)[0])
    assert needed == {3: 1, 4: 1, 5: 2}
    blocks = BlockManager(2)
    blocks.allocate(1)
    assert blocks.can_allocate(needed[4] - 1) is Verdict.OK
    assert blocks.can_allocate(needed[5] - 1) is Verdict.LATER


def test_r29_a_prompt_of_exactly_one_block():
    """MinivLLM#85: P = B holds 1 block after the prefill; its first decode needs 1 new."""
    w = world(4, 4)
    w.add("a", range(4), max_tokens=4)
    w.submit()
    assert w.table("a") == [1]
    w.collect([1])
    assert w.table("a") == [1]
    w.submit()
    assert w.table("a") == [1, 2]


def test_r31_lookahead_slots_count():
    """vllm#16370: draft slots forgotten near a block end. Right: ceil of the whole sum, always."""
    seqs, rows = row_of(15, [1], 16, lookahead=4)
    assert seqs.gather(rows).blocks_needed(16).tolist() == [2]
    for computed in range(33):
        for lookahead in range(9):
            seqs, rows = row_of(computed + 1, [1], 16, lookahead=lookahead)
            needed = int(seqs.gather(rows).blocks_needed(16)[0])
            last_position = computed + lookahead
            assert needed == last_position // 16 + 1


def test_r35_slots_follow_a_scattered_table():
    """text-generation-inference#2711: slot + 1 was somebody else's. Right: the table's next."""
    seqs, rows = row_of(4, [7, 3], 2, lookahead=1)
    assert seqs.gather(rows).blocks_needed(2).tolist() == [3]
    seqs.grow(rows, np.array([1], np.int32), np.array([9], np.int32))
    seqs.num_tokens[rows] += 1  # the guess, as a token to verify
    two = np.array([2], np.int32)
    plan = PlanBuilder(seqs).build(1, rows, seqs.gather(rows), two, StepCopies())
    assert plan.positions.tolist() == [3, 4]
    assert plan.slot_mapping.tolist() == [7, 18]


def test_r37_lookahead_fills_the_tail_first():
    """vllm#6849: empty slots were not counted. Right: 3 guesses, 2 empty slots: 1 new block."""
    needed = {}
    for lookahead in (2, 3):
        seqs, rows = row_of(14, [1], 16, lookahead=lookahead)
        needed[lookahead] = int(seqs.gather(rows).blocks_needed(16)[0])
    assert needed == {2: 1, 3: 2}


# -- F. fork and copy ----------------------------------------------------------------------------


def test_r45_a_fork_copies_once():
    """vllm#417: the copy was repeated in later steps. Right: one copy of a partial tail in all."""
    w = world(4, 12)
    w.add("a", range(10), max_tokens=6)
    w.step([1])
    w.fork("a", "b", max_tokens=5)
    w.drain()
    assert w.scheduler.counters.num_block_copies == 1


# -- H. padding ----------------------------------------------------------------------------------


def test_r53_r56_padding_writes_nowhere():
    """vllm#43810, rvllm#32: padded rows hit a live slot. Right: only the batch's slots change."""
    w = world(16, 5)
    w.add("long", range(20), max_tokens=3)
    w.add("short", [1], max_tokens=3)
    w.add("other", [2, 3], max_tokens=3)
    w.step([1, 1, 1])
    before = w.written_rows()
    w.submit()
    assert w.plan.block_tables.tolist() == [[1, 2], [3, 0], [4, 0]]
    assert (w.plan.slot_mapping >= 16).all()
    w.collect()
    assert w.written_rows() - before == {(2, 4), (3, 1), (4, 2)}


def test_r54_padded_table_rows_hold_no_old_ids():
    """lmdeploy#4569: padding kept the previous step's table. Right: zeros."""
    w = world(2, 20)
    w.add("a", range(8), max_tokens=1)
    w.add("b", [1], max_tokens=3)
    w.step([1, 1])
    w.add("c", [2, 3, 4], max_tokens=2)
    w.submit()
    assert w.scheduler.find("c").row == 0  # the row that had a table of 4
    tables = w.scheduler.seqs.block_tables
    assert np.count_nonzero(tables[0]) == 2
    assert np.count_nonzero(w.plan.block_tables) == sum(map(len, map(w.table, "bc")))


# -- I. admission --------------------------------------------------------------------------------


def test_r57_an_impossible_head_blocks_nobody():
    """vllm#39734: an impossible request at the head. Right: NEVER at once, the next one runs."""
    w = world(16, 5)
    assert w.add("impossible", range(80), max_tokens=1) is Verdict.NEVER
    assert w.add("b", range(10), max_tokens=1) is Verdict.OK
    w.submit()
    assert w.running_ids() == ["b"]


def test_r58_block_0_is_not_capacity():
    """vllm-rbln#957: the reserved block counted. Right: 12 of 13 blocks, 98304 tokens."""
    size, length = 8192, 106496
    budget = {"max_model_len": length, "max_num_seqs": 1, "max_num_batched_tokens": length}
    w = world(size, 13, **budget)
    prompt = np.zeros(98305, np.int32)
    one = SamplingParams(max_tokens=1)
    assert w.scheduler.add("a", prompt, one) is Verdict.NEVER
    assert w.scheduler.add("a", prompt[:-1], one) is Verdict.OK


@pytest.mark.parametrize("num_tokens", range(10, 22))
def test_r59_validator_and_allocator_agree(num_tokens):
    """sglang#39271: accepted, then waiting for ever. Right: NEVER at submission, or it runs."""
    w = world(4, 5)
    verdict = w.add("edge", range(num_tokens), max_tokens=2)
    assert (verdict is Verdict.NEVER) == (num_tokens + 1 > 16)
    if verdict is not Verdict.NEVER:
        w.step([1])
        assert w.running_ids() == ["edge"]
        w.abort("edge")
    w.add("next", [1, 2], max_tokens=2)
    w.drain()
    assert w.ended["next"][0] == "length"


# -- J. preemption -------------------------------------------------------------------------------


@pytest.mark.parametrize("release", HOST_HOLDS_BACK)
def test_r63_withheld_blocks_are_no_reason_to_preempt(release):
    """vllm#49674: victims gave nothing, so all went. Right: wait, 0 preemptions."""
    w = world(4, 6, release=release, max_num_seqs=5)
    for name in "abcd":
        w.add(name, range(4), max_tokens=2)
    w.add("gone", [1], max_tokens=2)
    w.step([1] * 5)
    w.transfer("gone", num_steps=2)
    w.abort("gone")
    w.abort("d")
    assert (w.blocks.num_free, w.blocks.num_withheld) == (1, 1)
    w.step()  # three rows want a block each: one gets it, two wait for the withheld one
    assert w.scheduler.counters.num_preemptions == 0
    assert w.scheduler.counters.num_held_back == 2
    w.drain()
    assert {w.ended[name][0] for name in "abc"} == {"length"}


@pytest.mark.parametrize("preemption", PREEMPTIONS)
def test_r64_two_large_requests_both_end(preemption):
    """inference-sim#349: preempted for ever. Right: 57 blocks NEVER; 30 + 30 in 50 both end."""
    w = world(16, 51, preemption=preemption)
    assert w.add("never", range(57 * 16), max_tokens=1) is Verdict.NEVER
    for name in "ab":
        w.add(name, range(20 * 16), max_tokens=10 * 16)
    w.drain()
    assert {w.ended[name][0] for name in "ab"} == {"length"}
    assert w.scheduler.counters.num_preemptions <= 2


def test_r65_the_last_running_request():
    """sglang#19881: the only running request could not give way. Right: refused at submission."""
    w = world(4, 3)
    assert w.add("a", range(4), max_tokens=9) is Verdict.NEVER
    assert w.add("b", range(4), max_tokens=5) is Verdict.OK
    w.step([1])
    w.scheduler.seqs.num_lookahead_slots[w.scheduler.find("b").row] = 3
    w.submit()
    assert len(w.table("b")) == 2
    w.collect([1])
    w.drain()
    assert w.scheduler.counters.num_preemptions == 0


# -- K. asynchronous planning --------------------------------------------------------------------


def test_r67_a_stale_result_changes_no_counter():
    """vllm#46066: an old frame drained against reset counters. Right: tokens counted once."""
    w = world(4, 30, max_num_batched_tokens=6)
    w.add("decode1", [1], max_tokens=9)
    w.add("decode2", [2], max_tokens=9)
    w.step([3, 3])
    w.add("chunks", range(12), max_tokens=3)  # three chunks beside two decodes
    w.submit()
    w.abort("decode1")
    w.abort("chunks")
    w.add("again", range(12), max_tokens=3)
    commit = w.collect([4, 4])
    assert commit.request_ids == ["decode2"]
    assert w.tokens["decode2"] == [2, 3, 4]
    w.submit()
    assert w.computed["again"] == 0
    w.collect()
    w.drain()


# -- L. free order -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("discipline", "second"), [("lifo", [1, 2]), ("fifo", [3, 4]), ("by_id", [1, 2])]
)
def test_r72_the_promised_order_without_a_cache(discipline, second):
    """vllm#51482: LIFO became FIFO unseen. Right: each discipline keeps its promise."""
    blocks = BlockManager(9, discipline=discipline, free_order="reverse")
    blocks.release(blocks.allocate(2))
    assert blocks.allocate(2).tolist() == second


@pytest.mark.parametrize("free_order", FREE_ORDERS)
def test_r73_scattered_blocks_are_as_good_as_a_run(free_order):
    """llama.cpp#3380: failed with room left. Right: any free blocks serve."""
    blocks = BlockManager(9, free_order=free_order)
    blocks.release(blocks.allocate(8)[::2])
    assert blocks.can_allocate(3) is Verdict.OK
    assert set(blocks.allocate(3).tolist()) <= {1, 3, 5, 7}
