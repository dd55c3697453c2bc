"""The model of a world: geometries that an engine asks for, and what follows a prompt in it.

`deepinfer.testing.tokens` computes; here is what it must come to. No torch. Invariant: the tokens
of a request follow from its prompt alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.models.hybrid.layer_plan import V41, HybridConfig
from deepinfer.runners import Model
from deepinfer.testing.tokens import extend, next_token, prefixes

VOCAB_SIZE = 9  # of what is sampled; a prompt may have any tokens
# Geometries for the engine's checks of token ids; nothing else looks at them.
MODEL = ModelConfig(
    num_hidden_layers=1,
    hidden_size=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=2,
    intermediate_size=1,
    vocab_size=1 << 30,
)


MODEL_WITH_STATE = HybridConfig(
    family=V41,
    layers=(),
    vocab_size=1 << 30,
    hidden_size=1,
    num_attention_heads=1,
    head_dim=2,
    qk_rope_head_dim=2,
    q_lora_rank=1,
    o_groups=1,
    o_lora_rank=1,
    sliding_window=1,
    index_n_heads=1,
    index_head_dim=2,
    index_topk=1,
    moe_intermediate_size=1,
    n_routed_experts=1,
    num_experts_per_tok=1,
    max_draft_tokens=0,
)


def model_of(config: EngineConfig) -> Model:
    """What an engine with this configuration is told it runs: with state if it has slots for it."""
    if not config.num_state_slots:
        return MODEL
    return replace(MODEL_WITH_STATE, max_draft_tokens=config.drafts)


def right_answer(prompt: Sequence[int], count: int, *, has_state: bool = False) -> list[int]:
    """The tokens that follow a prompt when every row is right, and the state if there is one."""
    tokens, rows = list(prompt), prefixes(prompt)
    for _ in range(count):
        tokens.append(next_token(rows + rows[-1:] * has_state, VOCAB_SIZE))
        rows.append(extend(rows[-1], tokens[-1]))
    return tokens[len(prompt) :]
