"""The cache a profile asks for, without allocating it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from bench.cache_geometry import cache_geometry, cache_of
from bench.catalog import find_profile, list_profiles
from bench.schema import EngineSettings, Profile
from bench.spec import engine_config, load_profile, model_config
from deepinfer.cache_engine import bytes_per_block
from deepinfer.checks.row_tags import RowTags
from deepinfer.config import ModelConfig
from deepinfer.errors import UserError
from deepinfer.models.hybrid.geometry import Geometry
from deepinfer.models.hybrid.layer_plan import HybridConfig
from deepinfer.models.hybrid.released import v41_flash
from deepinfer.models.hybrid.tags import HybridTags
from tests.bench.tiny import ROOT

PROFILES = [name for name, _ in list_profiles()]


def profile_of(name: str, **engine: int | str) -> Profile:
    """A shipped profile with other engine settings."""
    profile = load_profile(find_profile(name))
    given = {**profile.engine.given(), **engine}
    return profile.model_copy(update={"engine": EngineSettings(**given)})


@pytest.mark.parametrize("name", PROFILES)
def test_blocks_are_those_the_engine_allocates(name: str) -> None:
    """Of every shipped profile."""
    profile = profile_of(name)
    cache, config = cache_geometry(profile), model_config(profile)
    if isinstance(config, ModelConfig):
        assert cache.bytes_per_block == bytes_per_block(config, cache.block_size)
        ((_, number, each, total),) = cache.pool
        assert (number, each) == (cache.num_blocks, cache.bytes_per_block)
        assert total == (None if number is None else number * each)
        return
    geometry = Geometry.of(config.served(False), cache.block_size)
    assert cache.bytes_per_block == geometry.bytes_per_block
    assert cache.bytes_per_token == geometry.bytes_per_token
    assert {name: each for name, _, each, _ in cache.pool} == {
        "blocks": geometry.bytes_per_block,
        "state slots": geometry.bytes_per_slot,
    }


@pytest.mark.parametrize("name", ["cpu-v41", "cpu-v41-tiny", "cpu-v4"])
def test_draft_layers_take_room_only_where_they_are_asked(name: str) -> None:
    """A ring each, and V4's streams; the stored part and the blocks stay as they are."""
    plain = cache_geometry(profile_of(name, drafts=3, drafter="ngram"))
    unused = cache_geometry(profile_of(name, drafts=0, drafter="mtp"))
    asked = cache_geometry(profile_of(name, drafts=3, drafter="mtp"))
    assert plain == unused
    config = model_config(profile_of(name))
    assert isinstance(config, HybridConfig)
    assert config.draft is not None
    added = config.draft.num_layers * plain.slot[0].num_bytes
    if config.family == "deepseek_v4":
        added += 7 * 4 * config.hidden_size * 4  # positions, streams, float32
    assert asked.bytes_per_slot == plain.bytes_per_slot + added
    assert (asked.stored_bytes, asked.bytes_per_block) == (
        plain.stored_bytes,
        plain.bytes_per_block,
    )
    assert [part for part in asked.slot if not part.draft][-1].kind == "positions"


def test_the_gpu_profile_has_the_rows_of_the_released_model() -> None:
    """Fewer experts, the same cache."""
    config = model_config(load_profile(find_profile("h200-v41")))
    assert Geometry.of(config, 128) == Geometry.of(v41_flash(), 128)
    assert config.layers == v41_flash().layers


@pytest.mark.parametrize("name", ["cpu-v41", "cpu-v4"])
def test_cpu_profiles_keep_the_real_rows(name: str) -> None:
    """Head 512, rope 64, window 128, block 128, drawn smaller everywhere else."""
    profile = load_profile(find_profile(name))
    config = model_config(profile)
    assert (config.head_dim, config.qk_rope_head_dim, config.sliding_window) == (512, 64, 128)
    assert profile.engine.block_size == 128
    assert (config.hidden_size, config.num_attention_heads, config.n_routed_experts) == (256, 4, 8)


def test_every_kind_of_layer_is_in_a_cpu_profile() -> None:
    """Window only, full of both ratios, reuse, reindex, Engram; both compressors and routers."""
    v41 = model_config(load_profile(find_profile("cpu-v41"))).layers
    v4 = model_config(load_profile(find_profile("cpu-v4"))).layers
    tiny = model_config(load_profile(find_profile("cpu-v41-tiny"))).layers
    assert tiny == v41
    assert {(layer.ratio, layer.compressor is not None, layer.is_selector) for layer in v41} == {
        *((0, False, False), (2, True, True), (2, False, False)),
        *((1, True, True), (1, False, False), (1, False, True)),
    }
    assert {layer.candidates for layer in v41} == {None, "publish", "obey"}
    assert {layer.engram for layer in v41} == {True, False}
    assert {(layer.ratio, layer.router) for layer in v4} == {
        *((0, "hash"), (4, "hash"), (128, "hash"), (4, "bias"), (128, "bias"))
    }


def test_a_block_size_that_cannot_be_is_refused() -> None:
    """Before anything is allocated, with the layer's ratio."""
    with pytest.raises(UserError, match="block_size: 48 and the ratio 128 of layer 2"):
        cache_geometry(profile_of("cpu-v4", block_size=48))


def test_slots_follow_the_most_requests_at_once() -> None:
    """1.2 for each, and slot 0."""
    assert cache_geometry(profile_of("cpu-v41", max_num_seqs=5)).num_slots == 7
    assert cache_geometry(profile_of("cpu-tiny", max_num_seqs=5)).num_slots == 0


@pytest.mark.parametrize("name", ["cpu-tiny", "cpu-v4", "cpu-v41-tiny"])
def test_tags_are_those_the_engine_allocates(name: str) -> None:
    """Of a block, for both kinds of model."""
    profile, cpu = profile_of(name), torch.device("cpu")
    config, engine = model_config(profile), engine_config(profile.engine)
    if isinstance(config, ModelConfig):
        per_block = RowTags(3, engine.block_size, cpu).block(1).nbytes
    else:
        tags = HybridTags(Geometry.of(config, engine.block_size), 3, 2, cpu)
        per_block = sum(rows[1].nbytes for rows in tags.rows.values())
    assert cache_of(name, config, engine).tag_bytes_per_block == per_block


def test_a_pool_to_be_measured_has_no_number() -> None:
    """`auto`: neither blocks nor their bytes are known; all else is."""
    cache, known = cache_geometry(profile_of("cpu-v4", num_blocks="auto")), profile_of("cpu-v4")
    assert cache.num_blocks is None
    assert cache.pool[0] == ("blocks", None, cache.bytes_per_block, None)
    assert cache.pool[1:] == cache_geometry(known).pool[1:]


def test_no_torch_is_needed() -> None:
    """`env --geometry` of a model larger than this machine answers at once."""
    code = (
        "import sys; from bench.commands import main;"
        "code = main(['env', '--geometry', 'h200-v41']);"
        "sys.exit('torch is loaded' if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
