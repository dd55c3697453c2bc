"""Blocks found by what they hold, in the whole engine: the tokens of a run that shares nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer.block_manager import BlockManager
from deepinfer.config import EngineConfig
from deepinfer.device import open_device
from deepinfer.engine import LLMEngine
from deepinfer.errors import UserError
from deepinfer.models.hybrid.layer_plan import v4_config
from deepinfer.models.weights import load_weights
from deepinfer.names import FREE_ORDERS, KEYED_FREE_ORDERS, RELEASE_POLICIES
from deepinfer.prefix_cache import CachingBlockManager, block_keys
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.scheduler import Scheduler
from deepinfer.sequence import SamplingParams
from tests.deepinfer.step_plans import TINY
from tests.hybrid_configs import v4_raw

CONFIG = EngineConfig(
    block_size=4,
    num_blocks=33,
    max_num_seqs=4,
    max_num_batched_tokens=24,
    max_model_len=64,
    prefix_cache=True,
    checks="all",
)


@pytest.fixture(scope="module")
def weights():
    """One set of weights for every engine of this file."""
    return load_weights(TINY, open_device("cpu-stepped"))


@pytest.fixture
def engine_with(weights):
    def make(block_manager=BlockManager, **settings):
        config = replace(CONFIG, **settings)
        return LLMEngine(
            TINY, config, device="cpu-stepped", weights=weights, block_manager=block_manager
        )

    return make


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, count).astype(np.int32)


def run(engine, prompts, max_tokens=5, temperature=0.0):
    """All prompts, one after the other has begun; tokens by request."""
    outputs, waiting = {}, [(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    while waiting or engine.has_unfinished():
        if waiting:
            name, prompt = waiting.pop(0)
            sampling = SamplingParams(max_tokens, temperature=temperature, seed=len(waiting))
            engine.add_request(name, prompt, sampling)
        output = engine.step()
        if output is not None:
            outputs.update((e.request_id, e.token_ids.tolist()) for e in output.finished)
    assert len(engine.findings) == 0, engine.findings.first[:3]
    assert engine.blocks.num_free == engine.blocks.num_usable
    engine.blocks.check_integrity()
    return outputs


def prompts_that_begin_alike(seed=0, count=12):
    """Three system prompts with tails of their own; some are repeated as they are."""
    rng = np.random.default_rng(seed)
    systems = [tokens(int(rng.integers(6, 20)), 100 + number) for number in range(3)]
    made = []
    for number in range(count):
        tail = tokens(int(rng.integers(0, 9)), 200 + number) if rng.random() < 0.7 else tokens(0)
        made.append(np.concatenate((systems[int(rng.integers(3))], tail)))
    return made


@pytest.mark.parametrize("num_prompt", [3, 4, 5, 8, 9])
def test_a_second_request_computes_what_no_full_block_holds(engine_with, num_prompt):
    """Hits are full blocks, and the last token is always computed: at 8 tokens one block of two."""
    engine, prompt = engine_with(), tokens(num_prompt)
    first = engine.generate([prompt], SamplingParams(4))[0]
    again = engine.generate([prompt], SamplingParams(4))[0]
    assert again.token_ids.tolist() == first.token_ids.tolist()
    assert engine.scheduler.counters.num_hit_blocks == (num_prompt - 1) // 4


def test_answers_are_found_too(engine_with):
    """What a request sampled is part of the chain: a second turn that contains it hits it."""
    engine, prompt = engine_with(), tokens(6)
    first = engine.generate([prompt], SamplingParams(7))[0]
    turn = np.concatenate((prompt, first.token_ids, tokens(3, seed=1)))
    engine.generate([turn], SamplingParams(2))
    # 13 tokens were known at its end and 12 of them computed: three full blocks.
    assert engine.scheduler.counters.num_hit_blocks == 3


def test_one_that_runs_is_shared_by_one_that_comes(engine_with):
    """A hit needs no free block: the owner may still be decoding."""
    engine, prompt = engine_with(), tokens(9)
    engine.add_request("a", prompt, SamplingParams(8))
    engine.step()
    engine.add_request("b", prompt, SamplingParams(8))
    engine.step()
    table_a, table_b = (
        engine.scheduler.seqs.table(engine.scheduler.find(name).row) for name in "ab"
    )
    assert table_a[:2].tolist() == table_b[:2].tolist()
    assert engine.blocks.ref_counts(table_a[:2]).tolist() == [2, 2]


def test_two_that_computed_the_same_block_share_one_in_the_end(engine_with):
    """Admitted in one step, neither could hit the other; the second's table is pointed anew."""
    engine, prompt = engine_with(), tokens(9)
    for name in "ab":
        engine.add_request(name, prompt, SamplingParams(8))
    engine.step()
    table_a, table_b = (
        engine.scheduler.seqs.table(engine.scheduler.find(name).row) for name in "ab"
    )
    assert table_a[:2].tolist() == table_b[:2].tolist()
    assert engine.scheduler.reuse.num_repointed == 2
    assert engine.blocks.num_held == 4  # two shared, and a tail each


