"""Reports about what may be kept and found, as cases with the right value for each.

Whole engines with a store, whose entries end every 8 tokens here unless a case says otherwise. A
request that is loaded must go on as if it had computed all, and nothing may be found that nobody
has said.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.drafters.acceptance import parse_acceptance
from deepinfer.drafters.replay import ReplayDrafter
from deepinfer.engine import LLMEngine
from deepinfer.models.hybrid.geometry import STREAMS
from deepinfer.prefix_cache import block_keys
from deepinfer.sequence import SamplingParams
from deepinfer.store import keys
from tests.cases.stores import KEPT, keep, num_loaded, run, stage
from tests.deepinfer.ahead.scenes import FAMILIES, model, prompt_of, sampled
from tests.deepinfer.test_engine_mtp import ENGINE, Watched
from tests.deepinfer.test_engine_mtp import model as model_with_drafts

pytestmark = pytest.mark.usefixtures("short_segments")


@pytest.mark.parametrize("family", FAMILIES)
def test_r43_what_was_found_may_be_gone_when_it_is_wanted(family):
    """vllm#17305: the first look was remembered. Right: it says 2, both go: load 0, compute all."""
    with stage(family) as s:
        keep(s, 0, 16)
        room = s.engine.store.host.num_bytes
    with stage(family, store_bytes=room, max_num_seqs=1) as s:
        keep(s, 0, 17)
        s.steps.clear()
        s.add("busy", prompt_of(1, 16), sampled(0, 3))
        s.submit()
        s.add("again", prompt_of(0, 17), sampled(0, 2))
        store, seq = s.engine.scheduler.store_reuse, s.engine.scheduler.find("again")
        assert store.match(seq, np.empty(0, np.int32)).num_tokens == 16
        s.collect()
        s.finish()
        assert num_loaded(s) == 0
        assert sum(step.num_tokens for step in s.steps) == (16 + 2) + (17 + 1)


