"""config.json -> ModelConfig, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepinfer.config import ModelConfig
from deepinfer.errors import UserError
from deepinfer.models.hf_config import model_config_from_folder

GOOD: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 199,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def folder(tmp_path: Path, **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(GOOD | changes))
    return tmp_path


def test_every_field_is_read(tmp_path: Path) -> None:
    """Sizes, rotary base, epsilon, tying, dtype and the folder itself."""
    assert model_config_from_folder(folder(tmp_path)) == ModelConfig(
        2, 64, 4, 2, 16, 96, 199, 5e5, 1e-5, True, "bfloat16", path=tmp_path
    )


def test_rope_theta_of_transformers_5(tmp_path: Path) -> None:
    """The rotary base may stand in `rope_parameters`, and wins over the old key there."""
    nested = {"rope_theta": 123.0, "rope_type": "default"}
    assert model_config_from_folder(folder(tmp_path, rope_parameters=nested)).rope_theta == 123.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"),
        ("hidden_size", None),
        ("vocab_size", "199"),
        ("num_hidden_layers", True),
        ("head_dim", 15),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", -1),
        ("dtype", "int8"),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_scaling", {"factor": 2.0}),
        ("rope_scaling", "yarn"),
        ("rope_parameters", {"partial_rotary_factor": 0.5}),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    """The error is one line with the file and the key."""
    with pytest.raises(UserError, match=key) as caught:
        model_config_from_folder(folder(tmp_path, **{key: value}))
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_scaling_is_refused_beside_plain_parameters(tmp_path: Path) -> None:
    """A scaling under the old key is not hidden by parameters without one under the new key."""
    both = {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "yarn"}}
    with pytest.raises(UserError, match=r"config\.json: rope_scaling: rope_type 'yarn'"):
        model_config_from_folder(folder(tmp_path, **both))


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff\xfe"])
def test_unreadable_files_are_refused(tmp_path: Path, content: bytes | None) -> None:
    """No file, an empty one, broken JSON, no object, not UTF-8: one line naming the file."""
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json: "):
        model_config_from_folder(tmp_path)


def test_no_torch_is_loaded() -> None:
    """Reading a configuration costs no import of torch."""
    code = "import deepinfer.models.hf_config, sys; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
