"""`model:` of a profile, by family: what is accepted, what it becomes, what is said of the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from bench.model_schema import FAMILIES, V4Settings, V41Settings
from bench.schema import Profile
from bench.spec import check_file, load_profile, load_workload, model_config, resolve
from bench.yaml_source import SourceError
from deepinfer.errors import UserError
from deepinfer.models.hybrid.layer_plan import FAMILIES as HYBRID_FAMILIES
from deepinfer.models.hybrid.layer_plan import HybridConfig, v4_config, v41_config
from tests.bench.tiny import ROOT

Write = Callable[[dict[str, Any]], Path]


def shipped(name: str) -> dict[str, Any]:
    """The YAML of a shipped profile."""
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "profiles" / f"{name}.yaml").read_text("utf-8"))
    return loaded


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(profile: dict[str, Any]) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(profile))
        return path

    return write


def changed(name: str, **model: Any) -> dict[str, Any]:
    """A shipped profile with other keys of its model; None takes one away."""
    profile = shipped(name)
    merged = {**profile["model"], **model}
    profile["model"] = {key: value for key, value in merged.items() if value is not None}
    return profile


@pytest.mark.parametrize("name", ["v41_a", "v41_b", "v4_a"])
def test_the_keys_of_a_config_json_make_the_same_network(name: str) -> None:
    """Settings of a golden model's keys give the layers and sizes that its loader gives."""
    raw = json.loads(str(np.load(ROOT / "tests" / "golden" / f"{name}.npz")["config_json"]))
    family = "deepseek_v4" if name == "v4_a" else "deepseek_v41"
    settings_of = V4Settings if name == "v4_a" else V41Settings
    expected = v4_config(raw) if name == "v4_a" else v41_config(raw)
    known = {key: value for key, value in raw.items() if key in settings_of.model_fields}
    for key in ("rope_scaling", "rope_parameters"):
        if key in known:
            known[key] = without_constants(known[key])
    settings = settings_of.model_validate({**known, "family": family})
    assert settings.config() == expected


