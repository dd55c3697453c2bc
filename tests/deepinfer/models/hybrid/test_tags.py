"""Tags of hybrid models: silent and without effect where all is right, exact where it is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer.config import EngineConfig
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.engine import LLMEngine
from deepinfer.hybrid_runner import HybridRunner
from deepinfer.models.hybrid.cache import HybridCache
from deepinfer.models.hybrid.layer_plan import v4_config, v41_config
from deepinfer.names import RELEASE_POLICIES
from deepinfer.runners import load_model
from deepinfer.sequence import SamplingParams
from tests.hybrid_configs import v4_raw, v41_raw

MODELS = {
    "v4": v4_config(v4_raw(ratios=(4, 16), window=8)),
    "v41": v41_config(
        v41_raw((0, 2, 2, 1, 1), sources=(1, 3), selectors=(1, 3, 4), publisher=3, engram=(1,))
    ),
}
CONFIG = EngineConfig(
    block_size=4,
    num_blocks=161,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=64,
    checks="tags",
    timeout_s=60,
)
PROMPTS = [np.random.default_rng(i).integers(3, 60, 3 + 5 * i) for i in range(6)]
DRAWN = [SamplingParams(max_tokens=8, temperature=i % 2, seed=i) for i in range(6)]
SAFE = [policy for policy in RELEASE_POLICIES if policy != "early"]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """A network of either family and its weights."""
    config = MODELS[request.param]
    return config, load_model(config, SteppedCpuDevice())


def engine(model, **changes):
    """An engine on a device that runs at once."""
    config, weights = model
    return LLMEngine(config, replace(CONFIG, **changes), device="cpu-stepped", weights=weights)


def together(made):
    """Prompts of many lengths in one batch."""
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, DRAWN, strict=True)):
        made.add_request(f"r{index}", prompt, sampling)


def crowded(made):
    """Prompts that fill the pool, and then have to grow."""
    for index, sampling in enumerate(DRAWN):
        made.add_request(f"r{index}", PROMPTS[5][index : index + 13], sampling)


def forked(made):
    """Children on both paths of a parent in the middle of a block."""
    made.add_request("parent", PROMPTS[3], replace(DRAWN[3], max_tokens=14))
    made.step()
    made.step()
    for index in range(2):
        made.fork("parent", f"decode{index}", DRAWN[index])
        made.fork("parent", f"prompt{index}", DRAWN[index], own_token_ids=[3, 1, 4 + index])


def aborted(made):
    """Requests leave with a step in flight, and others take their slots and blocks."""
    together(made)
    made.submit()
    made.abort("r1")
    made.abort("r4")
    made.collect()
    made.add_request("late", PROMPTS[4], DRAWN[4])
    made.fork("r3", "child", DRAWN[1])
    made.submit()
    made.abort("r3")
    made.collect()


SCENARIOS = {
    "together": (together, {}),
    "chunks": (together, {"max_num_batched_tokens": 9}),
    "forks": (forked, {}),
    "partial": (forked, {"fork_tail_copy": "partial"}),
    "aborts": (aborted, {}),
    "preemption": (crowded, {"num_blocks": 25}),
}


def outcome(made, scenario):
    """Tokens and log-probabilities of every request, and how often one was preempted."""
    scenario(made)
    ended = {}
    while made.has_unfinished():
        ended.update((out.request_id, out) for out in made.step().finished)
    found = {name: (o.token_ids.tolist(), o.logprobs.tolist()) for name, o in ended.items()}
    return found, made.scheduler.counters.num_preemptions


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_right_engine_reads_no_wrong_row(model, name):
    """Every scenario and safe policy: nothing found, and not one bit of an answer changes."""
    scenario, changes = SCENARIOS[name]
    with engine(model, **{**changes, "checks": "off"}) as plain:
        expected = outcome(plain, scenario)
        assert plain.cache.tags is None
    assert bool(expected[1]) == (name == "preemption")
    for release in SAFE:
        with engine(model, release=release, **changes) as tagged:
            assert outcome(tagged, scenario) == expected
            assert not len(tagged.findings), tagged.findings.first


def test_a_device_that_runs_behind_reads_no_wrong_row(model):
    """Tags go with their rows on every stream."""
    config, weights = model
    for scenario, changes in SCENARIOS.values():
        made = replace(CONFIG, release="polled", **changes)
        with LLMEngine(config, made, device="cpu", weights=weights) as tagged:
            outcome(tagged, scenario)
            assert not len(tagged.findings), tagged.findings.first


def running(made):
    """Three requests behind their prompts, of which r1 is to be struck."""
    for index in range(3):
        prompt = np.random.default_rng(10 + index).integers(3, 60, 37 + index)
        made.add_request(f"r{index}", prompt, SamplingParams(12))
    for _ in range(4):
        made.step()
    return made.scheduler.find("r1").row, made.scheduler.find("r2").row


def messages(made):
    """What the next step finds; all of it concerns r1."""
    assert not len(made.findings), made.findings.first
    made.step()
    found = [finding.message for finding in made.findings.first]
    assert found
    assert all(message.startswith("request 'r1' position ") for message in found), found
    return found, made.findings.counts["tags"]


def test_a_swapped_table_is_counted_and_located(model):
    """Each compressed row of both blocks, once per ratio."""
    with engine(model) as made:
        row, _ = running(made)
        seqs = made.scheduler.seqs
        first, second = (int(block) for block in seqs.table(row)[[1, 3]])
        seqs.replace_block(row, 1, second)
        seqs.replace_block(row, 3, first)
        found, count = messages(made)
        # v4: a row of ratio 4 a block, and in block 3 one of ratio 16. v41: 2 of ratio 2, 4 of 1.
        assert count == (3 if 16 in made.cache.tags.rows else 2 * (2 + 4))
        assert any(f"position 7 (block {second}): expected its own row, " in m for m in found)
        assert any("found the row of request 'r1' position 15" in m for m in found)


def test_a_wrong_block_copy_names_the_owner_of_its_rows(model):
    """A block of r2 was copied over one of r1."""
    with engine(model) as made:
        row, other = running(made)
        seqs = made.scheduler.seqs
        pair = np.array([[seqs.table(other)[2], seqs.table(row)[2]]], np.int32)
        made.device.run(lambda: made.worker.runner.copy_blocks(pair))
        found, count = messages(made)
        assert count == len(found)
        assert found[-1] == (
            f"request 'r1' position 11 (block {pair[0, 1]}): expected its own row, "
            "found the row of request 'r2' position 11"
        )


def test_a_wrong_slot_copy_names_slot_and_owner(model):
    """The whole window is another's, but for the row this step writes."""
    with engine(model) as made:
        rows = running(made)
        states = made.scheduler.seqs.state_ids
        pair = np.array([[states[rows[1]], states[rows[0]]]], np.int32)
        made.device.run(lambda: made.worker.runner.copy_states(pair))
        found, count = messages(made)
        assert count == MODELS["v4"].sliding_window - 1
        assert f"(slot {pair[0, 1]}): expected its own row, found the row of request 'r" in found[0]
        assert any("found the row of request 'r2'" in message for message in found)


