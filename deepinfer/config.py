"""Resolved settings of one engine and one model: frozen, plain, no defaults hidden elsewhere.

Knows nothing of YAML, profiles or workloads (`bench.spec` builds these) and nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the host side of an engine needs to know.

    Attributes:
        block_size: token positions per KV block.
        num_blocks: blocks in the pool, block 0 included; `num_blocks - 1` can be handed out.
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: token budget of a step; a longer prompt is computed in chunks.
        max_model_len: most tokens (prompt + output) a request may have.
        release: release policy, a name in `deepinfer.release.POLICIES`.
        free_order: in which order one table's blocks join the free list (`FREE_ORDERS`).
        discipline: where blocks join and leave the free list (`DISCIPLINES`).
        fence: `step` = one event for all blocks a step withholds, `block` = one event per block.
        admission: `prompt` reserves the blocks of the tokens there are, `lifetime` those of the
            longest the request may become (so it is never preempted).
        preemption: which running request gives way, a name in `deepinfer.scheduler.PREEMPTION`.
        fork_tail_copy: `always` copies the last block of a fork even if it is full (the engine of
            the book), `partial` only if rows will be written into it.
        seed: of the `shuffled` free order.
    """

    block_size: int = 128
    num_blocks: int = 129
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_model_len: int = 8192
    release: str = "deferred"
    free_order: str = "reverse"
    discipline: str = "fifo"
    fence: str = "step"
    admission: str = "prompt"
    preemption: str = "newest"
    fork_tail_copy: str = "always"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry of a Qwen3 network; the names are those of a Hugging Face `config.json`.

    `path` names a folder with `config.json` and safetensors; without it the weights are drawn from
    `seed`. `dtype` is a torch dtype name.
    """

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    dtype: str = "float32"
    seed: int = 0
    path: Path | None = None
