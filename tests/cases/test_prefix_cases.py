"""Reports about blocks found by what they hold, as cases with the right value for each.

What holds for the pool alone is beside its tests (`tests/deepinfer/test_prefix_cache.py`): R5
TensorRT-LLM#12648, R74 llm-d-inference-sim#704. Here whole engines look, wait, take over and
publish.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer.block_manager import Verdict
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.drafters.acceptance import parse_acceptance
from deepinfer.drafters.base import Drafts
from deepinfer.engine import LLMEngine
from deepinfer.names import RELEASE_POLICIES
from deepinfer.prefix_cache import CachingBlockManager, block_keys, chain
from deepinfer.sequence import SamplingParams
from tests.deepinfer.ahead.scenes import CONFIG, Stage, model, prompt_of, sampled

REUSE = replace(CONFIG, prefix_cache=True)


def stage(block_size, num_blocks, **changes):
    """An engine whose pool has the case's size and which nothing else limits."""
    settings = {"max_num_batched_tokens": 512, "max_model_len": 512} | changes
    return Stage("qwen3", replace(REUSE, block_size=block_size, num_blocks=num_blocks, **settings))


def publish(s, prompt, name="first"):
    """Run a request to its end, so that its full blocks can be found."""
    s.add(name, prompt, sampled(0, 1))
    while s.engine.has_unfinished():
        s.step()


def long_prompt(seed, size):
    """Tokens of a text longer than `prompt_of` has."""
    return np.random.default_rng(seed).integers(0, 61, size).astype(np.int32)


def table(s, name):
    """The blocks of a running request."""
    return s.seqs.table(s.engine.scheduler.find(name).row).tolist()


# -- A. counts -----------------------------------------------------------------------------------


def test_r9_what_is_matched_and_held_is_not_evicted():
    """mini-sglang#52: the lock began at the parent. Right: A and B stay; unlocked, 2 can go."""
    blocks = CachingBlockManager(6)
    keys = [chain(None, [1]), chain(chain(None, [1]), [2])]
    table_ab = blocks.allocate(2)
    for block_id, key, parent in zip(table_ab.tolist(), keys, [None, keys[0]], strict=True):
        blocks.publish(block_id, key, parent)
    blocks.release(table_ab)
    blocks.take_hits(blocks.match(keys, 2))
    others = blocks.allocate(blocks.num_free)
    assert blocks.counters.num_evictions == 0
    assert blocks.ref_counts(table_ab).tolist() == [1, 1]
    assert blocks.match(keys, 2) == table_ab.tolist()
    assert not set(others.tolist()) & set(table_ab.tolist())
    blocks.release(table_ab)
    assert blocks.num_free == 2
    blocks.allocate(2)
    assert blocks.counters.num_evictions == 2
    assert blocks.match(keys, 2) == []


@pytest.mark.parametrize("release", RELEASE_POLICIES)
def test_r10_a_private_copy_is_free_when_no_table_names_it(release):
    """mini-sglang#142: it was freed under a live table. Right: B names A's two, its own are free.

    A and B prefill the same 8 tokens, B=4, in one step.
    """
    with stage(4, 9, release=release) as s:
        for name in "ab":
            s.add(name, prompt_of(0, 8), sampled(0, 4))
        s.submit()
        own = table(s, "b")[:2]
        assert not set(own) & set(table(s, "a"))
        s.collect()
        shared = table(s, "a")[:2]
        assert table(s, "b")[:2] == shared
        assert s.engine.blocks.ref_counts(np.array(shared)).tolist() == [2, 2]
        assert s.engine.blocks.ref_counts(np.array(own)).tolist() == [0, 0]
        s.finish()


# -- D. boundaries -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cached", "size", "hit"), [(32, 32, 16), (33, 33, 32), (1, 1, 0), (16, 16, 0)]
)
def test_r33_at_least_one_token_is_computed(cached, size, hit):
    """vllm#11186: a prompt wholly cached. Right: B=16, 32 cached: hit 16, compute 16; 33: 32, 1."""
    with stage(16, 12) as s:
        publish(s, long_prompt(1, cached))
        s.steps.clear()
        s.add("again", long_prompt(1, size), sampled(0, 1))
        s.finish()
        assert s.engine.scheduler.counters.num_hit_blocks * 16 == hit
        assert [step.num_tokens for step in s.steps] == [size - hit]


def test_r34_what_is_scheduled_is_counted_behind_the_hit():
    """nano-vllm#210: 465 were scheduled. Right: B=256, first block cached: 209, from 256 on."""
    network, weights = model("qwen3")
    sizes = {"block_size": 256, "max_num_batched_tokens": 512, "max_model_len": 512}
    config = replace(REUSE, num_blocks=6, **sizes)
    with LLMEngine(network, config, device=SteppedCpuDevice(), weights=weights) as engine:
        engine.generate([long_prompt(1, 257)], SamplingParams(1))
        engine.add_request("again", long_prompt(1, 465), SamplingParams(1))
        engine.submit()
        (step,) = engine._in_flight
        assert step.plan.num_tokens == 209
        assert step.plan.positions.tolist() == list(range(256, 465))
        engine.collect()


