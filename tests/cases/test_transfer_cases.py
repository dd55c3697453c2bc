"""Reports about loads and saves beside the engine, as cases with the right value for each.

A transfer runs on a stream of its own, and nothing puts it behind the steps but what the release
policy promises. So the cases run that stream as early, or as late, as streams and events allow:
what a policy gets right here it gets right on any device. Where it is cheap, `early` or a planted
fault shows that the case can fail.
"""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.block_manager import Verdict
from deepinfer.errors import OwnershipError
from deepinfer.testing.faults import FAULTS
from deepinfer.testing.transfers import Transfers
from deepinfer.testing.world import World as UncheckedWorld
from tests.cases.case_worlds import HOST_HOLDS_BACK, SAFE, case_config, run_only, world


def labels(w: UncheckedWorld) -> list[str]:
    """What has run so far, in order."""
    return [label for _, label in w.device.log]


# -- A. which block is pinned, and how often -----------------------------------------------------


@pytest.mark.parametrize("release", HOST_HOLDS_BACK)
def test_r5_a_save_keeps_the_blocks_of_its_own_request(release):
    """TensorRT-LLM#12648: the pin sat on an equal block. Right: 2 is kept, 1 is left alone."""
    w = world(4, 6, release=release)
    w.add("a", range(4), max_tokens=1)
    w.step([7])  # ends: block 1 is free, and holds what b's will
    w.add("b", range(4), max_tokens=4)
    w.add("busy", [1], max_tokens=4)
    w.step([7, 7])
    assert w.table("b") == [2]
    w.save("s", "b")
    w.abort("b")
    assert (w.blocks.ref_count(1), w.blocks.free_ids().count(1)) == (0, 1)
    assert 2 not in w.blocks.free_ids()
    w.device.synchronize()
    w.step()  # the policy looks
    assert (w.blocks.ref_count(1), w.blocks.free_ids().count(1)) == (0, 1)
    assert w.blocks.free_ids().count(2) == 1
    w.drain()


@pytest.mark.parametrize("save_ends_first", [True, False])
@pytest.mark.parametrize("release", SAFE)
def test_r8_either_order_of_unpin_and_release(release, save_ends_first):
    """LMCache#1130: one order leaked, the other went to -1. Right: freed once, and 0, in both."""
    w = world(4, 6, release=release)
    w.add("busy", [1], max_tokens=4)
    w.add("a", range(3), max_tokens=8)
    w.step([1, 1])
    (block_id,) = w.table("a")
    w.save("s", "a")
    if save_ends_first:
        run_only(w, "load")
        w.step([1, 1])
        assert w.blocks.ref_count(block_id) == 1
        w.abort("a")
    else:
        w.abort("a")
        run_only(w, "load")
        w.step([1])
    assert (w.blocks.ref_count(block_id), w.blocks.free_ids().count(block_id)) == (0, 1)
    with pytest.raises(OwnershipError):
        w.blocks.release([block_id])  # once more is an error, not clamped
    w.drain()


# -- B. freed while somebody still uses it -------------------------------------------------------


@pytest.mark.parametrize("release", SAFE)
def test_r12_a_load_into_blocks_of_a_request_that_ends_in_flight(release):
    """vllm#45357: the load was unordered with the step. Right: LATER, or the load waits for it."""
    w = world(4, 5, release=release)
    w.add("a", range(5), max_tokens=4)
    w.submit()
    w.abort("a")
    granted = w.load("b", 16)
    assert granted == (release not in HOST_HOLDS_BACK)
    run_only(w, "load")
    w.collect()
    assert granted or w.load("b", 16)
    w.use("b")
    w.drain()
    assert w.wrong_rows == 0


def test_r12_without_the_wait_the_step_writes_over_the_load():
    """vllm#45357 with policy early: the case can fail, and does, in each row that a wrote."""
    w = world(4, 5, release="early")
    w.add("a", range(5), max_tokens=4)
    w.submit()
    w.abort("a")
    assert w.load("b", 16)
    run_only(w, "load")
    w.collect()
    w.use("b")
    w.drain()
    assert w.wrong_rows == 5


@pytest.mark.parametrize("release", SAFE)
def test_r15_a_save_starts_behind_the_copy_that_fills_its_rows(release):
    """vllm#45704: the save read before they were written. Right: it does not start before."""
    w = world(4, 12, release=release)
    w.add("a", range(6), max_tokens=4)
    w.step([1])
    w.fork("a", "b", max_tokens=3)
    w.submit()  # the copy of the tail is queued; some policies have waited for it
    w.save("s", "b")
    run_only(w, "load")
    run_only(w, "copy")
    run_only(w, "load")
    copied, saved = labels(w).index("copy_blocks step 2"), labels(w).index("save s")
    assert copied < saved
    assert "forward step 2" not in labels(w)  # nor does it wait for more than it needs
    w.drain()
    assert w.wrong_rows == 0


