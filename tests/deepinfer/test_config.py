"""Settings that no engine can have are refused by their key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.errors import UserError

MODEL = ModelConfig(2, 64, 4, 2, 16, 96, 199)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 0),
        ("hidden_size", 64.0),
        ("vocab_size", True),
        ("intermediate_size", "96"),
        ("head_dim", 15),
        ("num_attention_heads", 5),
        ("num_key_value_heads", 0),
        ("rope_theta", 0),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", None),
        ("dtype", "int8"),
        ("seed", 1.5),
    ],
)
def test_an_impossible_network_is_refused(key: str, value: Any) -> None:
    """Each key is named with its value."""
    with pytest.raises(UserError, match=f"{key}.*{value}"):
        replace(MODEL, **{key: value}).check()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_size", 0),
        ("block_size", 16.0),
        ("num_blocks", 1),
        ("num_blocks", "129"),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", 63),
        ("max_model_len", None),
        ("seed", -1),
    ],
)
def test_impossible_sizes_of_an_engine_are_refused(key: str, value: Any) -> None:
    """Each key is named with its value."""
    with pytest.raises(UserError, match=f"{key}: {value!r}"):
        replace(EngineConfig(), **{key: value}).check()


def test_what_is_possible_passes() -> None:
    """The defaults, and integers that came out of numpy."""
    EngineConfig().check()
    replace(EngineConfig(), block_size=np.int64(16)).check()
    MODEL.check()
