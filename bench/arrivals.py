"""A workload, a seed and a round become requests: when they arrive, what they say, how they end.

Knows nothing of engines, devices or cells: the same round of different cells gets the same
requests. Invariant: each number is drawn from a generator keyed by (seed, round, what, group,
request), so a request does not change when others are added, and rounds share no prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.schema import Abort, Arrival, Fork, Group, Lengths, Trace, Workload
from bench.traces import TraceRequest, read_trace
from bench.traces.mooncake import CHUNK_TOKENS

TokenIds = NDArray[np.int32]

# What a generator draws; part of its key, so new kinds go to the end.
_SHAPE, _ARRIVAL, _TOKENS, _SAMPLING, _CHUNK, _CHILD, _ABORT, _PREFIX = range(8)


@dataclass(frozen=True, slots=True, eq=False)
class ChildSpec:
    """One child of a fork.

    Attributes:
        request_id: unique within a run.
        own_prompt_token_ids: int32, read after what is shared; empty = decode path.
        max_tokens: output tokens, >= 1.
        temperature: 0 = greedy.
        seed: of the sampling noise, in [0, 2**63).
    """

    request_id: str
    own_prompt_token_ids: TokenIds
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class ForkSpec:
    """Children made as soon as the parent has `after_tokens` output tokens.

    Unless `keep_parent`, they replace it.
    """

    after_tokens: int
    children: tuple[ChildSpec, ...]
    keep_parent: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RequestSpec:
    """One request.

    Attributes:
        request_id: unique within a run.
        arrival_s: seconds since its phase began; of a later turn: since the turn before it ended.
        prompt_token_ids: int32 [num_prompt], num_prompt >= 1; of a later turn: what follows all
            that was said until then.
        max_tokens: output tokens, >= 1.
        temperature: 0 = greedy.
        seed: of the sampling noise, in [0, 2**63).
        fork: its children, if it has any.
        abort_after_tokens: output tokens after which the client gives up (less than `max_tokens`,
            and more than `fork.after_tokens`); None = never.
        phase: begins when nothing of an earlier phase is left to run.
        next_turn: comes when this one has its answer; see `turn_behind`.
    """

    request_id: str
    arrival_s: float
    prompt_token_ids: TokenIds
    max_tokens: int
    temperature: float
    seed: int
    fork: ForkSpec | None = None
    abort_after_tokens: int | None = None
    phase: int = 1
    next_turn: RequestSpec | None = None


def turn_behind(spec: RequestSpec, answer: Sequence[int]) -> RequestSpec | None:
    """The next turn of a conversation, its prompt complete; None behind the last.

    Args:
        spec: a turn, its own prompt complete.
        answer: its output.
    """
    if (turn := spec.next_turn) is None:
        return None
    said = (spec.prompt_token_ids, np.array(answer, np.int32), turn.prompt_token_ids)
    return replace(turn, prompt_token_ids=np.concatenate(said))


def build_requests(
    workload: Workload, seed: int, vocab_size: int, round_index: int
) -> list[RequestSpec]:
    """The requests of one round, sorted by phase and arrival; a conversation is its first turn.

    The same arguments give the same bytes in every process. `round_index` -1 is the warm-up.
    Raises UserError if the workload's trace is missing or not valid.
    """
    draw = _Draw(seed, round_index, vocab_size, workload.length_scale)
    if workload.trace is not None:
        requests = list(_from_trace(draw, workload.trace))
    else:
        groups = workload.requests or ()
        requests = [
            spec for index in range(len(groups)) for spec in _from_group(draw, groups, index)
        ]
    return sorted(requests, key=order_of)  # stable: ties stay in file order


def order_of(spec: RequestSpec) -> tuple[int, float]:
    """Phase and arrival: what requests are sorted by."""
    return spec.phase, spec.arrival_s


def scale_length(num_tokens: float, factor: float) -> int:
    """`num_tokens * factor` to the nearest whole number (halves up), at least 1."""
    return max(1, int(num_tokens * factor + 0.5))


@dataclass(frozen=True, slots=True)
class _Draw:
    """The seeded source of everything drawn in one round."""

    seed: int
    round_index: int
    vocab_size: int
    scale: float

    def generator(self, what: int, *key: int) -> np.random.Generator:
        spawn_key = (self.round_index + 1, what, *key)
        return np.random.Generator(
            np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=spawn_key))
        )

    def tokens(self, size: int, what: int, *key: int) -> TokenIds:
        return self.generator(what, *key).integers(0, self.vocab_size, size, dtype=np.int32)

    def sampling_seed(self, *key: int) -> int:
        return int(self.generator(_SAMPLING, *key).integers(0, 2**63 - 1))

    def length(self, lengths: Lengths, generator: np.random.Generator) -> int:
        return scale_length(_draw_length(lengths, generator), self.scale)

    def request_id(self, *key: int) -> str:
        """`r0-1-7`: round 0, group 1, request 7; `w-...` for the warm-up."""
        name = "w" if self.round_index < 0 else f"r{self.round_index}"
        return "-".join([name, *map(str, key)])


def _draw_length(lengths: Lengths, generator: np.random.Generator) -> int:
    """An unscaled length."""
    if lengths.uniform is not None:
        low, high = lengths.uniform
        return int(generator.integers(low, high, endpoint=True))
    if (law := lengths.lognormal) is not None:
        drawn = law.median * np.exp(law.sigma * generator.standard_normal())
        return int(min(max(drawn + 0.5, 1), law.max))
    assert lengths.fixed is not None, "the schema lets through exactly one form"
    return lengths.fixed


def _from_group(draw: _Draw, groups: Sequence[Group], index: int) -> Iterator[RequestSpec]:
    arrivals = _arrivals(draw, index, groups[index].arrival)
    for number in range(groups[index].count):
        yield _request(draw, groups, (index, number), next(arrivals))


def _request(
    draw: _Draw, groups: Sequence[Group], key: tuple[int, ...], arrival_s: float
) -> RequestSpec:
    """A request and its later turns; `key` is group and number and, of a later turn, which."""
    group, turn = groups[key[0]], (*key, 0)[2]
    shape = draw.generator(_SHAPE, *key)
    prompt = _prompt(draw, groups, key, shape)
    max_tokens = draw.length(group.output_tokens, shape)
    seed = draw.sampling_seed(*key)
    fork = None
    if group.fork is not None:
        after = scale_length(group.fork.after_tokens, draw.scale)
        max_tokens = max(max_tokens, after + 1)  # a parent lives until it has forked
        children = tuple(_children(draw, group.fork, key, seed))
        fork = ForkSpec(after, children, group.fork.keep_parent)
    abort_after = None
    if group.abort is not None:
        between = (fork.after_tokens if fork else 0, max_tokens)
        abort_after = _abort_after(draw, group.abort, key, between)
    next_turn = None
    if group.turns is not None and turn + 1 < group.turns.count:
        next_turn = _request(draw, groups, (*key[:2], turn + 1), group.turns.think_s)
    return RequestSpec(
        request_id=draw.request_id(*key),
        arrival_s=arrival_s,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        temperature=group.temperature,
        seed=seed,
        fork=fork,
        abort_after_tokens=abort_after,
        phase=group.phase,
        next_turn=next_turn,
    )


def _prompt(
    draw: _Draw, groups: Sequence[Group], key: tuple[int, ...], shape: np.random.Generator
) -> TokenIds:
    """What a prompt begins with, and tokens of its own; of a later turn the latter alone."""
    number, group = key[1], groups[key[0]]
    if len(key) > 2:
        assert group.turns is not None, "there is a later turn"
        return draw.tokens(draw.length(group.turns.prompt_tokens, shape), _TOKENS, *key)
    own = _own_tokens(draw, group, draw.length(group.prompt_tokens, shape), key)
    if group.prompts_of is not None:
        source = [other.name for other in groups].index(group.prompts_of)
        begin = (source, number % groups[source].count)
        return np.concatenate([_prompt(draw, groups, begin, draw.generator(_SHAPE, *begin)), own])
    if group.shared_prefix_tokens is not None:
        size = scale_length(group.shared_prefix_tokens, draw.scale)
        return np.concatenate([draw.tokens(size, _PREFIX), own])  # of any group
    return own


def _own_tokens(draw: _Draw, group: Group, num_tokens: int, key: tuple[int, ...]) -> TokenIds:
    if group.phrase_tokens is None:
        return draw.tokens(num_tokens, _TOKENS, *key)
    phrase = draw.tokens(scale_length(group.phrase_tokens, draw.scale), _TOKENS, *key)
    return np.resize(phrase, num_tokens)


def _arrivals(draw: _Draw, index: int, arrival: Arrival) -> Iterator[float]:
    """Arrival times in seconds, without end; gaps are drawn from each request's own generator."""
    now, number = arrival.start_s, 0
    while True:
        if arrival.poisson_per_s is not None:
            now += draw.generator(_ARRIVAL, index, number).exponential(1 / arrival.poisson_per_s)
            yield now
        elif arrival.every_s is not None:
            yield arrival.start_s + number * arrival.every_s
        else:
            yield arrival.at_s or 0.0
        number += 1