def test_r15_a_save_that_does_not_wait_reads_what_is_not_there():
    """vllm#45704 planted: the two rows of the tail are not there yet."""
    w = UncheckedWorld(case_config(4, 12, release="step"))
    FAULTS["save-before-its-rows"].plant(w.engine)
    w.add("a", range(6), max_tokens=4)
    w.step([1])
    w.fork("a", "b", max_tokens=3)
    w.submit()
    w.save("s", "b")
    run_only(w, "load")
    assert w.wrong_rows == 2


@pytest.mark.parametrize("release", SAFE)
def test_r15_every_save_is_equal_to_what_was_written(release):
    """vllm#45704: one step later in host order is no order. Right: 1000 of 1000 saves are equal.

    200 under each policy, of parents and children, the streams running in any order.
    """
    rng = np.random.default_rng(15)
    w = world(4, 9, release=release)
    for run in range(100):
        w.add("a", rng.integers(0, 9, 6).tolist(), max_tokens=4)
        w.step()
        w.fork("a", "b", max_tokens=2)
        w.submit()
        for name in "ab":
            w.save(f"{name}{run}", name)
            for _ in range(rng.integers(4)):
                if can_run := w.device.runnable():
                    w.device.advance(str(rng.choice(can_run)))
        w.collect()
        w.abort("a")
        w.drain()
        assert w.wrong_rows == 0
    assert sum(label.startswith("save ") for label in labels(w)) == 200


# An operation on two blocks, on another stream than `load`, and the blocks given up behind it.


def _save_read(w: UncheckedWorld, other: Transfers) -> None:
    w.add("a", range(8), max_tokens=4)
    w.step()
    other.save_out("s", "a")
    w.abort("a")


def _load_read(w: UncheckedWorld, other: Transfers) -> None:
    assert other.load_in("x", 8)
    run_only(w, "store")
    other.use("x")


def _load_written(w: UncheckedWorld, other: Transfers) -> None:
    assert other.load_in("x", 8)
    other.drop("x")


def _step_written(w: UncheckedWorld, other: Transfers) -> None:
    w.add("a", range(8), max_tokens=4)
    w.submit()
    w.abort("a")


FIRST = {
    "WAR on a save": _save_read,
    "WAR on the use of a load": _load_read,
    "WAW on a load": _load_written,
    "WAW on a step": _step_written,
}


def load_behind(w: UncheckedWorld, first: str, num_rows: int) -> tuple[bool, int]:
    """Load into blocks with open work, the load as early and the work as late as can be.

    Returns whether the blocks were handed out with the work open, and the rows found wrong.
    """
    other = Transfers(w.engine, w.rows, stream="store")
    w.add("busy", [1], max_tokens=4)  # an idle engine would wait for all that is open
    w.step()
    FIRST[first](w, other)
    granted = w.load("y", num_rows)
    for stream in ("load", "store", "compute"):
        run_only(w, stream)
    if w.plan is not None:
        w.collect()
    if not granted:
        w.step()
        assert w.load("y", num_rows)
    w.use("y")
    w.drain()
    return granted, w.wrong_rows + other.wrong_rows


@pytest.mark.parametrize("num_rows", [3, 4, 7])  # part of a block, a block, one and a part
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("release", SAFE)
def test_r16_a_load_waits_for_open_work_on_its_blocks(release, first, num_rows):
    """TensorRT-LLM#9056: waits among transfers were missing. Right: per block, read or written."""
    w = world(4, 4, release=release)
    granted, wrong_rows = load_behind(w, first, num_rows)
    assert granted == (release not in HOST_HOLDS_BACK)
    assert wrong_rows == 0


@pytest.mark.parametrize("num_rows", [3, 4, 7])
@pytest.mark.parametrize("first", FIRST)
def test_r16_without_the_wait_a_load_and_open_work_mix(first, num_rows):
    """TensorRT-LLM#9056 with policy early: each edge can fail, and does, in every row loaded."""
    w = UncheckedWorld(case_config(4, 4, release="early"))
    assert load_behind(w, first, num_rows) == (True, num_rows)


def step_behind_load(w: UncheckedWorld) -> None:
    """A request starts in two blocks whose load was given up and is still being written."""
    w.add("busy", [1], max_tokens=5)
    w.step()
    w.load("x", 8)
    w.drop("x")
    w.add("b", range(7), max_tokens=2)  # reads its rows in a second step
    w.submit()
    run_only(w, "compute")
    run_only(w, "load")
    w.collect()
    w.drain()


@pytest.mark.parametrize("release", SAFE)
def test_r16_a_step_waits_for_an_open_load_of_its_blocks(release):
    """TensorRT-LLM#9056: a load is a writer like any other. Right: the next one waits for it."""
    w = world(4, 4, release=release)
    step_behind_load(w)
    assert (w.wrong_rows, w.wrong_tokens()) == (0, 0)


def test_r16_without_the_wait_a_load_writes_over_a_step():
    """TensorRT-LLM#9056 with policy early: all 7 rows are wrong in the second step."""
    w = UncheckedWorld(case_config(4, 4, release="early"))
    step_behind_load(w)
    assert w.wrong_rows == 7


