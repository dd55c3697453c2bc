"""Reports about rows kept beyond the pool, as cases with the right value for each.

Whole engines with a store, whose entries end every 8 tokens here, on a device whose streams stand
still until a case runs them. A store on streams of its own is safe only where each copy waits for
what it must: where it is cheap, policy `early` shows that the case can fail.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from deepinfer.block_manager import Verdict
from deepinfer.names import LOAD_STREAMS, OVERLAPS
from deepinfer.sequence import SamplingParams
from tests.cases.case_worlds import HOST_HOLDS_BACK, SAFE, run_only
from tests.cases.stores import findings, keep, num_loaded, run, segment_bytes, stage
from tests.deepinfer.ahead.scenes import prompt_of, sampled
from tests.deepinfer.store.tiered import OneByOne

pytestmark = pytest.mark.usefixtures("short_segments")


def labels(s):
    """What has run so far, in order, without the keys of what was saved."""
    return [label.split(" ")[0] if "save" in label else label for _, label in s.device.log]


# -- B. freed while somebody still uses it -------------------------------------------------------


def load_behind_a_step(s):
    """A load wants all 4 blocks, of which 2 were those of a request that ended with step 2 open.

    Returns whether they were granted before result 2.
    """
    keep(s, 1, 15)
    prompt, stop = prompt_of(2, 5), s.truth.output(prompt_of(2, 5), sampled(0, 1)).token_ids[0]
    s.add("a", prompt, SamplingParams(4, stop_token_id=int(stop)))
    s.submit()
    s.submit()
    held = s.seqs.table(s.engine.scheduler.find("a").row)
    assert len(held) == 2
    assert s.add("b", prompt_of(1, 15), sampled(0, 1)) is Verdict.LATER
    s.engine.collect()  # result 1 is the end of a
    s.delivered["a"].append(int(stop))
    assert s.engine.scheduler.running == []
    if s.config.release in HOST_HOLDS_BACK:
        assert not set(s.engine.blocks.free_ids()) & set(held.tolist())
    assert not s.submit()  # whoever loads does not run
    granted = s.state_of("b") == "loading"
    run_only(s, "load")
    return granted


@pytest.mark.parametrize("release", SAFE)
def test_r12_a_load_into_blocks_of_a_request_that_ended_in_flight(release):
    """vllm#45357: they came back with step 2 open. Right: LATER until result 2, or the load waits.

    B=4, 4 usable; a holds 2, steps 1 and 2 are queued, result 1 is its end; b wants 4.
    """
    with stage(num_blocks=5, overlap="on", discipline="lifo", release=release) as s:
        granted = load_behind_a_step(s)
        assert granted == (release not in HOST_HOLDS_BACK)
        run(s)
        assert num_loaded(s) == 8
        ran = [label for _, label in s.device.log]
        last = max(i for i, label in enumerate(ran) if label == "load b")
        before = [label for label in ran[:last] if label.startswith("forward")]
        assert len(before) == 3  # the one that kept, and both of a
        s.check_drained()


def test_r12_without_the_wait_the_load_and_the_step_mix():
    """vllm#45357 with policy early: the case can fail, and does."""
    with stage(num_blocks=5, overlap="on", discipline="lifo", release="early") as s:
        assert load_behind_a_step(s)
        assert findings(s) == {"order"}


@pytest.mark.parametrize(("family", "num_saves"), [("qwen3", 800), ("v4", 200)])
def test_r15_every_save_is_equal_to_what_was_written(family, num_saves):
    """vllm#45704: a save read before the rows were written. Right: 1000 of 1000 are equal.

    A state is saved behind a step that is open, blocks behind one that is over, the streams running
    in any order. What is right is what an engine saves whose device is waited for at each step.
    """
    rng, seen, num_open = np.random.default_rng(15), set(), 0
    changes = {"checks": "order", "max_num_seqs": 1}
    if family != "qwen3":
        changes["num_state_slots"] = 2  # of one slot to hand out, what its last owner left is known
    with stage(family, **changes) as strict, stage(family, overlap="on", **changes) as s:
        while len(seen) < num_saves:
            prompt = rng.integers(0, 61, 34).astype(np.int32)
            for own in (strict, s):
                own.engine.add_request(f"r{len(seen)}", prompt, SamplingParams(2))
            while strict.engine.has_unfinished():
                strict.engine.step()
                strict.device.synchronize()
            while s.engine.has_unfinished():
                s.engine.submit_all()
                num_open += s.device.runnable() == ["compute"]  # a copy may wait for it
                for _ in range(rng.integers(5)):
                    if can_run := s.device.runnable():
                        s.device.advance(str(rng.choice(can_run)))
                s.engine.collect()
            new = strict.engine.store.host._entries.keys() - seen
            assert len(new) == (4 if family == "qwen3" else 8)  # segments, and states behind them
            seen |= new
            for key in new:
                right, saved = (own.engine.store.host._entries[key].buffer for own in (strict, s))
                assert saved.tobytes() == right.tobytes()
        assert num_open > num_saves / 10
        assert findings(s) == set()