def test_a_skipped_state_copy_is_found_in_the_child(model, monkeypatch):
    """The child of a fork reads the window of its own slot, into which nothing was copied."""
    monkeypatch.setattr(HybridRunner, "copy_states", lambda self, pairs: None)
    with engine(model) as made:
        made.add_request("parent", PROMPTS[2], SamplingParams(4))
        made.step()
        made.fork("parent", "child", SamplingParams(4))
        made.step()
        slot = made.scheduler.seqs.state_ids[made.scheduler.find("child").row]
        assert made.findings.counts["tags"] == MODELS["v4"].sliding_window - 1
        assert all(
            finding.message.startswith("request 'child' position ")
            and finding.message.endswith(
                f"(slot {slot}): expected its own row, found a row never written"
            )
            for finding in made.findings.first
        )


def test_a_row_whose_position_tag_is_wrong_is_counted_once(model):
    """Positions and prefixes are one check where both are kept."""
    with engine(model) as made:
        row, _ = running(made)
        slot = int(made.scheduler.seqs.state_ids[row])
        last = int(made.scheduler.seqs.num_computed_tokens[row]) - 1
        ring = made.cache.geometry.ring_len
        index = torch.tensor([last % ring])
        made.device.run(
            lambda: made.cache.write_tags(torch.tensor([slot]), index, torch.tensor([last - ring]))
        )
        found, count = messages(made)
        assert count == 1
        assert f"position {last} (slot {slot})" in found[0]


def test_copies_read_all_sources_before_they_write(model):
    """As the rows' own copies do."""
    with engine(model) as made:
        cache: HybridCache = made.cache
        cache.tags.rings[1], cache.tags.rings[2] = 1, 2
        pairs = torch.tensor([[1, 2], [2, 3]], dtype=torch.int32)
        made.device.run(lambda: cache.copy_states(pairs))
        assert cache.tags.rings[:4, 0].tolist() == [0, 1, 1, 2]
        for rows in cache.tags.rows.values():
            rows[1], rows[2] = 1, 2
        made.device.run(lambda: cache.copy_blocks(pairs))
        for rows in cache.tags.rows.values():
            assert rows[:4, 0].tolist() == [0, 1, 1, 2]