def true_keys(s, prompt, sampling):
    """The keys of all segments of a request, and of the states behind them, by where they end."""
    tokens, size = s.truth.history(prompt, sampling)[:-1], s.config.block_size  # the last has none
    chain = block_keys([], tokens, len(tokens) // size, size)
    return {
        (segment.end_block * size, kind): key
        for segment in keys.segments(chain, size)
        for kind, key in (("rows", segment.key), ("state", keys.state_key(segment.key)))
    }


def entries(s):
    """The bytes of all that can be found."""
    found = s.engine.store.host._entries
    return {key: entry.buffer.tobytes() for key, entry in found.items() if entry.visible}


def test_r41_rejected_drafts_leave_the_last_state_that_was_kept():
    """vllm#57128: it was written over. Right: that of 32 stays, and none of 40 before 40 are known.

    K=3, 38 tokens are known; the boundary at 40 lies inside the drafts, and all are rejected.
    """
    with stage("v4", parse_acceptance("all-reject"), drafts=3) as s:
        prompt, sampling = prompt_of(0, 37), sampled(0, 8)
        true = true_keys(s, prompt, sampling)
        s.add("a", prompt, sampling)
        while len(s.delivered["a"]) < 1:
            s.step()
        s.device.synchronize()
        s.submit()
        (plan,) = s.plans
        assert plan.positions.tolist() == [37, 38, 39, 40]  # 40 and what is behind it
        before = entries(s)
        assert true[32, "state"] in before
        s.collect()  # all rejected
        s.submit()  # the next one: here a state would be kept
        s.device.synchronize()
        s.collect()
        s.submit()
        after = entries(s)
        assert after[true[32, "state"]] == before[true[32, "state"]]
        assert not {true[40, "state"], true[40, "rows"]} & after.keys()
        s.collect()
        run(s)
        assert entries(s).keys() == set(true.values())


@pytest.mark.parametrize("acceptance", ["all-reject", "all-accept", [1, 0], [0, 1]])
@pytest.mark.parametrize("overlap", ["off", "on", "2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_r41_r39_what_is_kept_is_what_was_accepted(family, overlap, acceptance):
    """vllm#57128, vllm#18668: rejected text had a key. Right: none has, and what has is true.

    Whoever goes on from it, be it from the last state alone, says what it would have said.
    """
    drafts = {"drafts": 3, "overlap": overlap}
    with stage(family, parse_acceptance(acceptance), **drafts) as s:
        true = set()
        for seed, size in ((0, 13), (1, 14), (2, 15), (3, 12)):
            prompt, sampling = prompt_of(seed, size), sampled(seed, 26)
            kinds = ("rows",) if family == "qwen3" else ("rows", "state")
            true |= {
                key for (_, kind), key in true_keys(s, prompt, sampling).items() if kind in kinds
            }
            s.add(f"r{seed}", prompt, sampling)
        s.finish()
        assert entries(s).keys() <= true
        if family == "qwen3":
            assert entries(s).keys() == true
        turns = [(name, output) for name, output in s.ended.items()]
        for name, output in turns:
            tokens = np.concatenate((output.prompt_token_ids, output.token_ids)).astype(np.int32)
            s.add(f"{name} again", tokens, sampled(0, 6))
            s.finish()
        assert num_loaded(s) > 0


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("family", FAMILIES)
def test_r42_drafts_of_a_request_that_was_loaded(family, overlap):
    """vllm#47926: acceptance fell behind a hit. Right: as many right as without one."""
    counts = []
    for kept in (False, True):
        with stage(family, 0.7, drafts=3, overlap=overlap) as s:
            if kept:
                keep(s, 0, 30)
            s.steps.clear()
            s.add("a", prompt_of(0, 26), sampled(0, 18))
            s.finish()
            counts.append(s.accepted())
            assert num_loaded(s) == (24 if kept else 0)
    assert counts[0] == counts[1]
    assert 0 < counts[0][1] < counts[0][0]


def drafted(family, kept, spoil=lambda engine: None):
    """What draft layers guess for a prompt of 60 tokens and its answer, and how many were right.

    Args:
        kept: whether it was there before, so that 56 tokens of it are loaded.
        spoil: done to the engine before it comes again.
    """
    config, weights = model_with_drafts(family)
    settings = replace(ENGINE, num_blocks=33, drafts=3, drafter="mtp", store_bytes=1 << 22)
    device, prompt = SteppedCpuDevice(), np.random.default_rng(42).integers(0, 61, 60)
    runner = Watched(config, settings, weights, device, tags=True)
    with LLMEngine(config, settings, device=device, runner=runner) as engine:
        if kept:
            runner.guesses = []
            engine.generate([prompt], SamplingParams(2))
            spoil(engine)
        runner.guesses, accepted = [], 0
        engine.add_request("a", prompt, SamplingParams(24))
        while (output := engine.step()) is not None:
            if output.stats.drafts is not None:
                accepted += sum(output.stats.drafts.accepted)
        assert engine.scheduler.store_reuse.counters.num_loaded_tokens == (56 if kept else 0)
        assert engine.findings.first == []
        return runner.guesses, accepted


@pytest.mark.parametrize("family", ["v4", "v41"])
def test_r42_draft_layers_go_on_from_what_was_kept(family):
    """vllm#47926: restored tokens had no draft rows. Right: each guess is the same, one by one."""
    plain, num_right = drafted(family, kept=False)
    assert len(plain) > 5
    assert num_right > 0
    assert drafted(family, kept=True) == (plain, num_right)


def test_r42_without_the_rows_of_draft_layers_guesses_are_others():
    """vllm#47926 planted: the case can fail, and does, while every token stays the same."""

    def spoil(engine):
        runner = engine.worker.runner
        of_states = runner.entry_bytes()[1].bytes_per_item
        regions = [
            part for part in runner.cache.geometry.slot if part.draft or part.kind == STREAMS
        ]
        for entry in engine.store.host._entries.values():
            for part in regions * (len(entry.buffer) == of_states):
                entry.buffer[part.offset : part.offset + part.num_bytes] = 0

    assert drafted("v4", kept=True, spoil=spoil) != drafted("v4", kept=False)


# -- G. state ------------------------------------------------------------------------------------


def test_r50_a_state_that_is_kept_leaves_the_running_one_as_it_is(monkeypatch):
    """vllm#53505: the copy went over the running state. Right: kept for 1600, running unchanged.

    B=1600, 1598 tokens computed, 3 run, 2 accepted: the boundary is met exactly.
    """
    monkeypatch.setattr(keys, "SEGMENT_TOKENS", 1600)
    network, weights = model("v4")
    sizes = {"block_size": 1600, "num_blocks": 3, "max_num_batched_tokens": 2000}
    config = replace(KEPT, **sizes, store_bytes=1 << 24, max_model_len=2000, num_state_slots=2)
    device, prompt = SteppedCpuDevice(), np.random.default_rng(50).integers(0, 61, 1598)
    plain = replace(config, store_bytes=0)
    with LLMEngine(network, plain, device="cpu-stepped", weights=weights) as engine:
        (right,) = engine.generate([prompt], SamplingParams(8))
    said = np.concatenate((prompt, right.token_ids)).astype(np.int32)
    drafter = ReplayDrafter({"a": said}, parse_acceptance([1, 0]), 0, 61)
    config = replace(config, drafts=2)
    with LLMEngine(network, config, device=device, weights=weights, drafter=drafter) as engine:
        engine.add_request("a", prompt, SamplingParams(8))
        engine.step()
        engine.submit()
        (flight,) = engine._in_flight
        assert flight.plan.positions.tolist() == [1598, 1599, 1600]
        engine.collect()
        row = engine.scheduler.find("a").row
        assert engine.scheduler.seqs.num_computed_tokens[row] == 1600
        running = engine.worker.runner.cache._slots[engine.scheduler.seqs.state_ids[row]]
        before = running.numpy().copy()
        engine.submit()
        key = keys.state_key(block_keys([], said, 1, 1600)[0])
        assert engine.store.host.is_saving(key)
        device.advance("copy", 2)
        assert device.log[-1][1].startswith("save_state")  # the step has not run
        assert (running.numpy() == before).all()
        saved = engine.store.host._entries[key].buffer
        assert saved[: len(before)].tobytes() == before.tobytes()
        while engine.has_unfinished():
            output = engine.collect()
            engine.submit()
        assert output.finished[0].token_ids.tolist() == right.token_ids.tolist()
        assert engine.findings.first == []