# A scene: one request's segment is being saved while it ends, another's rows are loaded into its
# blocks, and computed behind them. Of the load the copy is as early as can be, of the save as late.


def load_behind_a_save(s, size):
    """Gives what ran of it, in order."""
    keep(s, 1, size)
    s.add("a", prompt_of(2, 13), sampled(0, 2))
    s.add("b", prompt_of(1, size), sampled(0, 2))
    begin = len(s.device.log)
    s.step()  # its segment is being saved
    s.step()  # and it ends
    assert "a" in s.ended
    s.submit()
    for stream in (s.config.load_stream, "compute", "copy"):
        run_only(s, stream)
    run(s)
    return [label for label in labels(s)[begin:] if not label.startswith("forward step 1")]


@pytest.mark.parametrize("size", [9, 14])  # part of the blocks is loaded
@pytest.mark.parametrize("load_stream", LOAD_STREAMS)
@pytest.mark.parametrize("release", SAFE)
def test_r16_a_load_waits_for_the_save_and_is_waited_for(release, load_stream, size):
    """TensorRT-LLM#9056: b1 -> h1 open, h2 -> b1 began. Right: it waits, and who reads b1 waits."""
    changes = {"num_blocks": 5, "discipline": "lifo", "load_stream": load_stream}
    with stage(release=release, **changes) as s:
        ran = load_behind_a_save(s, size)
        save, load = ran.index("save_blocks"), ran.index("load b")
        assert save < load < len(ran) - 1
        assert num_loaded(s) == 8
        s.check_drained()


def test_r16_without_the_wait_a_load_and_a_save_mix():
    """TensorRT-LLM#9056 with policy early: the case can fail, and does."""
    with stage(num_blocks=5, discipline="lifo", release="early") as s:
        keep(s, 1, 9)
        s.add("a", prompt_of(2, 13), sampled(0, 2))
        s.add("b", prompt_of(1, 9), sampled(0, 2))
        s.step()
        s.step()
        s.submit()
        assert "order" in findings(s)


@pytest.mark.parametrize("second", ["load", "compute"])
@pytest.mark.parametrize("release", SAFE)
def test_r16_a_writer_waits_for_a_load_that_was_given_up(release, second):
    """TensorRT-LLM#9056: a load is a writer like any other. Right: the next one waits for it."""
    with stage(num_blocks=6, discipline="lifo", release=release) as s:
        for seed in (1, 2):
            keep(s, seed, 14)
        s.add("busy", prompt_of(0, 1), sampled(0, 3))
        s.step()
        s.add("x", prompt_of(1, 14), sampled(0, 2))
        s.submit()
        assert s.state_of("x") == "loading"
        s.abort("x")
        s.add("y", prompt_of(2 if second == "load" else 3, 14), sampled(0, 2))
        s.collect()
        s.submit()
        for stream in ("compute", "load"):
            run_only(s, stream)
        run(s)
        ran = labels(s)
        assert ("load y" in ran) == (second == "load")
        assert num_loaded(s) == (8 if second == "load" else 0)
        s.check_drained()


# Only under `ordered` does anybody get blocks with open work on them.


