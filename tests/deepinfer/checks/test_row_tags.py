"""Tags beside the rows: silent and without effect where all is right, exact where it is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.power import lose_row, overwrite, swap_blocks
from deepinfer.cache_engine import KVCache
from deepinfer.checks.row_tags import NUM_SHOWN, RowRead, RowTags
from deepinfer.config import EngineConfig
from deepinfer.device import open_device
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.device.wrapper import DeviceWrapper
from deepinfer.engine import LLMEngine
from deepinfer.models.weights import load_weights
from deepinfer.names import RELEASE_POLICIES
from deepinfer.sequence import SamplingParams
from tests.deepinfer.step_plans import TINY, Run, step_plan

SIZES = [4, 16]
NUM_ROWS = 1280
CONFIG = EngineConfig(
    max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, checks="tags", timeout_s=60
)
PROMPTS = [
    np.random.default_rng(index).integers(0, TINY.vocab_size, 3 + 5 * index) for index in range(6)
]
DRAWN = [SamplingParams(max_tokens=8, temperature=index % 2, seed=index) for index in range(6)]
SAFE = [policy for policy in RELEASE_POLICIES if policy != "early"]


@pytest.fixture(scope="module")
def weights():
    """One set of weights for every engine of this file."""
    return load_weights(TINY, open_device("cpu-stepped"))


def engine(weights, device="cpu-stepped", size=4, rows=NUM_ROWS, **changes):
    """An engine with a pool of so many rows."""
    config = replace(CONFIG, block_size=size, num_blocks=rows // size + 1, **changes)
    return LLMEngine(TINY, config, device=device, weights=weights)


# -- where all is right ----------------------------------------------------------------------------


def together(made):
    """Prompts of many lengths in one batch."""
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, DRAWN, strict=True)):
        made.add_request(f"r{index}", prompt, sampling)


def crowded(made):
    """Prompts that fill the pool, and then have to grow."""
    for index, sampling in enumerate(DRAWN):
        made.add_request(f"r{index}", PROMPTS[5][index : index + 13], sampling)


def forked(made):
    """Children on both paths, of a parent in the middle of a block and of one that just ended."""
    made.add_request("parent", PROMPTS[3], replace(DRAWN[3], max_tokens=14))
    made.step()
    made.step()
    for index in range(2):
        made.fork("parent", f"decode{index}", DRAWN[index])
        made.fork("parent", f"prompt{index}", DRAWN[index], own_token_ids=[3, 1, 4 + index])
    made.fork("parent", "short", DRAWN[1], own_token_ids=[5], num_shared_tokens=7)


def aborted(made):
    """Requests leave with a step in flight, and others take their rows."""
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


SHARED = np.random.default_rng(9).integers(0, TINY.vocab_size, 291)


def grouped(made):
    """Forks of one long prompt: their decodes read its rows together."""
    made.add_request("parent", SHARED, SamplingParams(max_tokens=9))
    while made.scheduler.seqs.num_computed_tokens[0] < len(SHARED):
        made.step()
    for index in range(3):
        made.fork("parent", f"child{index}", DRAWN[index])


SCENARIOS = {
    "together": (together, {}),
    "chunks": (together, {"max_num_batched_tokens": 9}),
    "forks": (forked, {}),
    "partial": (forked, {"fork_copy": "partial"}),
    "aborts": (aborted, {}),
    "preemption": (crowded, {"rows": 96}),
    "groups": (grouped, {"max_model_len": 320}),
}


def outcome(made, scenario):
    """Tokens and log-probabilities of every request, and how often one was preempted."""
    scenario(made)
    ended = {}
    while made.has_unfinished():
        output = made.step()
        ended.update((out.request_id, out) for out in output.finished)
    found = {
        name: (out.token_ids.tolist(), out.logprobs.tolist()) for name, out in sorted(ended.items())
    }
    return found, made.scheduler.counters.num_preemptions


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_right_engine_reads_no_wrong_row(weights, name, size):
    """Every scenario and safe policy: nothing found, and not one bit of an answer changes."""
    scenario, changes = SCENARIOS[name]
    with engine(weights, size=size, **{**changes, "checks": "off"}) as plain:
        expected, num_preemptions = outcome(plain, scenario)
    assert bool(num_preemptions) == (name == "preemption")
    for release in SAFE:
        with engine(weights, size=size, release=release, **changes) as tagged:
            assert outcome(tagged, scenario) == (expected, num_preemptions)
            assert not len(tagged.findings), tagged.findings.first


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_device_that_runs_behind_reads_no_wrong_row(weights, device):
    """Tags go with their rows on every stream."""
    for scenario, changes in SCENARIOS.values():
        shared = None if device == "cuda" else weights
        with engine(shared, device, size=16, release="polled", **changes) as tagged:
            outcome(tagged, scenario)
            assert not len(tagged.findings), tagged.findings.first


def test_forks_of_a_long_prompt_are_read_as_a_group(weights, monkeypatch):
    """The scenario does what it is for: one gather for three children, compared for each."""
    reads = []
    plain = RowTags.write_and_compare

    def spy(self, plan, slots, parts, device):
        reads.extend((len(part.seqs), len(part.slots)) for part in parts)
        return plain(self, plan, slots, parts, device)

    monkeypatch.setattr(RowTags, "write_and_compare", spy)
    with engine(weights, size=16, max_model_len=320) as tagged:
        outcome(tagged, grouped)
    assert (4, 1) in reads or (3, 1) in reads


# -- where it is not -------------------------------------------------------------------------------


def struck(weights, fault, size):
    """An engine whose request r1 was hit by `fault` in its sixth step; the findings of the next."""
    with engine(weights, size=size) as tagged:
        for index in range(3):
            tagged.add_request(f"r{index}", PROMPTS[5][: 20 + index], SamplingParams(30))
            if index == 0:
                tagged.step()  # so that all have tokens and blocks of their own
        for _ in range(5):
            tagged.step()
        victim = tagged.scheduler.find("r1")
        before = tagged.scheduler.seqs.table(victim.row).tolist()
        fault(tagged, victim, np.random.default_rng(1))
        after = tagged.scheduler.seqs.table(victim.row).tolist()
        tagged.step()
        return before, after, dict(tagged.findings.counts), tagged.findings.first


@pytest.mark.parametrize("size", SIZES)
def test_swapped_blocks_are_counted_and_located(weights, size):
    """Every row of both blocks, with the block now read and the position it belongs to."""
    before, after, counts, first = struck(weights, swap_blocks, size)
    a, b = (i for i, (x, y) in enumerate(zip(before, after, strict=True)) if x != y)
    assert str(first[0]) == (
        f"tags, step 7: request 'r1' position {a * size} (block {after[a]}): expected its own row, "
        f"found the row of request 'r1' position {b * size}"
    )
    assert 0 < counts["tags"] <= 2 * size
    assert len(first) == min(counts["tags"], NUM_SHOWN)


@pytest.mark.parametrize("size", SIZES)
def test_an_overwritten_block_names_its_new_owner(weights, size):
    """The rows of another request are named as theirs, position by position."""
    before, after, counts, first = struck(weights, overwrite, size)
    assert before == after
    message = first[0].message
    assert message.startswith("request 'r1' position ")
    block = int(message.partition("(block ")[2].partition(")")[0])
    assert block in after
    position = int(message.split()[3])
    assert after[position // size] == block
    # All prompts start alike: what r0 and r2 share with r1 is found as whoever has it.
    assert "found the row of request 'r" in message
    assert message.endswith(f"position {position % size}")
    assert 0 < counts["tags"] <= size


def test_bytes_lost_under_their_tag_stay_unseen(weights):
    """What tags are blind to: the row is the right one, its content is not."""
    assert struck(weights, lose_row, 4)[2] == {}


def test_a_copy_that_was_lost_is_a_row_never_written(weights, monkeypatch):
    """The child of a fork reads its own block, into which nothing was copied."""
    monkeypatch.setattr(KVCache, "copy_blocks", lambda self, pairs: None)
    with engine(weights) as tagged:
        tagged.add_request("parent", PROMPTS[1], SamplingParams(4))
        tagged.step()
        tagged.fork("parent", "child", SamplingParams(4))
        tagged.step()
        (finding, *_) = tagged.findings.first
    assert "request 'child' position 4" in finding.message
    assert finding.message.endswith("expected its own row, found a row never written")


def test_more_than_can_be_shown_are_counted(weights):
    """The last sentence of a step says how many it leaves out; every read counts again."""
    with engine(weights, size=16) as tagged:
        tagged.add_request("r0", PROMPTS[5], SamplingParams(6))
        tagged.step()
        tagged.device.run(lambda: tagged.cache.tags.block(tagged_block(tagged)).zero_())
        tagged.step()
        assert tagged.findings.counts["tags"] == 16
        assert len(tagged.findings.first) == NUM_SHOWN
        assert tagged.findings.first[-1].message.endswith("; and 8 more in this step")
        tagged.step()
        assert tagged.findings.counts["tags"] == 32


def tagged_block(made):
    """The first block of r0."""
    return int(made.scheduler.seqs.table(made.scheduler.find("r0").row)[0])


def test_a_padded_read_of_a_written_block_0_is_wrong():
    """Padding must find the tag of nobody's block."""
    device = SteppedCpuDevice()
    tags = RowTags(4, 4, torch.device("cpu"))
    tags.block(0)[0] = 77
    plan = replace(
        step_plan([Run(range(3), [1], 2), Run(range(2), [2], 1)], 4),
        tags=np.array([[11, 12, 13], [21, 22, 0]]),
    )
    tags.block(1)[:2] = torch.tensor([11, 12])
    tags.block(2)[0] = 21
    slots = torch.tensor([[4, 5, 6], [8, 9, 0]])
    read = RowRead(np.array([0, 1]), 0, slots)
    found = tags.write_and_compare(plan, torch.tensor([6, 9]), [read], device).result()
    assert (found.count, found.seqs.tolist(), found.positions.tolist()) == (1, [1], [2])
    assert found.found.tolist() == [77]


