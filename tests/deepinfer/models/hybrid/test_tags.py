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
from deepinfer.models.hybrid.geometry import IDS, OPEN
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


def loaded(name):
    """A network and its weights."""
    config = MODELS[name]
    return config, load_model(config, SteppedCpuDevice())


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """A network of either family and its weights."""
    return loaded(request.param)


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
    "partial": (forked, {"fork_copy": "partial"}),
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


def num_beside_rings(config, position):
    """Rows of earlier steps in open groups and token ids that the token at `position` reads."""
    count = min(config.engram.look_back if config.engram else 0, position)
    for compressor in {layer.compressor for layer in config.sources}:
        if compressor.gated and (position + 1) % compressor.ratio == 0:
            span = compressor.ratio * (1 + compressor.overlap)
            count += min(span - 1, position)
    return count


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
        position = int(made.scheduler.seqs.num_computed_tokens[rows[0]])
        states = made.scheduler.seqs.state_ids
        pair = np.array([[states[rows[1]], states[rows[0]]]], np.int32)
        made.device.run(lambda: made.worker.runner.copy_states(pair))
        found, count = messages(made)
        assert count == MODELS["v4"].sliding_window - 1 + num_beside_rings(model[0], position)
        head = f"(ring in slot {pair[0, 1]}): expected its own row, found the row of request 'r"
        assert any(head in message for message in found)
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
        window, beside = MODELS["v4"].sliding_window, num_beside_rings(model[0], len(PROMPTS[2]))
        assert made.findings.counts["tags"] == window - 1 + beside
        for finding in made.findings.first:
            assert finding.message.startswith("request 'child' position ")
            assert f" in slot {slot}): expected its own row, found a row never w" in finding.message


def test_an_open_group_is_compared_where_it_closes(model):
    """A row of it that another wrote is found with the token that closes the group, once."""
    config, _ = model
    ratio = min(c.ratio for layer in config.sources if (c := layer.compressor).gated)
    with engine(model) as made:
        made.add_request("r", PROMPTS[3][: ratio * 4], SamplingParams(8))
        made.step()
        made.step()  # opens a group
        slot = int(made.scheduler.seqs.state_ids[made.scheduler.find("r").row])
        for (kind, num_rows), tags in made.cache.tags.beside.items():
            if kind == OPEN:
                tags[slot, ratio * 4 % num_rows] = 17
        for _ in range(2, ratio):
            made.step()
            assert not len(made.findings)
        made.step()
        assert [finding.message for finding in made.findings.first] == [
            f"request 'r' position {ratio * 4} (open group in slot {slot}): expected its own row, "
            "found an unknown row of position 16"
        ]


def test_a_token_id_left_by_another_is_found():
    """Of all n-grams that look back at it, once in a step."""
    with engine(loaded("v41")) as made:
        made.add_request("r", PROMPTS[1], SamplingParams(8))
        made.step()
        slot = int(made.scheduler.seqs.state_ids[made.scheduler.find("r").row])
        last = len(PROMPTS[1]) - 1
        ((tags, num_rows),) = [
            (tags, rows) for (kind, rows), tags in made.cache.tags.beside.items() if kind == IDS
        ]
        tags[slot, last % num_rows] = 0
        made.step()
        assert [finding.message for finding in made.findings.first] == [
            f"request 'r' position {last} (token ids in slot {slot}): expected its own row, "
            "found a row never written"
        ]
        assert made.findings.counts["tags"] == 1


def test_a_state_gone_on_too_far_is_found_in_a_short_fork():
    """All that was written fits into its rings, so they are whole; open groups are not."""
    config, weights = loaded("v4")
    with engine((replace(config, sliding_window=32), weights)) as made:
        made.add_request("parent", PROMPTS[3], SamplingParams(14))
        for _ in range(10):
            made.step()
        states = made.scheduler.states
        states.can_fork = lambda num_written, num_computed: True
        made.fork("parent", "child", SamplingParams(4), num_shared_tokens=13, own_token_ids=[5])
        while made.has_unfinished():
            made.step()
        assert all("open group in slot" in finding.message for finding in made.findings.first)
        assert made.findings.counts["tags"] > 0


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
        assert f"position {last} (ring in slot {slot})" in found[0]


def test_copies_read_all_sources_before_they_write(model):
    """As the rows' own copies do."""
    with engine(model) as made:
        cache: HybridCache = made.cache
        slots = cache.tags.rings, *cache.tags.beside.values()
        for tags in slots:
            tags[1], tags[2] = 1, 2
        pairs = torch.tensor([[1, 2], [2, 3]], dtype=torch.int32)
        made.device.run(lambda: cache.copy_states(pairs))
        for tags in slots:
            assert tags[:4, 0].tolist() == [0, 1, 1, 2]
        for rows in cache.tags.rows.values():
            rows[1], rows[2] = 1, 2
        made.device.run(lambda: cache.copy_blocks(pairs))
        for rows in cache.tags.rows.values():
            assert rows[:4, 0].tolist() == [0, 1, 1, 2]
