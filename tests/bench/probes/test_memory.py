"""Layers of memory lie inside one another, and what is not there says why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.probes.memory import (
    NO_STATE_POOL,
    NOT_RESIDENT,
    MemorySample,
    num_live_tokens,
    profile_memory,
    undefined_layers,
    waterfall,
)
from bench.probes.step import profile_steps
from bench.probes.trace import trace_workload
from bench.probes.watched_engine import draw_requests
from bench.runner import Target
from deepinfer.engine import LLMEngine
from deepinfer.errors import UserError
from deepinfer.sequence import SamplingParams
from tests.bench.tiny import tiny, workload

FORK = {"children": 3, "output_tokens": 6, "after_tokens": 1}
WORK = workload({"count": 1, "prompt_tokens": 40, "output_tokens": 2, "fork": FORK})
GPU = MemorySample(
    step=1,
    time_s=0.0,
    nvml_used=1000,
    nvml_process=900,
    process_rss=300,
    torch_reserved=700,
    torch_allocated=650,
    weights=100,
    kv_pool=500,
    free=200,
    withheld=90,
    owned=200,
    live=150,
    num_live_tokens=15,
)


@pytest.fixture(scope="module")
def profile():
    """One round under `step`, which withholds until a result is collected."""
    return profile_memory(tiny(WORK, release="step"))


def test_each_gap_is_what_the_layer_inside_leaves():
    """On a GPU all layers have a size, but the state pool."""
    rows = {row.layer: row for row in waterfall(GPU)}
    gaps = {row.gap_name: row.gap for row in rows.values() if row.gap_name}
    assert gaps == {
        "other processes": 100,
        "context and libraries": 200,
        "cached or in fragments": 50,
        "Python, torch, packed weights": None,
        "block 0, nobody's": 10,
        "half-empty tails and reserved rows": 50,
    }
    assert rows["workspace"].size == 650 - 100 - 500
    assert [row.layer for row in rows.values() if row.size is None] == ["state pool"]


def test_without_a_gpu_its_layers_are_empty_with_a_reason(profile):
    """Never 0; what the process has beyond weights and pool has a name instead."""
    rows = {row.layer: row for row in waterfall(profile.fullest)}
    reasons = undefined_layers(profile)
    for layer in ("NVML used", "torch reserved", "torch allocated", "workspace"):
        assert rows[layer].size is None
        assert reasons[layer]
    assert reasons["state pool"] == NO_STATE_POOL
    assert rows["this process, resident"].gap > 0


def test_a_pool_that_is_not_resident_yet_leaves_no_negative_gap(profile):
    """Pages nobody wrote take no memory, so the difference would be none."""
    fullest = replace(profile.fullest, process_rss=1)
    small = replace(profile, samples=(fullest,))
    assert undefined_layers(small)["Python, torch, packed weights"] == NOT_RESIDENT


def test_the_pool_is_accounted_for_in_every_step(profile):
    """Free, withheld, owned and block 0 are the pool; live rows are in owned blocks."""
    for sample in profile.samples:
        one = sample.kv_pool // 257
        assert sample.free + sample.withheld + sample.owned + one == sample.kv_pool
        assert sample.live <= sample.owned
    assert any(sample.withheld for sample in profile.samples)
    assert [sample.step for sample in profile.samples] == list(range(1, len(profile.samples) + 1))
    assert profile.num_wrong == 0


def test_rows_that_requests_share_count_once():
    """Three forks of 40 tokens share two blocks of 16; each has a tail of its own."""
    resolved = tiny(WORK, fork_copy="partial")
    target = Target(resolved)
    engine = LLMEngine(
        resolved.model, resolved.engine, device=target.device, weights=target.weights
    )
    (parent,) = draw_requests(resolved)
    sampling = SamplingParams(max_tokens=8)
    engine.add_request("parent", np.asarray(parent.prompt_token_ids), sampling)
    engine.step()
    assert num_live_tokens(engine) == 40
    for name in ("a", "b"):
        engine.fork("parent", name, sampling)
    assert num_live_tokens(engine) == 40  # the waiting forks' pins are of the same rows
    engine.step()
    assert num_live_tokens(engine) == 32 + 3 * 9
    for name in ("parent", "a", "b"):
        engine.abort(name)
    assert num_live_tokens(engine) == 0
    target.close()


@pytest.mark.parametrize(
    "profile_one",
    [profile_memory, trace_workload, lambda r: profile_steps(r, ["step"], num_rounds=1)],
)
def test_a_workload_of_which_nothing_runs_is_refused(profile_one):
    """There is no step to show: one line that names the workload."""
    with pytest.raises(UserError, match="workload test: no step ran"):
        profile_one(tiny(WORK, num_blocks=2, max_model_len=4096))


def test_a_snapshot_needs_cuda(tmp_path):
    """One line that names the flag, the device and what would do."""
    with pytest.raises(UserError, match=r"--snapshot: device cpu .* expected cuda"):
        profile_memory(tiny(WORK), snapshot=tmp_path / "history.pickle")


@pytest.mark.cuda
def test_on_cuda_every_layer_has_a_size(tmp_path):
    """And the allocator's history is written."""
    path = tmp_path / "history.pickle"
    resolved = replace(tiny(WORK), device="cuda")
    profile = profile_memory(resolved, snapshot=path)
    sizes = {row.layer: row.size for row in waterfall(profile.fullest)}
    assert {"torch reserved", "torch allocated", "workspace"} <= {
        layer for layer, size in sizes.items() if size is not None
    }
    assert sizes["workspace"] >= 0
    assert path.stat().st_size > 0