@pytest.mark.parametrize("overlap", ["off", "on"])  # on: nobody runs in the step that lets x in
@pytest.mark.parametrize("second", ["load", "compute"])
def test_r16_a_wait_outlives_the_load_that_had_to_wait(tmp_path, second, overlap):
    """TensorRT-LLM#9056: who got its blocks next did not wait. Right: they do.

    x is let in to load into blocks whose save is open, and given up before its bytes have come from
    their files. Then y gets them.
    """
    files = {"store_directory": tmp_path, "store_directory_bytes": 1 << 20}
    with stage(**files) as s:
        keep(s, 1, 14)
    changes = {"num_blocks": 6, "discipline": "lifo", "overlap": overlap, "release": "ordered"}
    with stage(**changes, **files) as s:
        keep(s, 2, 14)
        s.engine.store._worker.shutdown()
        s.engine.store._worker = OneByOne()  # reads when it is waited for
        s.add("busy", prompt_of(0, 1), sampled(0, 3))
        s.add("a", prompt_of(3, 13), sampled(0, 2))
        s.add("x", prompt_of(1, 14), sampled(0, 2))
        while "a" not in s.ended:
            s.step()
        begin = len(s.device.log)
        assert s.submit() == (overlap == "off")
        assert s.state_of("x") == "loading"
        s.abort("x")
        s.add("y", prompt_of(2 if second == "load" else 4, 14), sampled(0, 2))
        s.collect()
        while "y" not in s.ended:
            s.submit()
            for stream in ("load", "compute", "copy"):
                run_only(s, stream)
            if s.plans:
                s.collect()
        run(s)
        ran = labels(s)[begin:]
        of_y = "load y" if second == "load" else f"forward step {s.steps[-2].step}"
        assert ran.index("save_blocks") < ran.index(of_y)
        assert num_loaded(s) == (8 if second == "load" else 0)
        s.check_drained()


@pytest.mark.parametrize("release", SAFE)
def test_r19_a_buffer_under_an_open_copy_is_nobody_else_s(release):
    """LMCache#4830: freed in mid-copy. Right: room for one: refused until copy 1 has ended."""
    with stage() as s:
        one = segment_bytes(s)
    with stage(store_bytes=one, release=release) as s:
        s.add("a", prompt_of(0, 8), sampled(0, 6))
        s.step()
        assert len(s.engine.store.host.handles) == 1
        s.add("b", prompt_of(1, 8), sampled(0, 6))
        s.step()
        if release != "blocking":  # which has waited for the copy
            counters = s.engine.transfers.counters
            assert (counters.num_saves, counters.num_refused_saves) == (0, 1)
        run_only(s, "copy")
        s.add("c", prompt_of(2, 8), sampled(0, 6))
        s.finish()
        assert s.engine.store.host.num_bytes == one
        assert s.engine.store.host.counters.num_evictions > 0
        keep(s, 2, 9)
        assert num_loaded(s) == 8


def preempted_while_saved(s):
    """Who came last lacks a block and gives way, its save open; others want its blocks at once."""
    s.add("b", prompt_of(1, 7), sampled(0, 5))
    s.add("busy", prompt_of(2, 1), sampled(0, 9))
    s.add("a", prompt_of(0, 8), sampled(0, 4))
    s.step()  # 5 blocks, all there are; a's first 8 rows are being saved
    assert s.engine.blocks.num_free == 0
    s.submit()
    assert s.state_of("a") == "waiting"
    for _ in range(2):
        run_only(s, "compute")
        s.collect()
        s.submit()


@pytest.mark.parametrize("release", SAFE)
def test_r20_a_victim_s_rows_are_kept_and_not_the_next_owner_s(release):
    """DingoCache#76: the save read freed blocks, and the poison was kept. Right: its own rows.

    Whoever wants the blocks in the same step waits, or its writes do; the victim comes back with
    what was kept, and its tokens are right.
    """
    with stage(num_blocks=6, discipline="lifo", release=release) as s:
        preempted_while_saved(s)
        run(s)
        num_preemptions = s.engine.scheduler.counters.num_preemptions
        assert num_loaded(s) == 8 * num_preemptions > 0
        keep(s, 0, 12)
        assert num_loaded(s) == 8 * num_preemptions + 8
        s.check_drained()


def test_r20_without_the_wait_the_next_owner_s_rows_are_kept():
    """DingoCache#76 with policy early: the case can fail, and does."""
    with stage(num_blocks=6, discipline="lifo", release="early") as s:
        preempted_while_saved(s)
        assert findings(s) == {"order"}