def test_copies_read_all_sources_before_they_write():
    """As the rows' own copies do."""
    tags = RowTags(4, 2, torch.device("cpu"))
    tags.block(1)[:], tags.block(2)[:] = 1, 2
    tags.copy_blocks(torch.tensor([[1, 2], [2, 3]], dtype=torch.int32))
    assert [int(tags.block(i)[0]) for i in range(4)] == [0, 1, 1, 2]


# -- off -------------------------------------------------------------------------------------------


class CountingDevice(DeviceWrapper):
    """Counts what operations upload."""

    num_uploads = 0

    def upload(self, array):
        self.num_uploads += 1
        return super().upload(array)


def test_off_there_is_no_pool_no_tag_and_no_upload(weights):
    """Tags cost one upload a step; without them a plan has none and nothing is kept."""
    counts = {}
    for checks in ("off", "tags"):
        device = CountingDevice(SteppedCpuDevice())
        with engine(weights, device, checks=checks) as made:
            together(made)
            num_steps = 0
            while made.step() is not None:
                num_steps += 1
            counts[checks] = device.num_uploads
            is_on = checks == "tags"
            assert (made.cache.tags is not None) == is_on
            assert (made.scheduler.prefix_tags is not None) == is_on
    assert counts["tags"] == counts["off"] + num_steps
