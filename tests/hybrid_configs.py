"""Small hybrid networks of any layer order, as `config.json` keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer.models.hybrid.layer_plan import CSA, HCA, SLIDING

_SHARED = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "sliding_window": 8,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 3,
    "moe_intermediate_size": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}


def v41_raw(
    ratios: Sequence[int],
    *,
    sources: Sequence[int],
    selectors: Sequence[int],
    publisher: int | None,
    engram: Sequence[int] = (),
) -> dict[str, Any]:
    """Keys of a V4.1 network; an Engram of two-token hashes 29, 31 and so on upwards."""
    primes = [[29, 31, 37, 41], [43, 47, 53, 59]][: len(engram)]
    return {
        **_SHARED,
        "num_hidden_layers": len(ratios),
        "compress_ratios": list(ratios),
        "kv_source_layer_ids": list(sources),
        "index_source_layer_ids": list(selectors),
        "candidate_source_layer_id": publisher,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 4,
        "qk_rope_head_dim": 8,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": _YARN,
        "rms_norm_eps": 1e-20,
        "engram_layer_ids": list(engram),
        "engram_vocab_size": 29,
        "engram_num_embeddings": [sum(row) for row in primes],
        "engram_max_ngram_size": 3,
        "engram_n_heads": 2,
        "engram_head_dim": 8,
        "engram_pad_id": 2,
        "engram_compressed_vocab_size": 40,
    }


def dspark(targets: Sequence[int], num_layers: int = 3) -> dict[str, Any]:
    """Keys of V4.1 draft layers: a block of five, experts of another number than the model's."""
    return {
        "num_nextn_predict_layers": num_layers,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 60,
        "dspark_target_layer_ids": list(targets),
        "dspark_markov_rank": 6,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 1,
    }


def v4_raw(
    *,
    ratios: tuple[int, int],
    window: int,
    layers: Sequence[str] = (SLIDING, CSA, HCA, CSA),
    head_dim: int = 32,
) -> dict[str, Any]:
    """Keys of a V4 network; the first layer is hash-routed."""
    partial = 8 / head_dim
    return {
        **_SHARED,
        "sliding_window": window,
        "head_dim": head_dim,
        "num_key_value_heads": 1,
        "num_hidden_layers": len(layers),
        "layer_types": list(layers),
        "mlp_layer_types": ["hash_moe"] + ["moe"] * (len(layers) - 1),
        "compress_rates": {CSA: ratios[0], HCA: ratios[1]},
        "partial_rotary_factor": partial,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "main": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": partial,
            },
            "compress": {
                **_YARN,
                "rope_theta": 160000.0,
                "partial_rotary_factor": partial,
                "attention_factor": 1.0,
            },
        },
    }
