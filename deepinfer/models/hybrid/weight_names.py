"""One naming for the tensors of both families, whatever file they come from.

The names are those of the V4.1 checkpoints without a final `.weight`, with the experts of a layer
stacked (`layers.3.ffn.experts.w1`); draft layers are `mtp.0` and so on. Three forms are read: that
one, the same with a name per expert (`layers.3.ffn.experts.0.w1.weight`), and transformers' names
of V4 (`model.layers.3.mlp...`).

Knows names, not shapes. Invariant: no two tensors get one name, and none is dropped but those of
parts this network does not have (`UNUSED`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from deepinfer.errors import UserError

Key = TypeVar("Key", str, int)

# Image tokens, and how sure a draft is: other computations, not parts of this one left out.
UNUSED = re.compile(r"\.gate\.bias_vl$|(^|\.)mtp\.\d+\.confidence_head\.")
DRAFT = re.compile(r"^mtp\.")

_TRANSFORMERS = [
    (r"^embed_tokens$", "embed"),
    (r"^lm_head$", "head"),
    (r"^hc_head\.hc_(fn|base|scale)$", r"hc_head_\1"),
    (r"\.input_layernorm$", ".attn_norm"),
    (r"\.post_attention_layernorm$", ".ffn_norm"),
    (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
    (r"\.self_attn\.compressor\.indexer\.q_b_proj$", ".attn.indexer.wq_b"),
    (r"\.self_attn\.compressor\.indexer\.scorer\.weights_proj$", ".attn.indexer.weights_proj"),
    (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
    (r"\.self_attn\.", ".attn."),
    (r"\.compressor\.kv_norm$", ".compressor.norm"),
    (r"\.gate_proj$", ".wgate"),
    (r"\.position_bias$", ".ape"),
    (r"\.kv_proj$", ".wkv"),
    (r"\.q_a_proj$", ".wq_a"),
    (r"\.q_b_proj$", ".wq_b"),
    (r"\.q_a_norm$", ".q_norm"),
    (r"\.o_([ab])_proj$", r".wo_\1"),
    (r"\.sinks$", ".attn_sink"),
    (r"\.mlp\.", ".ffn."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"\.shared_experts\.wgate$", ".shared_experts.w1"),
    (r"\.shared_experts\.up_proj$", ".shared_experts.w3"),
    (r"\.(shared_experts|experts)\.down_proj$", r".\1.w2"),
]
_OF_EXPERT = re.compile(r"^((?:layers|mtp)\.\d+\.ffn\.experts)\.(\d+)\.(w[123])$")


def canonical(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under this module's names; fused ones split, experts stacked.

    Raises:
        UserError: the experts of a layer do not count from 0 without a gap, differ in shape, or two
            names mean one tensor.
    """
    named: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for given, tensor in state.items():
        if UNUSED.search(given):
            continue
        name = _renamed(given)
        if match := _OF_EXPERT.match(name):
            stack = experts.setdefault(f"{match[1]}.{match[3]}", {})
            _put(stack, int(match[2]), tensor, given)
        elif name.endswith(".experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            _put(named, name.replace("gate_up_proj", "w1"), gate, given)
            _put(named, name.replace("gate_up_proj", "w3"), up, given)
        else:
            _put(named, name, tensor, given)
    for name, stack in experts.items():
        if gaps := set(range(max(stack))) - stack.keys():
            raise UserError(f"{name}: expert {min(gaps)} of {max(stack) + 1} is missing")
        if len({tuple(tensor.shape) for tensor in stack.values()}) > 1:
            raise UserError(f"{name}: its experts differ in shape")
        _put(named, name, torch.stack([stack[number] for number in sorted(stack)]), name)
    return named


def _renamed(name: str) -> str:
    name = name.removeprefix("model.").removesuffix(".weight")
    for pattern, replacement in _TRANSFORMERS:
        name = re.sub(pattern, replacement, name)
    return name


def _put(into: dict[Key, Tensor], key: Key, tensor: Tensor, given: str) -> None:
    if key in into:
        raise UserError(f"{given}: a second tensor for {key}")
    into[key] = tensor
