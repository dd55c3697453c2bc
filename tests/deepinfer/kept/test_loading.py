"""Requests that go on from kept rows: what they load, when they run, and who waits for them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.engine import LLMEngine
from deepinfer.errors import DeviceTimeoutError, UserError
from deepinfer.sequence import SamplingParams
from tests.deepinfer.ahead.scenes import CONFIG, FAMILIES, Stage, model, prompt_of, sampled

KEPT = replace(CONFIG, store_bytes=1 << 20)


@pytest.fixture(params=list(FAMILIES))
def family(request):
    """Each of the networks."""
    return request.param


def keep(stage, seed=0, size=30, name="kept"):
    """Run a prompt to its end, so that its segments are in the store."""
    stage.add(name, prompt_of(seed, size), sampled(0, 2))
    while stage.engine.has_unfinished():
        stage.step()


def num_loaded(stage):
    """Tokens whose rows were loaded so far."""
    return stage.engine.scheduler.store_reuse.counters.num_loaded_tokens


@pytest.mark.parametrize(("size", "loaded"), [(7, 0), (8, 0), (9, 8), (16, 8), (17, 16), (30, 24)])
def test_a_prompt_loads_whole_segments_and_computes_its_last_token(family, size, loaded):
    """At 16 tokens the second segment would leave nothing to compute."""
    with Stage(family, KEPT) as stage:
        keep(stage)
        stage.add("again", prompt_of(0, size), sampled(0, 4))
        stage.finish()
        assert num_loaded(stage) == loaded


def test_what_was_sampled_is_kept_too(family):
    """A second turn that contains the first one's answer loads it."""
    with Stage(family, KEPT) as stage:
        stage.add("first", prompt_of(0, 14), sampled(0, 14))
        stage.finish()
        turn = np.concatenate((prompt_of(0, 14), stage.ended["first"].token_ids, [3, 4]))
        stage.add("second", turn.astype(np.int32), sampled(0, 3))
        stage.finish()
        assert num_loaded(stage) == 24  # of 27 that were computed


@pytest.mark.parametrize("budget", [6, 7, 40])
def test_prompts_in_chunks_are_kept_as_whole_ones_are(family, budget):
    """Where requests have state, chunks end where it can be kept."""
    with Stage(family, replace(KEPT, max_num_batched_tokens=budget)) as stage:
        keep(stage)
        keep(stage, name="again")
        assert num_loaded(stage) == 24


def test_a_chunk_ends_where_its_state_is_to_be_kept_and_once_it_is_no_more():
    """The prompt of 30 takes three steps more; one with another tail, loaded, none."""
    with Stage("v4", KEPT) as stage:
        keep(stage)
        assert [step.num_tokens for step in stage.steps][:4] == [8, 8, 8, 6]
        stage.steps.clear()
        stage.add("again", np.append(prompt_of(0, 24), [1, 2, 3]).astype(np.int32), sampled(0, 1))
        stage.finish()
        assert [step.num_tokens for step in stage.steps] == [3]


def test_others_run_while_rows_are_on_their_way(family):
    """With stream `load` stuck, the request that loads waits, and nobody else does."""
    device = SteppedCpuDevice()
    with Stage(family, KEPT, device=device) as stage:
        keep(stage)
        stage.add("runs", prompt_of(1, 5), sampled(0, 6))
        stage.step()
        stage.add("loads", prompt_of(0, 20), sampled(0, 6))
        for _ in range(3):  # a stepped device runs nothing that nobody waits for
            assert "runs" in stage.step().request_ids
        assert "loads" not in stage.delivered
        stage.finish()
        assert num_loaded(stage) == 16


def test_of_a_prompt_that_is_in_the_pool_only_the_rest_is_loaded():
    """Hits come first, and then what the store has behind them."""
    with Stage("qwen3", replace(KEPT, prefix_cache=True, num_blocks=17)) as stage:
        keep(stage, size=40)
        for number in range(3):  # evict some of its blocks, not all
            keep(stage, seed=1 + number, size=14, name=f"other{number}")
        before = stage.engine.scheduler.counters.num_hit_blocks
        keep(stage, size=40, name="again")
        hits = stage.engine.scheduler.counters.num_hit_blocks - before
        assert 0 < hits * CONFIG.block_size < 32
        assert num_loaded(stage) == 32 - hits * CONFIG.block_size


def test_with_state_a_hit_in_the_pool_counts_only_where_a_state_is_kept():
    """Blocks of the pool are taken over, and the state behind them is loaded."""
    with Stage("v4", replace(KEPT, prefix_cache=True)) as stage:
        keep(stage)
        loads = stage.engine.transfers.counters.bytes_loaded
        keep(stage, name="again")
        assert stage.engine.scheduler.counters.num_hit_blocks == 24 // CONFIG.block_size
        assert num_loaded(stage) == 0
        assert stage.engine.transfers.counters.bytes_loaded > loads  # the state


def test_a_preempted_request_loads_its_own_rows(family):
    """What it had computed is not computed again, down to the last segment."""
    with Stage(family, replace(KEPT, num_blocks=14, max_num_seqs=3)) as stage:
        for number in range(3):
            stage.add(f"r{number}", prompt_of(number, 14), sampled(0, 20))
        stage.finish()
        assert stage.engine.scheduler.counters.num_preemptions
        assert num_loaded(stage) > 0