@pytest.mark.parametrize("release", ["deferred", "polled", "step"])
def test_r23_what_is_withheld_has_something_that_will_pass(release):
    """vllm-ascend#10843: delayed, and nothing under way. Right: an event each, or free at once."""
    for store_bytes, num_open in ((1 << 20, 2), (8, 0)):  # all is kept; nothing is
        with stage(store_bytes=store_bytes, release=release) as s:
            s.add("busy", prompt_of(0, 1), sampled(0, 6))
            s.add("a", prompt_of(1, 9), sampled(0, 1))
            s.step()
            assert "a" in s.ended
            assert s.engine.blocks.num_withheld == num_open
            assert all(fence.event is not None for _, fence in s.engine.release.fenced())
            assert s.engine.transfers.any_open == (num_open > 0)
            s.finish()


# -- C. leaks ------------------------------------------------------------------------------------


def test_r27_what_was_loaded_can_be_evicted():
    """LMCache#3884: reading kept owner and pin. Right: room for 4, 1 loaded twice, 4 new: kept."""
    with stage() as s:
        one = segment_bytes(s)
    with stage(store_bytes=4 * one) as s:
        for _ in range(3):
            keep(s, 0, 9)
        assert num_loaded(s) == 16
        for seed in range(1, 5):
            keep(s, seed, 9)
        counters = s.engine.transfers.counters
        assert (counters.num_saves, counters.num_refused_saves) == (5, 0)
        for seed in range(1, 5):
            keep(s, seed, 9)
        assert num_loaded(s) == 16 + 4 * 8


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("family", ["qwen3", "v4"])
def test_r27_a_full_store_goes_on_being_hit(family, overlap):
    """LMCache#1756: the hit rate slid to 0. Right: each new prompt takes the oldest one's place.

    With steps ahead the state behind a segment is saved before the segment is.
    """
    with stage(family) as s:
        keep(s, 0, 30)
        room = s.engine.store.host.num_bytes
    with stage(family, overlap=overlap, store_bytes=3 * room // 2) as s:
        for seed in range(6):
            keep(s, seed, 30)
            keep(s, seed, 30)
            assert num_loaded(s) == (seed + 1) * 24


@pytest.mark.parametrize("family", ["qwen3", "v4"])
def test_r28_random_aborts_leave_nothing_behind(tmp_path, family):
    """TensorRT-LLM#699: leaks after disconnects. Right: 120 requests, drained as at the start.

    They are aborted at any moment: waiting, loading from memory or files, running, in flight.
    """
    rng, aborted = np.random.default_rng(28), deque()
    changes = {"num_blocks": 17, "overlap": "on", "release": "polled", "store_bytes": 100_000}
    files = {"store_directory": tmp_path, "store_directory_bytes": 1 << 22}
    with stage(family, **changes, **files) as s:
        for number in range(120):
            prompt = prompt_of(int(rng.integers(4)), int(rng.integers(3, 26)))
            s.add(f"r{number}", prompt, sampled(0, int(rng.integers(1, 4))))
            for _ in range(rng.integers(3)):
                s.submit()
                if (live := s.live) and rng.random() < 0.4:
                    name = str(rng.choice(live))
                    aborted.append(s.state_of(name))
                    s.abort(name)
                for _ in range(rng.integers(6)):
                    if can_run := s.device.runnable():
                        s.device.advance(str(rng.choice(can_run)))
                if s.plans and rng.random() < 0.8:
                    s.collect()
        run(s)
        s.check_drained()
        assert {"waiting", "loading", "running"} <= set(aborted)


# -- D. boundaries -------------------------------------------------------------------------------


def test_r37_a_load_needs_a_block_for_each_it_fills():
    """vllm#6849: swap-in counted some as free of cost. Right: 10 wanted, 8 free: LATER."""
    with stage(num_blocks=11) as s:
        keep(s, 0, 39)
        s.add("busy", prompt_of(1, 5), sampled(0, 3))
        s.step()
        assert s.engine.blocks.num_free == 8
        assert s.add("again", prompt_of(0, 39), sampled(0, 1)) is Verdict.LATER
        s.submit()
        assert (s.state_of("again"), s.engine.blocks.num_free) == ("waiting", 8)
        assert s.engine.scheduler.counters.num_later_blocks == 1
        s.collect()
        s.finish()
        assert num_loaded(s) == 32