@pytest.mark.parametrize("release", SAFE)
def test_r16_who_reads_a_load_waits_for_it(release):
    """TensorRT-LLM#9056, RAW: b1 was read before its load was done. Right: the reader waits."""
    w = world(4, 4, release=release)
    w.load("x", 7)
    w.use("x")
    run_only(w, "compute")
    w.drain()
    assert [label for label in labels(w) if label.endswith(" x")] == ["load x", "use x"]
    assert w.wrong_rows == 0


def test_r16_without_the_wait_a_load_is_read_unwritten():
    """TensorRT-LLM#9056 planted: the reader finds none of the 7 rows."""
    w = UncheckedWorld(case_config(4, 4, release="step"))
    FAULTS["load-used-before-written"].plant(w.engine)
    w.load("x", 7)
    w.use("x")
    run_only(w, "compute")
    assert w.wrong_rows == 7


@pytest.mark.parametrize("release", SAFE)
def test_r16_reuse_waits_for_an_open_copy(release):
    """TensorRT-LLM#9056: b1 was loaded again while its offload was open. Right: reuse waits."""
    w = world(4, 3, release=release)
    w.add("a", range(5), max_tokens=4)
    w.step([1])
    w.transfer("a", num_steps=3)  # reads blocks 1 and 2 until told otherwise
    w.abort("a")
    w.add("b", range(8), max_tokens=1)  # wants both
    w.step()  # the world fails if a writer neither waited nor was made to wait
    assert w.ended["b"][0] == "length"
    assert w.wrong_rows == 0
    w.drain()


def test_r16_without_the_wait_the_copy_reads_the_next_owner():
    """TensorRT-LLM#9056 with policy early: the case can fail, and does."""
    w = world(4, 3, release="early")
    w.add("a", range(5), max_tokens=4)
    w.step([1])
    w.transfer("a", num_steps=3)
    w.abort("a")
    w.add("b", [7] * 8, max_tokens=1)
    w.step()
    w.device.advance("load")
    assert w.wrong_rows == 5


def preempted_with_open_save(w: UncheckedWorld) -> None:
    """A step in which b needs a block and only those of a, whose save is open, can be had."""
    w.add("b", range(7), max_tokens=4)
    w.add("busy", [1], max_tokens=6)
    w.add("a", range(5), max_tokens=3)
    w.step([1, 1, 1])
    w.step([1, 1, 1])  # b's two blocks are full
    assert w.blocks.num_free == 0
    w.save("s", "a")
    assert w.add("c", range(8), max_tokens=1) is Verdict.LATER
    w.submit()
    assert w.scheduler.counters.num_preemptions == 1
    assert set(w.running_ids()) == {"b", "busy"}
    run_only(w, "compute")
    run_only(w, "load")


@pytest.mark.parametrize("release", SAFE)
def test_r20_a_victim_with_an_open_save(release):
    """DingoCache#76: a save read blocks of a victim. Right: LATER in that step, or it waits."""
    w = world(4, 6, release=release)
    preempted_with_open_save(w)
    sat_out = w.scheduler.counters.num_held_back == 1
    assert sat_out == (release in HOST_HOLDS_BACK)
    assert ("b" in w.planned_ids) != sat_out
    assert "c" not in w.planned_ids
    w.collect()
    w.drain()
    assert w.wrong_rows == 0
    assert w.scheduler.counters.num_preemptions == 1
    assert {w.ended[name][0] for name in ("a", "b", "c", "busy")} == {"length"}


def test_r20_without_the_wait_a_save_reads_the_next_owner():
    """DingoCache#76 with policy early: the row that b wrote is in what a saved."""
    w = UncheckedWorld(case_config(4, 6, release="early"))
    preempted_with_open_save(w)
    assert w.wrong_rows == 1


# -- C. leaks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", SAFE)
def test_r27_a_load_that_was_read_keeps_nothing(release):
    """LMCache#3884: reading kept owner and pin. Right: a pool of 4 read twice still stores 4."""
    w = world(4, 6, release=release)
    w.add("busy", [1], max_tokens=4)
    w.step()
    for _ in range(2):
        assert w.load("chunk 1", 4)
        w.use("chunk 1")
        w.step()
    assert [w.load(f"chunk {number}", 4) for number in range(2, 6)] == [True] * 4
    w.drain()


# -- D. boundaries -------------------------------------------------------------------------------


@pytest.mark.parametrize("release", HOST_HOLDS_BACK)
def test_r37_a_load_counts_no_block_that_is_not_free(release):
    """vllm#6849: blocks about to come back counted as there. Right: 10 wanted, 8 free: LATER."""
    w = world(4, 11, release=release)
    w.load("x", 8)
    w.drop("x")  # its two blocks are still being written
    assert (w.blocks.num_free, w.blocks.num_withheld) == (8, 2)
    assert not w.load("all", 40)
    assert (w.blocks.num_free, w.blocks.num_withheld) == (8, 2)
    assert w.release.counters.num_refused_while_withheld == 1
    assert w.load("rest", 32)
    w.drain()