def without_constants(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary keys without those that can have one value only."""
    constants = ("rope_type", "partial_rotary_factor", "attention_factor")
    return {
        key: without_constants(value) if isinstance(value, dict) else value
        for key, value in rope.items()
        if key not in constants
    }


def test_our_own_keys_reach_the_config(write: Write) -> None:
    """Row format, quantisers, stored layers, drafts, dtype and seed."""
    ours = {"cache": "bf16", "qat": True, "num_stored_layers": 2, "max_draft_tokens": 3}
    config = model_config(load_profile(write(changed("cpu-v4", **ours, dtype="bfloat16", seed=7))))
    assert isinstance(config, HybridConfig)
    assert {key: getattr(config, key) for key in ours} == ours
    assert (config.dtype, config.seed, config.ring_len) == ("bfloat16", 7, 132)


def test_families_are_those_of_the_engine() -> None:
    """A family the engine has can be named in a profile."""
    assert set(FAMILIES) == {"qwen3", *HYBRID_FAMILIES}


@pytest.mark.parametrize(
    ("name", "model", "part"),
    [
        ("cpu-v41", {"family": "deepseek_v42"}, "model.family: unknown name (got 'deepseek_v42')"),
        ("cpu-v41", {"family": 4}, "model.family: unknown name (got '4'); expected one of"),
        (
            "cpu-v41",
            {"slidng_window": 8},
            "model.slidng_window: unknown key (got 'slidng_window'); ",
        ),
        ("cpu-v41", {"layer_types": []}, "model.layer_types: unknown key"),
        ("cpu-v4", {"compress_ratios": [1]}, "model.compress_ratios: unknown key"),
        ("cpu-tiny", {"q_lora_rank": 8}, "model.q_lora_rank: unknown key"),
        ("cpu-v41", {"head_dim": None}, "model.head_dim: missing key"),
        (
            "cpu-v41",
            {"compress_ratios": [0, 2, 2, 1.5, 1, 1]},
            "model.compress_ratios[3]: wrong ty",
        ),
        (
            "cpu-v41",
            {"compress_ratios": 2},
            "model.compress_ratios: wrong type (got 2); expected a",
        ),
        ("cpu-v41", {"compress_ratios": [0, 2, 2, 1]}, "compress_ratios: 4 numbers for 6 layers"),
        ("cpu-v41", {"kv_source_layer_ids": [1, 9]}, "kv_source_layer_ids: 9; layers are 0 to 5"),
        ("cpu-v41", {"index_source_layer_ids": [0, 1, 3]}, "layer 0 has no rows: its ratio is 0"),
        ("cpu-v41", {"kv_source_layer_ids": [1]}, "layer 3 reads rows of ratio 1, and its source"),
        ("cpu-v41", {"kv_source_layer_ids": [3]}, "layer 1 reads rows, and no source is before it"),
        (
            "cpu-v41",
            {"index_source_layer_ids": [1, 5], "candidate_source_layer_id": None},
            "layer 3 reads the rows of layer 3 as selected from other rows, by layer 1",
        ),
        ("cpu-v41", {"candidate_source_layer_id": 2}, "2 is not in index_source_layer_ids"),
        ("cpu-v41", {"engram_head_dim": None}, "engram_layer_ids: needs engram_head_dim too"),
        (
            "cpu-v41",
            {"engram_num_embeddings": [9]},
            "engram_vocab_size 500 gives tables of [14032]",
        ),
        (
            "cpu-v41",
            {"dspark_markov_rank": None, "dspark_noise_token_id": None},
            "dspark_block_size: needs dspark_noise_token_id, dspark_markov_rank too",
        ),
        (
            "cpu-v41",
            {"dspark_block_size": None},
            "dspark_noise_token_id: draft layers are those of a block",
        ),
        ("cpu-v41", {"dspark_target_layer_ids": [6]}, "dspark_target_layer_ids: [6]; expected"),
        ("cpu-v4", {"num_nextn_predict_layers": 2}, "2; MTP is one layer"),
        ("cpu-v41", {"o_groups": 3}, "model: o_groups: 3 does not divide 4 heads"),
        ("cpu-v41", {"cache": "fp8"}, "model.cache: unknown name (got 'fp8'); expected"),
        (
            "cpu-v4",
            {"compress_rates": {"sliding_attention": 4}},
            "compress_rates.sliding_attention",
        ),
        (
            "cpu-v4",
            {"mlp_layer_types": ["moe"]},
            "layer_types: 6 layers, and mlp_layer_types has 1",
        ),
        (
            "cpu-v4",
            {"layer_types": ["full"] * 6},
            "model.layer_types[0]: unknown name (got 'full')",
        ),
        ("cpu-v4", {"rope_parameters": {"main": {"theta": 1.0}}}, "rope_parameters.main.theta: un"),
        ("cpu-v4", {"layer_types": [], "mlp_layer_types": []}, "model: layers: none"),
        ("cpu-v4", {"index_head_dim": 32}, "index_head_dim: 32; at least qk_rope_head_dim 64"),
        ("cpu-v41", {"engram_pad_id": 8192}, "engram_pad_id: 8192; token ids are 0 to 8191"),
        ("cpu-v41", {"candidate_topk_blocks": None}, "candidate_topk_blocks: 0; at least 1"),
        ("cpu-v41", {"num_stored_layers": 7}, "num_stored_layers: 7; 0 to 6"),
        ("cpu-v41", {"head_dim": 528, "cache": "packed"}, "'packed' window rows have a scale for"),
        ("cpu-v41", {"index_head_dim": 80, "qat": True}, "qat: rounded index rows have a scale"),
    ],
)
def test_bad_models(write: Write, name: str, model: dict[str, Any], part: str) -> None:
    """One line with file, line, key and what is valid."""
    path = write(changed(name, **model))
    with pytest.raises(SourceError) as caught:
        load_profile(path)
    texts = [problem.text for problem in caught.value.problems]
    assert any(part in text for text in texts), texts
    assert all(text.startswith(f"{path}:") and "\n" not in text for text in texts)
    assert not any("<" in text for text in texts)


def test_the_nearest_family_is_named(write: Write) -> None:
    """Of all there are, and only once."""
    _, problems = check_file(Profile, write(changed("cpu-v41", family="deepsek_v41")))
    assert len(problems) == 1
    assert "expected 'deepseek_v41' (the nearest of qwen3, deepseek_v41" in problems[0].text


def test_the_nearest_key_is_of_the_same_family(write: Write) -> None:
    """A hybrid key is not offered to Qwen3, nor the other way round."""
    with pytest.raises(SourceError, match=r"slidng_window.*expected 'sliding_window'"):
        load_profile(write(changed("cpu-v4", slidng_window=8)))
    with pytest.raises(SourceError) as caught:
        load_profile(write(changed("cpu-tiny", slidng_window=8)))
    assert "sliding_window" not in str(caught.value).partition("expected")[2]


def test_a_hybrid_cell_is_strict_json_and_its_hash_follows_it(write: Write) -> None:
    """What decides the answers is in the results file, row format included."""
    workload = load_workload(ROOT / "workloads" / "fork-batch.yaml")
    packed = resolve(load_profile(write(changed("cpu-v41-tiny", cache="packed"))), workload)
    plain = resolve(load_profile(write(changed("cpu-v41-tiny"))), workload)
    stored = json.loads(json.dumps(plain.to_dict(), allow_nan=False))
    assert (stored["model"]["family"], stored["model"]["cache"]) == ("deepseek_v41", "fp32")
    assert packed.config_hash != plain.config_hash
    assert (
        plain.config_hash
        == resolve(load_profile(write(changed("cpu-v41-tiny"))), workload).config_hash
    )


def test_block_size_and_ratios_are_checked_once_merged(write: Write) -> None:
    """Neither file is wrong alone."""
    workload = load_workload(ROOT / "workloads" / "fork-batch.yaml")
    profile = changed("cpu-v4")
    profile["engine"]["block_size"] = 48
    with pytest.raises(UserError, match="block_size: 48 and the ratio 128 of layer 2"):
        resolve(load_profile(write(profile)), workload)
