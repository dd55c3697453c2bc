"""Weights of a Qwen3 network: read from a Hugging Face folder, or drawn from a seed.

Both give the same `Qwen3Weights`, whose layout is the engine's own: q, k and v projections fused
into one matrix, gate and up into another, and the channels of each q and k head reordered so that a
rotary pair is adjacent (see `deepinfer.models.rope`).

Knows nothing of steps or caches. Invariant: every tensor has the shape `ModelConfig` says and its
dtype, and every tensor of the network in a folder has its place, or loading fails naming the file
and the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.device.base import Device
from deepinfer.errors import UserError

# What a cast to the model's dtype keeps the meaning of; an integer or float8 tensor is a quantised
# one, and its scales stand elsewhere.
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Of the drawn weights; `_Drawn` has the reasons.
_QK_NORM = 2.0
_OUTPUT_GAIN = 2.0
_EMBEDDING_STD = 0.02
_LOGIT_STD = 3.5


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. H = heads * head_dim, G = kv_heads * head_dim, D hidden, I intermediate.

    `qkv` [H + 2G, D] and `q_norm`, `k_norm` [head_dim] in interleaved rotary order; `out` [D, H];
    `gate_up` [2I, D]; `down` [D, I]; `input_norm`, `post_norm` [D].
    """

    input_norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Qwen3Weights:
    """`embedding` and `head` [V, D] (one tensor if tied), the layers, and `norm` [D]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor

    def num_parameters(self) -> int:
        """Parameters, a tied head counted once."""
        tensors = {id(t): t for t in (self.embedding, self.norm, self.head)}
        for layer in self.layers:
            tensors |= {id(t): t for t in (getattr(layer, name) for name in layer.__slots__)}
        return sum(tensor.numel() for tensor in tensors.values())


def load_weights(config: ModelConfig, device: Device) -> Qwen3Weights:
    """The weights `config` names, on `device`.

    Raises:
        UserError: `config` is no geometry of this network; a file or tensor is missing, unreadable
            or has another shape than `config` says; a tensor is no floating-point one, or is one
            this network has no use for.
    """
    config.check()
    target = device.torch_device
    if config.path is None:
        return _assemble(config, _Drawn(config), target)
    with _Folder(config.path) as folder:
        weights = _assemble(config, folder, target)
        folder.refuse_unused({"lm_head.weight"} if config.tie_word_embeddings else set())
        return weights


def num_parameters(config: ModelConfig) -> int:
    """Of the network that `config` describes, a tied head counted once; nothing is made of it."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size = config.num_attention_heads * head_dim
    kv_size = config.num_key_value_heads * head_dim
    attention = hidden * (2 * q_size + 2 * kv_size) + 2 * head_dim
    layer = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    num_tables = 1 if config.tie_word_embeddings else 2
    return config.num_hidden_layers * layer + num_tables * config.vocab_size * hidden + hidden