def test_who_was_admitted_first_stays_before_the_others_though_it_loads():
    """The newest gives way, and that is not the one that came back last."""
    with Stage("qwen3", replace(KEPT, num_blocks=14, max_num_seqs=3), device="cpu") as stage:
        keep(stage, size=20)
        stage.add("first", prompt_of(0, 20), sampled(0, 20))
        stage.add("second", prompt_of(1, 12), sampled(0, 20))
        while stage.engine.has_unfinished():
            stage.step()
        assert stage.ended["first"].num_preemptions == 0
        assert stage.ended["second"].num_preemptions > 0


@pytest.mark.parametrize(("memory", "loaded"), [(6, 40), (3, 24)])
def test_of_a_prefix_in_files_that_memory_cannot_hold_the_first_part_is_loaded(
    tmp_path, memory, loaded
):
    """At once, and not after trying for the whole; five segments of 8 tokens in all."""
    blocks, _ = LLMEngine(
        model("qwen3")[0], CONFIG, device=SteppedCpuDevice(), weights=model("qwen3")[1]
    ).worker.runner.entry_bytes()
    room = memory * 2 * blocks.bytes_per_item
    files = {"store_directory": tmp_path, "store_directory_bytes": 1 << 20}
    with Stage("qwen3", replace(KEPT, max_model_len=60, **files)) as stage:
        keep(stage, size=44)
    with Stage("qwen3", replace(KEPT, max_model_len=60, store_bytes=room, **files)) as stage:
        keep(stage, size=44)
        assert num_loaded(stage) == loaded
        assert stage.engine.scheduler.store_reuse.counters.num_failed_loads == 0


@pytest.mark.parametrize(("timeout_s", "comes"), [(5.0, True), (0.2, False)])
def test_a_lone_request_waits_for_its_files_and_for_nothing_else(tmp_path, timeout_s, comes):
    """Reads go before what is to be written, and a disk that does not answer ends the wait."""
    files = {"store_directory": tmp_path, "store_directory_bytes": 1 << 20}
    config = replace(KEPT, timeout_s=timeout_s, **files)
    with Stage("qwen3", config) as stage:
        keep(stage)
    with Stage("qwen3", config) as stage:
        directory = stage.engine.store.directory
        read, save = directory.read, directory.save
        order = []

        def slow_read(*keys):
            order.append("read")
            time.sleep(0.05 if comes else 0.6)
            return read(*keys)

        def slow_save(*keys):
            order.append("save")
            time.sleep(0.5)
            return save(*keys)

        directory.read, directory.save = slow_read, slow_save
        keep(stage, seed=1, name="other")
        keep(stage, seed=2, name="another")  # six files to be written, 3 s
        stage.add("again", prompt_of(0, 30), sampled(0, 1))
        if comes:
            before = len(order)
            while stage.engine.has_unfinished():
                stage.step()
            assert order[before:].index("read") <= 1, "the save that has begun, and no other"
            assert num_loaded(stage) == 24
        else:
            with pytest.raises(DeviceTimeoutError, match="no file was read"):
                stage.step()


def test_two_that_want_the_same_load_it_each(family):
    """An entry may be read by several at a time."""
    with Stage(family, KEPT) as stage:
        keep(stage)
        for name in "ab":
            stage.add(name, prompt_of(0, 30), sampled(0, 4))
        stage.finish()
        assert num_loaded(stage) == 48


def test_a_fork_of_a_request_that_loads_starts_from_what_there_is(family):
    """Its parent has no rows yet, so it computes, or loads, its prompt itself."""
    with Stage(family, KEPT) as stage:
        keep(stage)
        stage.add("runs", prompt_of(1, 5), sampled(0, 9))
        stage.step()
        stage.add("parent", prompt_of(0, 20), sampled(0, 9))
        stage.step()
        stage.fork("parent", "child", sampled(1, 5))
        stage.finish()
        assert len(stage.ended["child"].token_ids) == 5
        assert num_loaded(stage) >= 16  # of its parent


def test_a_load_that_never_comes_is_a_time_out():
    """The host waits for it as for anything else, and says so."""
    config, weights = model("qwen3")
    with LLMEngine(config, replace(KEPT, timeout_s=0.2), device="cpu", weights=weights) as engine:
        engine.generate([prompt_of(0, 20)], SamplingParams(2))
        import threading

        stuck = threading.Event()
        engine.device.stream("load").submit(lambda: stuck.wait(5) and None)
        engine.add_request("a", prompt_of(0, 20), SamplingParams(2))
        with pytest.raises(DeviceTimeoutError):
            engine.step()
        stuck.set()


def test_a_runner_without_rows_is_refused():
    """It has nothing that could be kept."""

    class Nothing:
        def copy_blocks(self, pairs): ...

        def copy_states(self, pairs): ...

        def forward(self, plan): ...

    config, _ = model("qwen3")
    with pytest.raises(UserError, match="Nothing has no rows that could be kept"):
        LLMEngine(config, KEPT, device=SteppedCpuDevice(), runner=Nothing())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"store_bytes": -1}, "store_bytes"),
        (
            {"store_bytes": 0, "store_directory": Path("x"), "store_directory_bytes": 9},
            "store_directory",
        ),
        ({"store_bytes": 9, "store_directory_bytes": 9}, "store_directory_bytes"),
        ({"store_bytes": 9, "store_directory": Path("x")}, "store_directory_bytes"),
        ({"store_bytes": 9, "store_directory": "x"}, "store_directory: 'x'"),
        ({"store_bytes": 1 << 60}, "store_bytes: .* the host has"),
        ({"load_stream": "laod"}, "load_stream"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    """In one line that names the key."""
    config, weights = model("qwen3")
    with pytest.raises(UserError, match=message):
        LLMEngine(config, replace(CONFIG, **settings), device=SteppedCpuDevice(), weights=weights)
