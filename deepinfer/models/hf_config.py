"""`config.json` of a Hugging Face folder -> `ModelConfig`.

Loads no torch, so that a profile naming a folder can be validated in milliseconds. Invariant: a
configuration this network would compute wrongly (other architecture, scaled rotary embedding,
sliding window, biases) is refused, never approximated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepinfer.config import DTYPES, ModelConfig
from deepinfer.errors import UserError

_INT_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


def model_config_from_folder(path: Path) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face folder with a Qwen3 `config.json`.

    Raises:
        UserError: no such file, not JSON, another architecture, or a key missing or unusable.
    """
    file = path / "config.json"
    raw = _read(file)
    if raw.get("model_type") != "qwen3":
        raise UserError(f"{file}: model_type: {raw.get('model_type')!r} is not supported: 'qwen3'")
    for key in _INT_KEYS:
        value = raw.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{file}: {key}: must be a positive integer, not {value!r}")
    if raw["num_attention_heads"] % raw["num_key_value_heads"]:
        raise UserError(
            f"{file}: num_attention_heads: {raw['num_attention_heads']} is not a multiple of "
            f"num_key_value_heads {raw['num_key_value_heads']}"
        )
    if raw["head_dim"] % 2:
        raise UserError(f"{file}: head_dim: must be even, not {raw['head_dim']}")
    _refuse_unsupported(file, raw)
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise UserError(f"{file}: dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    return ModelConfig(
        **{key: raw[key] for key in _INT_KEYS},
        rope_theta=_rope_theta(file, raw),
        rms_norm_eps=_positive(file, raw, "rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=dtype,
        path=path,
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read: {error.strerror}",
            hint="a model folder holds config.json and model.safetensors",
        ) from error
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{file}: must be a JSON object, not {type(raw).__name__}")
    return raw


def _positive(file: Path, raw: dict[str, Any], key: str, default: float) -> float:
    value = raw.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise UserError(f"{file}: {key}: must be a positive number, not {value!r}")
    return float(value)


def _rope_theta(file: Path, raw: dict[str, Any]) -> float:
    """The base of the rotary embedding; transformers 5 keeps it in `rope_parameters`."""
    for key in ("rope_parameters", "rope_scaling"):
        _refuse_scaling(file, key, raw.get(key) or {})
    nested = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    source = nested if "rope_theta" in nested else raw
    return _positive(file, source, "rope_theta", 10_000.0)


def _refuse_scaling(file: Path, key: str, rope: Any) -> None:
    """Refuse any rotary embedding but the plain one over all channels.

    Whatever else is set there (a factor, a set of parameters for each kind of layer) would change
    the angles, so keys are allowed by name.
    """
    if not isinstance(rope, dict):
        raise UserError(f"{file}: {key}: must be an object, not {rope!r}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise UserError(f"{file}: {key}: rope_type {kind!r} is not supported: 'default'")
    for name in sorted(rope.keys() - {"rope_theta", "rope_type", "type"}):
        if (name, rope[name]) != ("partial_rotary_factor", 1):
            raise UserError(f"{file}: {key}: {name} {rope[name]!r} is not supported")


def _refuse_unsupported(file: Path, raw: dict[str, Any]) -> None:
    """Refuse what would change the arithmetic and is not implemented."""
    for key in ("attention_bias", "use_sliding_window", "quantization_config"):
        if raw.get(key):
            raise UserError(f"{file}: {key}: {raw[key]!r} is not supported")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"{file}: hidden_act: {activation!r} is not supported: 'silu'")
