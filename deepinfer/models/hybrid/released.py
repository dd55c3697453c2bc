"""The geometry of released models, for sizes and tables; the weights are not here.

Knows numbers only; no torch. Invariant: `num_stored_layers` and `cache` are those of the system
that serves the model, everything else is the model's own.
"""

from __future__ import annotations

from typing import Any

from deepinfer.models.hybrid.layer_plan import (
    CSA,
    HCA,
    SLIDING,
    HybridConfig,
    v4_config,
    v41_config,
)

_ROPE = {
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}

V41_FLASH: dict[str, Any] = {
    "num_hidden_layers": 40,
    "vocab_size": 129280,
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "moe_intermediate_size": 2304,
    "n_routed_experts": 384,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-20,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": _ROPE,
    "engram_layer_ids": [1, 14],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_id": 2,
    "engram_vocab_size": 16000000,
    "engram_compressed_vocab_size": 99092,
    "engram_num_embeddings": [384006168, 384016682],
}

V4_FLASH: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "head_dim": 512,
    "partial_rotary_factor": 0.125,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "layer_types": [SLIDING] * 2 + [CSA, HCA] * 20 + [CSA],
    "compress_rates": {CSA: 4, HCA: 128},
    "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "main": {"rope_theta": 10000.0},
        "compress": {"rope_theta": 160000.0, **_ROPE},
    },
}


def v41_flash(**overrides: Any) -> HybridConfig:
    """V4.1-Flash as served: packed rows, the windows of the first 20 layers stored."""
    served = {"cache": "packed", "qat": True, "num_stored_layers": 20, "dtype": "bfloat16"}
    return v41_config(V41_FLASH, **{**served, **overrides})


def v4_flash(**overrides: Any) -> HybridConfig:
    """V4-Flash with the row formats of V4.1; it is not known what a store of it would keep."""
    return v4_config(V4_FLASH, **{"cache": "packed", "dtype": "bfloat16", **overrides})
