"""Weights from a folder and from a seed."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.errors import UserError
from deepinfer.models.hf_config import model_config_from_folder
from deepinfer.models.weights import interleave, load_weights
from tests.deepinfer.step_plans import TINY, Run, model_worker, step_plan

CPU_SMALL = ModelConfig(8, 512, 8, 4, 64, 1536, 8192)


@pytest.fixture
def single(tmp_path: Path, device: SteppedCpuDevice) -> Path:
    """A folder with one safetensors file of a one-layer model, made without transformers."""
    tensors = {}
    for name, shape in {
        "model.embed_tokens": (7, 8),
        "model.norm": (8,),
        "lm_head": (7, 8),
        "model.layers.0.input_layernorm": (8,),
        "model.layers.0.post_attention_layernorm": (8,),
        "model.layers.0.self_attn.q_proj": (8, 8),
        "model.layers.0.self_attn.k_proj": (4, 8),
        "model.layers.0.self_attn.v_proj": (4, 8),
        "model.layers.0.self_attn.o_proj": (8, 8),
        "model.layers.0.self_attn.q_norm": (4,),
        "model.layers.0.self_attn.k_norm": (4,),
        "model.layers.0.mlp.gate_proj": (6, 8),
        "model.layers.0.mlp.up_proj": (6, 8),
        "model.layers.0.mlp.down_proj": (8, 6),
    }.items():
        tensors[f"{name}.weight"] = torch.randn(shape)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def config_of(path: Path, **changes: Any) -> ModelConfig:
    return replace(
        ModelConfig(1, 8, 2, 1, 4, 6, 7, tie_word_embeddings=False, path=path), **changes
    )


@pytest.mark.oracle
def test_saved_weights_are_fused(saved_qwen3: tuple[Path, Any], device: SteppedCpuDevice) -> None:
    """q, k, v and gate, up are stacked, rotary channels interleaved, the head tied or its own."""
    folder, model = saved_qwen3
    weights = load_weights(model_config_from_folder(folder), device)
    layer, theirs = weights.layers[1], model.model.layers[1]
    assert torch.equal(layer.qkv[:64], interleave(theirs.self_attn.q_proj.weight, 16))
    assert torch.equal(layer.qkv[64:96], interleave(theirs.self_attn.k_proj.weight, 16))
    assert torch.equal(layer.qkv[96:], theirs.self_attn.v_proj.weight)
    assert torch.equal(layer.gate_up[:96], theirs.mlp.gate_proj.weight)
    assert torch.equal(layer.gate_up[96:], theirs.mlp.up_proj.weight)
    assert torch.equal(weights.head, model.lm_head.weight)
    assert (weights.head is weights.embedding) == model.config.tie_word_embeddings
    assert weights.num_parameters() == sum(p.numel() for p in model.parameters())


def test_interleave_pairs_the_halves() -> None:
    """Channels (i, i + head_dim / 2) of every head become (2i, 2i + 1)."""
    assert interleave(torch.arange(8), 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert interleave(torch.arange(6)[:, None], 6).flatten().tolist() == [0, 3, 1, 4, 2, 5]


def test_weights_take_the_dtype_of_the_config(single: Path, device: SteppedCpuDevice) -> None:
    """A float32 file is placed as bfloat16 when the configuration says so."""
    weights = load_weights(config_of(single, dtype="bfloat16"), device)
    assert weights.head.dtype == torch.bfloat16
    assert weights.layers[0].qkv.dtype == torch.bfloat16


def test_a_folder_without_weights_is_refused(tmp_path: Path, device: SteppedCpuDevice) -> None:
    """The error names the folder and both file names."""
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        load_weights(config_of(tmp_path), device)


def test_a_missing_tensor_is_named(single: Path, device: SteppedCpuDevice) -> None:
    """A tensor the file lacks is named with the file."""
    file = single / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"model\.safetensors: holds no tensor 'model\.norm"):
        load_weights(config_of(single), device)


def test_a_wrong_shape_is_named(single: Path, device: SteppedCpuDevice) -> None:
    """Both shapes stand in the error."""
    with pytest.raises(UserError, match=r"gate_proj.*\[6, 8\].*\[5, 8\]"):
        load_weights(config_of(single, intermediate_size=5), device)


def change(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Put `tensors` into the folder's file, in place of those of the same names."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)


def test_a_quantised_tensor_is_refused(single: Path, device: SteppedCpuDevice) -> None:
    """Integers would be taken for weights a hundred times too large."""
    name = "model.layers.0.mlp.up_proj.weight"
    change(single, {name: torch.ones(6, 8, dtype=torch.int8)})
    with pytest.raises(UserError, match=rf"model\.safetensors: {name}: dtype int8"):
        load_weights(config_of(single), device)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.mlp.up_proj.weight",
        "lm_head.bias",
    ],
)
def test_a_tensor_without_a_place_is_refused(
    single: Path, device: SteppedCpuDevice, name: str
) -> None:
    """A bias or a layer too many is named, not left out of the sums."""
    change(single, {name: torch.ones(8)})
    with pytest.raises(UserError, match=rf"model\.safetensors: {name}: this network has no such"):
        load_weights(config_of(single), device)


def test_a_redundant_head_and_foreign_tensors_are_left_alone(
    single: Path, device: SteppedCpuDevice
) -> None:
    """A tied network may bring its head along, and a file tensors of something else."""
    change(single, {"optimizer.step": torch.ones(1)})
    weights = load_weights(config_of(single, tie_word_embeddings=True), device)
    assert weights.head is weights.embedding


def test_an_impossible_geometry_is_refused_before_anything_is_drawn(
    device: SteppedCpuDevice,
) -> None:
    """The configuration is checked, whoever made it."""
    with pytest.raises(UserError, match="head_dim: 15; must be even"):
        load_weights(replace(TINY, head_dim=15), device)


def test_a_broken_file_is_refused(single: Path, device: SteppedCpuDevice) -> None:
    """A file that is no safetensors is one line, not a traceback of the library."""
    (single / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        load_weights(config_of(single), device)


def test_shards_and_their_errors(single: Path, device: SteppedCpuDevice) -> None:
    """Shards named by an index load; a tensor not listed, a lost shard, a bad index are named."""
    whole = load_weights(config_of(single), device)
    shard, index = single / "part.safetensors", single / "model.safetensors.index.json"
    shutil.move(single / "model.safetensors", shard)
    weight_map = dict.fromkeys(load_file(shard), shard.name)
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load_weights(config_of(single), device).norm, whole.norm)

    del weight_map["lm_head.weight"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=r"lists no tensor 'lm_head\.weight'"):
        load_weights(config_of(single), device)
    shard.unlink()
    with pytest.raises(UserError, match=r"part\.safetensors: cannot be read"):
        load_weights(config_of(single), device)
    index.write_text("{}")
    with pytest.raises(UserError, match="not a safetensors index"):
        load_weights(config_of(single), device)


def test_cpu_small_has_its_parameters(device: SteppedCpuDevice) -> None:
    """The profile's geometry is 29.4 M parameters, the tied head counted once."""
    assert load_weights(CPU_SMALL, device).num_parameters() == 29_369_856


