"""How long a run will take, before anything of it is run.

Knows earlier results and a rule of thumb; opens no device. Invariant: an estimate says where it
comes from, and the rule's figures stand here, in one place.

The rule, for what has never been run: a round computes 2 floating-point operations for each
parameter and token, once in the engine and once more to verify, at the speed below, but no faster
than its requests arrive; 8 tokens of warm-up are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.arrivals import RequestSpec, build_requests
from bench.history import SavedCell
from bench.spec import Resolved
from deepinfer.config import ModelConfig
from deepinfer.models.hybrid.layer_plan import HybridConfig

FLOPS = {"cpu": 5e10, "cpu-stepped": 5e10, "cuda": 2e13}  # a second; small batches reach no more


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds a round of one cell takes, verification included, and where that is from."""

    round_s: float
    source: str


def estimate_round(
    axes: Mapping[str, Any], resolved: Resolved, earlier: Sequence[SavedCell]
) -> Estimate:
    """What a round of a cell will cost.

    The median over earlier runs of the same configuration that had a cell with these axes; else the
    rule.
    """
    costs = [
        cell.mean_round_s
        for cell in earlier
        if cell.mean_round_s is not None
        and cell.workload == resolved.workload.name
        and cell.profile == resolved.profile_name
        and cell.axes == axes
    ]
    if costs:
        runs = "1 earlier run" if len(costs) == 1 else f"{len(costs)} earlier runs"
        return Estimate(median(costs), runs)
    requests = build_requests(resolved.workload, resolved.seed, resolved.model.vocab_size, 0)
    num_flop = 2 * 2 * num_parameters(resolved.model) * _num_tokens(requests)
    computing_s = num_flop / FLOPS[resolved.device]
    speed = f"{FLOPS[resolved.device]:.0e}".replace("e+", "e")
    return Estimate(
        max(computing_s, _arriving_s(requests)), f"rule: {speed} FLOP/s, never run before"
    )


def num_parameters(model: ModelConfig | HybridConfig) -> int:
    """Parameters a token is multiplied with: the layers' and the head's, not the embedding's.

    Of the experts it meets those it is routed to. Norms and biases are left out.
    """
    if isinstance(model, HybridConfig):
        return _num_hybrid_parameters(model)
    heads = model.num_attention_heads + 2 * model.num_key_value_heads
    attention = model.hidden_size * model.head_dim * (heads + model.num_attention_heads)
    mlp = 3 * model.hidden_size * model.intermediate_size
    return model.num_hidden_layers * (attention + mlp) + model.hidden_size * model.vocab_size


def _num_hybrid_parameters(model: HybridConfig) -> int:
    hidden, heads, head_dim = model.hidden_size, model.num_attention_heads, model.head_dim
    attention = hidden * (model.q_lora_rank + head_dim) + model.q_lora_rank * heads * head_dim
    output = model.o_lora_rank * (heads * head_dim + model.o_groups * hidden)
    experts = 3 * hidden * model.moe_intermediate_size * (model.num_experts_per_tok + 1)
    experts += hidden * model.n_routed_experts  # the router
    mixes = 2 * model.hc_mult * (2 + model.hc_mult) * model.hc_mult * hidden
    total = model.num_hidden_layers * (attention + output + experts + mixes)
    for layer in model.layers:
        if layer.compressor is not None:
            columns = 2 if layer.compressor.overlap else 1
            columns *= 2 if layer.compressor.gated else 1
            total += hidden * head_dim * columns
            if layer.index_keys == "pooled":
                total += hidden * model.index_head_dim * columns
            elif layer.index_keys == "latent":
                total += head_dim * model.index_head_dim
        if layer.is_selector:
            width = model.index_head_dim * model.q_lora_rank + hidden
            total += model.index_n_heads * width
        if layer.engram and model.engram is not None:
            looked_up = model.engram.columns * model.engram.head_dim
            total += looked_up * (model.hc_mult + 1) * hidden
    collapse = 0 if model.single_pass else model.hc_mult * model.hc_mult * hidden
    return total + collapse + hidden * model.vocab_size


def _num_tokens(requests: Sequence[RequestSpec]) -> int:
    """Tokens of prompts and outputs, children included, as if nothing were aborted or shared."""
    total = 0
    for request in requests:
        said = 0
        for turn in _turns(request):
            said += len(turn.prompt_token_ids) + turn.max_tokens
            total += said
        for child in request.fork.children if request.fork else ():
            total += len(child.own_prompt_token_ids) + child.max_tokens
    return total


def _arriving_s(requests: Sequence[RequestSpec]) -> float:
    """Seconds until the last one has come, if all are answered at once."""
    phases: dict[int, float] = {}
    for request in requests:
        last_s = sum(turn.arrival_s for turn in _turns(request))
        phases[request.phase] = max(phases.get(request.phase, 0.0), last_s)
    return sum(phases.values())


def _turns(request: RequestSpec | None) -> Iterator[RequestSpec]:
    while request is not None:
        yield request
        request = request.next_turn