@pytest.mark.parametrize("order", [*FREE_ORDERS, *KEYED_FREE_ORDERS])
@pytest.mark.parametrize("release", RELEASE_POLICIES)
def test_tokens_are_those_of_a_run_without_reuse(engine_with, release, order):
    """Under every policy and order, in a pool small enough to evict."""
    prompts = prompts_that_begin_alike()
    plain = run(engine_with(prefix_cache=False), prompts)
    engine = engine_with(release=release, free_order=order, num_blocks=17)
    assert run(engine, prompts) == plain
    assert engine.scheduler.counters.num_hit_blocks > 0
    assert engine.blocks.counters.num_evictions > 0


@pytest.mark.parametrize("overlap", ["off", "on", "2"])
@pytest.mark.parametrize(("drafts", "temperature"), [(0, 0.0), (3, 0.0), (5, 0.8)])
@pytest.mark.parametrize("num_blocks", [12, 33])
def test_tokens_are_the_same_with_steps_ahead_and_drafts(
    engine_with, overlap, drafts, temperature, num_blocks
):
    """Hits, drafts, look-ahead and preemption together."""
    prompts = prompts_that_begin_alike(seed=1)
    plain = run(engine_with(prefix_cache=False), prompts, 9, temperature)
    engine = engine_with(overlap=overlap, drafts=drafts, num_blocks=num_blocks)
    assert run(engine, prompts, 9, temperature) == plain
    assert engine.scheduler.counters.num_hit_blocks > 0


def test_a_preempted_request_finds_its_own_rows(engine_with):
    """What it had committed is published, so it recomputes only what was evicted meanwhile."""
    engine = engine_with(num_blocks=12)
    prompts = [tokens(12, seed) for seed in range(3)]
    for number, prompt in enumerate(prompts):
        engine.add_request(f"r{number}", prompt, SamplingParams(16))
    while engine.has_unfinished():
        engine.step()
    assert engine.scheduler.counters.num_preemptions > 0
    assert engine.scheduler.counters.num_hit_blocks > 0


def test_forks_share_what_is_published_and_copy_no_more_than_they_must(engine_with):
    """A full tail that was copied for a fork is given up for the original when it is published."""
    engine = engine_with()
    engine.add_request("a", tokens(8), SamplingParams(9))
    engine.step()
    engine.fork("a", "b", SamplingParams(9))
    while engine.has_unfinished():
        engine.step()
    assert len(engine.findings) == 0, engine.findings.first
    assert engine.blocks.num_free == engine.blocks.num_usable


def test_a_model_with_state_is_refused():
    """Its rows alone are not enough to go on from."""
    config = replace(CONFIG, block_size=8)
    with pytest.raises(UserError, match="have state beside their blocks"):
        LLMEngine(v4_config(v4_raw(ratios=(4, 16), window=8)), config, device="cpu-stepped")


def test_a_block_manager_of_another_kind_is_refused(engine_with):
    """A pool that cannot find blocks is no silent miss."""

    class Other(BlockManager):
        pass

    with pytest.raises(UserError, match="Other does not find blocks by key"):
        engine_with(block_manager=Other)


def test_hits_that_a_look_frees_count_as_taken_from_the_free_list():
    """Three blocks are free and two hits withheld; the look that `polled` has when an allocation
    would fail frees both, and the four others that are needed are still not there."""

    class Passed:
        def query(self):
            return self.passed

        passed = False

    config = replace(CONFIG, num_blocks=9, max_model_len=32, release="polled", checks="off")
    blocks = CachingBlockManager(9)
    queue = ReleaseQueue(blocks, "polled")
    scheduler, event = Scheduler(config, blocks, queue), Passed()
    prompt = tokens(22)
    published = blocks.allocate(2)
    first, second = block_keys([], prompt, 2, 4)
    blocks.publish(int(published[0]), first)
    blocks.publish(int(published[1]), second, first)
    queue.give_up(published, Fence(1, event))
    others = blocks.allocate(3)
    scheduler.add("r", prompt, SamplingParams(1))
    event.passed = True
    assert scheduler.schedule() is None
    assert (blocks.num_free, scheduler.num_waiting) == (5, 1)
    blocks.release(others)
    assert scheduler.schedule() is not None