def test_a_seed_decides_the_weights(device: SteppedCpuDevice) -> None:
    """Equal seeds draw equal weights, others draw others."""
    first, again = load_weights(TINY, device), load_weights(TINY, device)
    other = load_weights(replace(TINY, seed=1), device)
    assert torch.equal(first.layers[1].qkv, again.layers[1].qkv)
    assert not torch.equal(first.layers[1].qkv, other.layers[1].qkv)
    untied = load_weights(replace(TINY, tie_word_embeddings=False), device)
    assert not torch.equal(untied.head, untied.embedding)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_prompt", [64, 256, 1024])
def test_outputs_are_diverse(num_prompt: int, temperature: float, device: SteppedCpuDevice) -> None:
    """Of 64 tokens generated after each of 8 random prompts, no token is more than a tenth."""
    size, num = 64, 8
    blocks = -(-(num_prompt + 64) // size)
    worker = model_worker(
        TINY,
        EngineConfig(block_size=size, num_blocks=num * blocks + 1, max_model_len=2048),
        load_weights(TINY, device),
        device,
    )
    rng = np.random.default_rng(5)
    runs = [
        Run(
            rng.integers(0, 256, num_prompt).tolist(),
            range(1 + i * blocks, 1 + (i + 1) * blocks),
            0,
            num_prompt,
            temperature=temperature,
            seed=i,
        )
        for i in range(num)
    ]
    for _ in range(64):
        result = worker.submit_forward(step_plan(runs, size)).collect()
        runs = [run.then(int(t)) for run, t in zip(runs, result.token_ids, strict=True)]
    outputs = [token for run in runs for token in run.tokens[num_prompt:]]
    assert max(Counter(outputs).values()) <= len(outputs) / 10
    for run in runs:
        assert max(Counter(run.tokens[num_prompt:]).values()) <= 64 / 5