def test_r37_hits_that_nobody_owns_come_out_of_what_is_free():
    """vllm#6849: they counted as free of cost. Right: 10 wanted, 2 evicted, 8 free: LATER.

    With 3 look-ahead slots and 2 of them empty in the tail, only the third needs a block.
    """
    with stage(4, 11, max_num_seqs=2) as s:
        publish(s, prompt_of(0, 40))
        s.add("busy", prompt_of(1, 7), sampled(0, 2))  # evicts two, and has them
        s.step()
        assert s.engine.blocks.num_free == 8
        assert s.engine.blocks.counters.num_evictions == 2
        assert s.add("again", prompt_of(0, 40), sampled(0, 1)) is Verdict.LATER
        assert s.submit()
        assert s.state_of("again") == "waiting"
        assert s.engine.blocks.num_free == 8
        s.finish()
    with stage(4, 11, drafts=3) as s:
        s.add("a", prompt_of(0, 5), sampled(0, 8))
        s.step()  # 5 rows and the sixth token: with 3 drafts positions 5 to 8
        s.submit()
        assert len(table(s, "a")) == 3
        s.finish()


# -- E. truth ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_blocks", "num_hits"), [(3, 0), (7, 1)])
def test_r38_a_recycled_block_is_not_found_by_what_it_held(num_blocks, num_hits):
    """nano-vllm#163: a stale hash. Right: X in block 1, Y in block 1, then X again: hit 0.

    With room for both, X is found.
    """
    with stage(4, num_blocks) as s:
        for number, seed in enumerate((0, 1, 0)):
            s.add(f"r{number}", prompt_of(seed, 5), sampled(0, 2))
            s.finish()
        assert s.engine.scheduler.counters.num_hit_blocks == num_hits


@pytest.mark.parametrize(("accepted", "num_rows", "num_found"), [([1, 0], 8, 2), ([0], 7, 1)])
def test_r39_rejected_text_is_not_found(accepted, num_rows, num_found):
    """vllm#18668: B=4, 6 computed, 7 known, K=3. Right: accept 1: 2 blocks; 0: 1, whatever lies
    in the second one."""
    proposed = []

    class Watched:
        """A drafter that remembers what it said."""

        def __init__(self, drafter):
            self.prepare, self.start = drafter.prepare, drafter.start
            self._drafter = drafter

        def propose(self, asked):
            drafts, counts = self._drafter.propose(asked)
            known = asked.tokens[asked.slots[0], : asked.lengths[0]]
            proposed.append((known.numpy().copy(), drafts[0, : counts[0]].numpy().copy()))
            return Drafts(drafts, counts)

    config = replace(REUSE, drafts=3)
    with Stage("qwen3", config, parse_acceptance(accepted), wrap=Watched) as s:
        s.add("a", prompt_of(0, 6), sampled(0, 9))
        s.step()
        known, drafts = proposed[0]
        text = np.concatenate((known, drafts, [1, 2])).astype(np.int32)  # what the step will write

        def find(tokens):
            return len(s.engine.blocks.match(block_keys([], tokens, 2, 4), 2))

        s.submit()
        assert len(drafts) == 3
        assert find(text) == 1  # before it is verified
        s.collect()
        row = s.engine.scheduler.find("a").row
        assert s.seqs.num_computed_tokens[row] == num_rows
        assert find(s.known("a")) == num_found
        assert find(text) == num_found
        other = text.copy()
        other[num_rows:] = (other[num_rows:] + 1) % 61
        assert find(other) == num_found
        s.finish()


def test_r43_the_first_look_is_no_promise():
    """vllm#17305: it was remembered. Right: look-up says 2, both are evicted: hit 0."""
    with stage(4, 6, max_num_seqs=2) as s:
        publish(s, prompt_of(0, 9))
        s.add("busy", prompt_of(1, 11), sampled(0, 7))  # three blocks, then all five
        s.step()
        assert s.add("again", prompt_of(0, 9), sampled(0, 1)) is Verdict.LATER
        assert len(s.engine.scheduler.reuse.match(s.engine.scheduler.find("again"))) == 2
        while "again" not in s.ended:
            s.step()
        assert s.engine.blocks.counters.num_evictions >= 2
        s.finish()
        assert s.engine.scheduler.counters.num_hit_blocks == 0


@pytest.mark.parametrize(("evicted", "num_tokens"), [(False, [32]), (True, [64, 16])])
def test_r44_what_two_share_is_held_when_they_are_let_in(evicted, num_tokens):
    """TensorRT-LLM#12665: reuse was counted twice. Right: 64 fit 16 + 16 behind 48 cached, or one.

    After the eviction the first request computes all 64, and the second hits what it left.
    """
    with stage(16, 10, max_num_batched_tokens=64) as s:
        publish(s, long_prompt(1, 48))
        if evicted:
            publish(s, long_prompt(2, 64), "other")
            publish(s, long_prompt(3, 64), "another")
            publish(s, long_prompt(4, 64), "third")
        s.steps.clear()
        for number in range(2):
            own = long_prompt(10 + number, 16)
            prompt = np.concatenate((long_prompt(1, 48), own)).astype(np.int32)
            s.add(f"r{number}", prompt, sampled(0, 1))
        s.finish()
        assert [step.num_tokens for step in s.steps] == num_tokens


# -- L. free order -------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_r72_the_free_order_is_the_same_with_caching_off(prefix_cache):
    """vllm#51482: the order was another one without caching. Right: N=9, two, free, two: the next
    two, as fifo says."""
    with stage(4, 9, prefix_cache=prefix_cache) as s:
        tables = []
        for number in range(2):
            s.add(f"r{number}", prompt_of(number, 7), sampled(0, 1))
            s.submit()
            tables.append(table(s, f"r{number}"))
            s.finish()
        assert tables == [[1, 2], [3, 4]]