def _children(
    draw: _Draw, fork: Fork, key: tuple[int, ...], parent_seed: int
) -> Iterator[ChildSpec]:
    num_own = scale_length(fork.own_prompt_tokens, draw.scale) if fork.own_prompt_tokens else 0
    for child in range(fork.children):
        shape = draw.generator(_CHILD, *key, child)
        yield ChildSpec(
            request_id=f"{draw.request_id(*key)}.{child}",
            own_prompt_token_ids=draw.tokens(num_own, _TOKENS, *key, child),
            max_tokens=draw.length(fork.output_tokens, shape),
            temperature=fork.temperature,
            seed=_child_seed(parent_seed, child),
        )


def _child_seed(parent_seed: int, child: int) -> int:
    words = np.random.SeedSequence(parent_seed, spawn_key=(child,)).generate_state(1, np.uint64)
    return int(words[0]) >> 1


def _abort_after(
    draw: _Draw, abort: Abort, key: tuple[int, ...], between: tuple[int, int]
) -> int | None:
    """A number of output tokens strictly between the two, or None for a request that goes on."""
    generator = draw.generator(_ABORT, *key)
    chosen = generator.random() < abort.fraction
    low, high = between[0] + 1, between[1] - 1
    if not chosen or low > high:
        return None
    return min(max(draw.length(abort.after_tokens, generator), low), high)