def interleave(x: Tensor, head_dim: int) -> Tensor:
    """Reorder channels (i, i + head_dim / 2) of each head, in dimension 0, to (2i, 2i + 1)."""
    halves = x.reshape(-1, 2, head_dim // 2, *x.shape[1:])
    return halves.transpose(1, 2).reshape(x.shape)


def _assemble(
    config: ModelConfig, get: Callable[[str, tuple[int, ...]], Tensor], target: torch.device
) -> Qwen3Weights:
    """Ask `get` for the tensors by their Hugging Face names, fuse and place them."""
    dtype = getattr(torch, config.dtype)

    def placed(tensor: Tensor) -> Tensor:
        return tensor.to(device=target, dtype=dtype).contiguous()

    hidden, head_dim, ff = config.hidden_size, config.head_dim, config.intermediate_size
    q_size, kv_size = (
        heads * head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    layers = []
    for number in range(config.num_hidden_layers):
        prefix = f"model.layers.{number}."

        def part(name: str, *shape: int, prefix: str = prefix) -> Tensor:
            return get(f"{prefix}{name}.weight", shape)

        q = interleave(part("self_attn.q_proj", q_size, hidden), head_dim)
        k = interleave(part("self_attn.k_proj", kv_size, hidden), head_dim)
        v = part("self_attn.v_proj", kv_size, hidden)
        gate, up = part("mlp.gate_proj", ff, hidden), part("mlp.up_proj", ff, hidden)
        layers.append(
            LayerWeights(
                input_norm=placed(part("input_layernorm", hidden)),
                qkv=placed(torch.cat([q, k, v])),
                q_norm=placed(interleave(part("self_attn.q_norm", head_dim), head_dim)),
                k_norm=placed(interleave(part("self_attn.k_norm", head_dim), head_dim)),
                out=placed(part("self_attn.o_proj", hidden, q_size)),
                post_norm=placed(part("post_attention_layernorm", hidden)),
                gate_up=placed(torch.cat([gate, up])),
                down=placed(part("mlp.down_proj", hidden, ff)),
            )
        )
    vocab = (config.vocab_size, hidden)
    embedding = placed(get("model.embed_tokens.weight", vocab))
    head = embedding if config.tie_word_embeddings else placed(get("lm_head.weight", vocab))
    return Qwen3Weights(embedding, tuple(layers), placed(get("model.norm.weight", (hidden,))), head)


class _Folder:
    """Tensors by name from `model.safetensors`, or from the shards its index lists."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}
        self._used: set[str] = set()
        single, index = path / "model.safetensors", path / "model.safetensors.index.json"
        self._index: dict[str, str] | None = None
        if single.is_file():
            self._single = single
        elif index.is_file():
            self._single = index
            self._index = _read_index(index)
        else:
            raise UserError(
                f"{path}: has neither model.safetensors nor model.safetensors.index.json",
                hint="other weight formats are not read; save the model with save_pretrained()",
            )

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        file = self._single
        if self._index is not None:
            if name not in self._index:
                raise UserError(f"{file}: weight_map: lists no tensor {name!r}")
            file = self._path / self._index[name]
        opened = self._open(file)
        if name not in opened.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            raise UserError(f"{file}: holds no tensor {name!r}")
        tensor: Tensor = opened.get_tensor(name)
        if tensor.dtype not in _FLOATS:
            raise UserError(
                f"{file}: {name}: dtype {_name_of(tensor.dtype)} is not supported",
                hint=f"quantised weights are not read; valid: {', '.join(map(_name_of, _FLOATS))}",
            )
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"{file}: {name}: shape {list(tensor.shape)}, but config.json says {list(shape)}"
            )
        self._used.add(name)
        return tensor

    def refuse_unused(self, redundant: set[str]) -> None:
        """Raise UserError for a tensor of the network that nobody asked for, `redundant` ones not.

        A bias, a scale or a layer too many would be left out of the sums without a word.
        """
        held = [(self._single, self._index or ())]
        held += [(file, opened.keys()) for file, opened in self._opened.items()]
        for file, names in held:
            for name in sorted(set(names) - self._used - redundant):
                if name.startswith(("model.", "lm_head")):
                    raise UserError(
                        f"{file}: {name}: this network has no such tensor",
                        hint="biases, more layers than config.json has and other architectures "
                        "are not supported",
                    )

    def _open(self, file: Path) -> Any:
        if file not in self._opened:
            try:
                self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise UserError(f"{file}: cannot be read as safetensors: {error}") from error
        return self._opened[file]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: not a safetensors index with a weight_map") from error
    if not isinstance(weight_map, dict):
        raise UserError(f"{file}: weight_map: must be an object of tensor name to file name")
    return weight_map


class _Drawn:
    """Tensors drawn from `config.seed`, the same on every device.

    A small random network usually repeats one token whatever it reads, and then no check of its
    answers can see a wrong KV block. These weights are scaled so that what is read decides:

    - q and k norms of 2 give attention scores a standard deviation of 4: a few rows carry a head's
      result, and which ones changes from token to token. Sharper, and most rows could be lost
      unseen; softer, and every token reads the same average of its context and repeats itself.
    - The layers' outputs are large beside the embedding. Under a tied head the input token would
      otherwise win its own logit.
    - Embedding rows have equal length, so no token is favoured whatever the hidden state.
    - The final norm puts the logits' standard deviation near 3.5: spread enough to tell answers
      apart, while float32 rounding moves a log-probability by less than 1e-4.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._generator = torch.Generator().manual_seed(config.seed)

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return torch.full(shape, _QK_NORM)
        if name == "model.norm.weight":
            return torch.full(shape, _LOGIT_STD / (_EMBEDDING_STD * shape[0] ** 0.5))
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        drawn = torch.randn(shape, generator=self._generator)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            length = torch.linalg.vector_norm(drawn, dim=1, keepdim=True)
            return drawn.mul_(_EMBEDDING_STD * shape[1] ** 0.5).div_(length)
        gain = _OUTPUT_GAIN if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        return drawn.mul_(gain * shape[1] ** -0.5)
