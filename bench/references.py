"""What requests say in a run without drafts: what the drafter `replay` goes by.

    requests                      all at once on a plain engine, each to its full length
    their children, next turns    as requests of their own, behind what those said

Knows requests and the plain engine; neither rounds nor how the tokens are used. They decide how
many drafts are accepted and nothing else: verification is the engine's, and the verdict on what it
emitted is the dense reference's. Invariant: equal requests on an equal pool are run once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

import numpy as np

from bench.arrivals import ChildSpec, RequestSpec, TokenIds, turn_behind
from bench.spec import Resolved
from deepinfer.config import EngineConfig
from deepinfer.device import Device
from deepinfer.engine import LLMEngine
from deepinfer.runners import Weights
from deepinfer.sequence import SamplingParams

# Of an engine, what decides which requests fit it and what a step computes.
_KEPT = (
    *("block_size", "num_blocks", "max_num_seqs", "num_state_slots", "max_num_batched_tokens"),
    *("max_model_len", "timeout_s"),
)
Requests = tuple[RequestSpec, ...]
_Asked = tuple[RequestSpec | ChildSpec, TokenIds]  # a request and its whole prompt


class References:
    """Reference runs on one device, with one model's weights."""

    def __init__(self, device: Device, weights: Weights) -> None:
        self._device, self._weights = device, weights
        self._known: dict[tuple[EngineConfig, Requests], dict[str, TokenIds]] = {}

    def of(self, resolved: Resolved, requests: Sequence[RequestSpec]) -> dict[str, TokenIds]:
        """Prompt and output, int32 [n], by request id; those that can never fit are left out.

        A request that its client gives up, or a parent that its children replace, goes on here.
        """
        config = plain_config(resolved.engine)
        key = config, tuple(requests)  # requests are equal if they are the same object
        if key not in self._known:
            with LLMEngine(
                resolved.model, config, device=self._device, weights=self._weights
            ) as engine:
                self._known[key] = _run(engine, key[1])
        return self._known[key]


def plain_config(config: EngineConfig) -> EngineConfig:
    """An engine with room for the same requests and none of the choices under study."""
    given = asdict(config)
    return EngineConfig(**{name: given[name] for name in _KEPT})


def child_prompt(parent: RequestSpec, child: ChildSpec, answer: Sequence[int]) -> list[int]:
    """What a child of a fork goes on from.

    Args:
        answer: the parent's output; the child knows as much of it as it was forked after.
    """
    assert parent.fork is not None, "it has a child"
    own = child.own_prompt_token_ids
    rest = own.tolist() if len(own) else list(answer[: parent.fork.after_tokens])
    return [*parent.prompt_token_ids.tolist(), *rest]


def sampling_of(spec: RequestSpec | ChildSpec) -> SamplingParams:
    """How the engine is to choose a request's tokens."""
    return SamplingParams(max_tokens=spec.max_tokens, temperature=spec.temperature, seed=spec.seed)


def _run(engine: LLMEngine, requests: Requests) -> dict[str, TokenIds]:
    found: dict[str, TokenIds] = {}
    wave: list[_Asked] = [(spec, spec.prompt_token_ids) for spec in requests]
    while wave:
        answers = _run_all(engine, wave)
        found |= answers
        wave = [
            behind
            for spec, prompt in wave
            if isinstance(spec, RequestSpec) and spec.request_id in answers
            for behind in _behind(spec, answers[spec.request_id][len(prompt) :].tolist())
        ]
    return found


def _behind(spec: RequestSpec, answer: list[int]) -> Iterator[_Asked]:
    """Who goes on from a request and its answer: its children, and its next turn."""
    for child in spec.fork.children if spec.fork is not None else ():
        yield child, np.array(child_prompt(spec, child, answer), np.int32)
    if (turn := turn_behind(spec, answer)) is not None:
        yield turn, turn.prompt_token_ids


def _run_all(engine: LLMEngine, requests: Iterable[_Asked]) -> dict[str, TokenIds]:
    for spec, prompt in requests:  # what can never fit is refused, here as in every round
        engine.add_request(spec.request_id, prompt, sampling_of(spec))
    found: dict[str, TokenIds] = {}
    while engine.has_unfinished():
        output = engine.step()
        for ended in output.finished if output is not None else ():
            tokens = (ended.prompt_token_ids, ended.token_ids)
            found[ended.request_id] = np.concatenate(tokens).astype(np.int32)
    return found