def _from_trace(draw: _Draw, trace: Trace) -> Iterator[RequestSpec]:
    chunk_of = _chunk_cache(draw)
    path = Path(trace.path).expanduser() if trace.path is not None else None
    for number, row in enumerate(read_trace(trace.format, path, trace.limit)):
        if row.hash_ids is None:
            prompt = draw.tokens(scale_length(row.num_prompt, draw.scale), _TOKENS, number)
        else:
            prompt = _chunked_prompt(row, row.hash_ids, draw.scale, chunk_of)
        yield RequestSpec(
            request_id=draw.request_id(number),
            arrival_s=row.arrival_s / trace.speed,
            prompt_token_ids=prompt,
            max_tokens=scale_length(row.num_output, draw.scale),
            temperature=0.0,
            seed=draw.sampling_seed(number),
        )


def _chunk_cache(draw: _Draw) -> Callable[[int], TokenIds]:
    """The token ids of a hash id's chunk, drawn once a round."""
    size = scale_length(CHUNK_TOKENS, draw.scale)
    chunks: dict[int, TokenIds] = {}

    def chunk_of(hash_id: int) -> TokenIds:
        if hash_id not in chunks:
            chunks[hash_id] = draw.tokens(size, _CHUNK, hash_id)
        return chunks[hash_id]

    return chunk_of


def _chunked_prompt(
    row: TraceRequest,
    hash_ids: tuple[int, ...],
    scale: float,
    chunk_of: Callable[[int], TokenIds],
) -> TokenIds:
    """One chunk per hash id, the last cut to what is left: equal ids give equal prefixes.

    Chunks are scaled, not the whole, so a prompt of k full chunks stays one of k full chunks.
    """
    size = scale_length(CHUNK_TOKENS, scale)
    num_last = row.num_prompt - (len(hash_ids) - 1) * CHUNK_TOKENS
    chunks = [chunk_of(hash_id) for hash_id in hash_ids]
    chunks[-1] = chunks[-1][: min(scale_length(num_last, scale), size)]
    return np.concatenate(chunks)
