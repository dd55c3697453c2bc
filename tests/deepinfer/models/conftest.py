"""A tiny random Qwen3 saved by transformers, tied and untied, in one file or in shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session", params=["tied", "untied-sharded"])
def saved_qwen3(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Path, Any]:
    """(folder, transformers model) of a random Qwen3 with 70 x 2 positions to spare."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        vocab_size=199,
        max_position_embeddings=512,
        rope_theta=1e4,
        initializer_range=0.15,
        tie_word_embeddings=request.param == "tied",
    )
    model = Qwen3ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a wrong channel order
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="100KB" if "sharded" in request.param else "1GB")
    return folder, model
