"""What a workload and a profile may say: keys, types, ranges and what must agree within one file.

Knows nothing of files or lines (`bench.validation` words the errors) and nothing of how profile,
workload and flags are merged (`bench.spec`). Invariant: an object made here is frozen and valid on
its own. A default stands in one place: those of the engine in `EngineConfig`, all others here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from bench.model_schema import AnyModel
from bench.nearest import choices
from bench.strict import Count, PositiveFloat, Seed, Strict, Text, conflict
from deepinfer.config import (
    MAX_DRAFTS,
    MAX_TIMEOUT_S,
    MIN_TEMPERATURE,
    EngineConfig,
    check_state_slots,
)
from deepinfer.device.delayed import NO_DELAY, parse_delays
from deepinfer.device.delayed import PATTERN as DELAY_PATTERN
from deepinfer.drafters.acceptance import PATTERNS, parse_acceptance
from deepinfer.errors import UserError
from deepinfer.names import CHECKS, names_of

AUTO = "auto"  # the `num_blocks` that is measured
SWITCHES = ("overlap", "checks")  # keys whose `on` and `off` are names, not booleans
_ENGINE = EngineConfig()


def _greedy_or_warm(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise PydanticCustomError("too_cold", f"0 (greedy) or at least {MIN_TEMPERATURE:g}")
    return temperature


NumRequests = Annotated[int, Field(ge=1, le=1_000_000)]  # each is drawn before the first runs
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Temperature = Annotated[
    float,
    Field(ge=0, le=100, allow_inf_nan=False),
    AfterValidator(_greedy_or_warm),
]


def _one_of(kind: str) -> AfterValidator:
    def check(value: str) -> str:
        names = names_of(kind)
        if value not in names:
            raise PydanticCustomError("unknown_name", "unknown name", {"valid": [*names]})
        return value

    return AfterValidator(check)


def _checkers(value: str) -> str:
    if value not in ("off", "all"):
        for name in value.split("+"):
            if name not in CHECKS:
                raise PydanticCustomError(
                    "unknown_name", "unknown name", {"name": name, "valid": ["off", "all", *CHECKS]}
                )
    return value


def _only_auto(value: str) -> str:
    if value != AUTO:
        raise PydanticCustomError("no_number", f"a whole number, or {AUTO}")
    return value


def _word_or_number(value: Any) -> str:
    """The tag of a number of blocks; `1e3` is one that YAML misread, and told so as a number."""
    return "<word>" if isinstance(value, str) and value.isalpha() else "<number>"


def _as_name(value: Any) -> Any:
    """`true`, `false` and the number 2 as the names they are meant to be."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if isinstance(value, int) else value


def _read_by(parse: Callable[[Any], object], name: str) -> AfterValidator:
    """Whatever `parse` can read; it calls a value that it cannot by the key `name`."""

    def check(value: Any) -> Any:
        try:
            parse(value)
        except UserError as error:
            text = str(error).removeprefix(name).removeprefix(": ")
            context = {"text": text, "hint": error.hint}
            raise PydanticCustomError("refused", "{text}", context) from error
        return value

    return AfterValidator(check)


Device = Annotated[str, _one_of("device")]
Delay = Annotated[
    str,
    _read_by(parse_delays, "delay"),
    WithJsonSchema(
        {"type": "string", "pattern": rf"^({NO_DELAY}|{DELAY_PATTERN}(\+{DELAY_PATTERN})*)$"}
    ),
]
# The grammar is `deepinfer.drafters.acceptance`'s; the schema only tells its forms apart.
AcceptanceValue = Annotated[
    Any,
    _read_by(parse_acceptance, "acceptance"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": 1},
                {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}},
                {"type": "string", "enum": list(PATTERNS)},
                {"type": "object"},
            ]
        }
    ),
]
NumBlocks = Annotated[
    Annotated[int, Field(ge=2, lt=2**31), Tag("<number>")]  # block 0 is never handed out
    | Annotated[Literal["auto"], BeforeValidator(_only_auto), Tag("<word>")],
    Discriminator(_word_or_number),
]


class EngineSettings(Strict):
    """The keys of `EngineConfig` that one file or the command line sets; see there.

    All but those of a store's directory: a round is a new engine, with nothing kept from before.

    `num_blocks: auto`: as many as there is memory for, measured when a run begins.
    """

    block_size: Count = _ENGINE.block_size
    num_blocks: NumBlocks = _ENGINE.num_blocks
    max_num_seqs: Count = _ENGINE.max_num_seqs
    num_state_slots: Annotated[
        int, Field(ge=0, lt=2**31), _read_by(check_state_slots, "num_state_slots")
    ] = _ENGINE.num_state_slots
    max_num_batched_tokens: Count = _ENGINE.max_num_batched_tokens
    max_model_len: Annotated[int, Field(ge=2, lt=2**31)] = _ENGINE.max_model_len
    release: Annotated[str, _one_of("release")] = _ENGINE.release
    free_order: Annotated[str, _one_of("free_order")] = _ENGINE.free_order
    discipline: Annotated[str, _one_of("discipline")] = _ENGINE.discipline
    fence: Annotated[str, _one_of("fence")] = _ENGINE.fence
    admission: Annotated[str, _one_of("admission")] = _ENGINE.admission
    preemption: Annotated[str, _one_of("preemption")] = _ENGINE.preemption
    fork_copy: Annotated[str, _one_of("fork_copy")] = _ENGINE.fork_copy
    prefix_cache: bool = _ENGINE.prefix_cache
    store_bytes: Annotated[int, Field(ge=0, lt=2**50)] = _ENGINE.store_bytes
    load_stream: Annotated[str, _one_of("load_stream")] = _ENGINE.load_stream
    overlap: Annotated[str, BeforeValidator(_as_name), _one_of("overlap")] = _ENGINE.overlap
    drafts: Annotated[int, Field(ge=0, le=MAX_DRAFTS)] = _ENGINE.drafts
    drafter: Annotated[str, _one_of("drafter")] = _ENGINE.drafter
    checks: Annotated[str, AfterValidator(_checkers)] = _ENGINE.checks
    timeout_s: Annotated[float, Field(ge=0, le=MAX_TIMEOUT_S)] = _ENGINE.timeout_s
    seed: Seed = _ENGINE.seed

    def given(self) -> dict[str, Any]:
        """Only what was set, by name."""
        return {name: getattr(self, name) for name in self.model_fields_set}


class Verify(Strict):
    """When a token counts as wrong.

    `score_tolerance`: how far (in logits) below the best an emitted token may be and still be a
    near-tie. `logprob_tolerance`: largest accepted difference of natural log-probabilities.
    """

    score_tolerance: PositiveFloat = 1e-3
    logprob_tolerance: PositiveFloat = 1e-3


class DeviceFlag(Strict):
    """A device named outside a profile."""

    device: Device


class Profile(Strict):
    """A machine and a model: device, geometry, pool and tolerances. `name` is the file's.

    `memory_bytes`: what weights, steps, state and blocks may take together where `num_blocks` is
    measured; by default all that is free, but `num_blocks: auto` on a CPU needs it.
    """

    name: str = Field(default="", exclude=True)
    description: Text
    device: Device = "cpu"
    memory_bytes: Annotated[int, Field(ge=1)] | None = None
    model: AnyModel
    engine: EngineSettings = EngineSettings()
    verify: Verify = Verify()


class Lognormal(Strict):
    """`median * exp(sigma * z)`, cut at `max`."""

    median: PositiveFloat
    sigma: Annotated[float, Field(ge=0, le=10)]
    max: Count


class Lengths(Strict):
    """A number of tokens: fixed (a plain number), uniform with both ends included, or lognormal."""

    fixed: Count | None = None
    uniform: Annotated[tuple[Count, Count], Field(strict=False)] | None = None
    lognormal: Lognormal | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return value if isinstance(value, (dict, Lengths)) else {"fixed": value}

    @model_validator(mode="after")
    def _agree(self) -> Lengths:
        self.only("fixed", "uniform", "lognormal")
        if self.uniform and self.uniform[0] > self.uniform[1]:
            raise conflict(f"uniform runs backwards (got {list(self.uniform)})", "[low, high]")
        return self

    @property
    def largest(self) -> int:
        """No draw is above this."""
        if self.lognormal is not None:
            return self.lognormal.max
        return self.uniform[1] if self.uniform is not None else self.fixed or 0


class Arrival(Strict):
    """When the requests of a group arrive: all at once, as a Poisson process, or evenly spaced."""

    at_s: Seconds | None = None
    poisson_per_s: PositiveFloat | None = None
    every_s: PositiveFloat | None = None
    start_s: Seconds = 0.0

    @model_validator(mode="after")
    def _agree(self) -> Arrival:
        self.only("at_s", "poisson_per_s", "every_s")
        if self.at_s is not None and "start_s" in self.model_fields_set:
            raise conflict("start_s beside at_s", "at_s alone")
        return self


class Fork(Strict):
    """Children of every request of a group, made when it has `after_tokens` output tokens.

    `own_prompt_tokens` 0 is the decode path: a child goes on where its parent stands. Above 0 it is
    the prompt path: a child shares the parent's prefix and then reads that many tokens of its own.
    Unless `keep_parent`, the parent ends when its children are made.
    """

    children: NumRequests
    output_tokens: Lengths
    own_prompt_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Temperature = 1.0
    after_tokens: Count = 1
    keep_parent: bool = False


class Abort(Strict):
    """`fraction` of a group's requests is aborted after `after_tokens` output tokens."""

    fraction: Annotated[float, Field(gt=0, le=1)]
    after_tokens: Lengths


class Turns(Strict):
    """Conversations of `count` turns each: a request comes back when it has been answered.

    A later turn comes `think_s` after the end of the one before it. Its prompt is all that was said
    until then and `prompt_tokens` more; its output is drawn like the first one's.
    """

    count: Annotated[int, Field(ge=2, le=256)]
    prompt_tokens: Lengths
    think_s: Seconds = 0.0


class Group(Strict):
    """`count` requests drawn alike.

    With `phrase_tokens` a prompt says one phrase of so many tokens again and again. In front of its
    `prompt_tokens` may stand `shared_prefix_tokens` of a text that all groups share, or, with
    `prompts_of`, a prompt of the group above that has this `name`: the first one's before the
    first, and so on, from its first again behind its last. Who gives up does not come back for the
    next of its `turns`.

    A `phase` begins when nothing of an earlier one is left to run; its arrivals count from then.
    """

    name: Text | None = None
    count: NumRequests
    prompt_tokens: Lengths
    phrase_tokens: Count | None = None
    shared_prefix_tokens: Count | None = None
    prompts_of: Text | None = None
    output_tokens: Lengths
    phase: Count = 1
    arrival: Arrival = Arrival(at_s=0.0)
    temperature: Temperature = 0.0
    turns: Turns | None = None
    fork: Fork | None = None
    abort: Abort | None = None

    @model_validator(mode="after")
    def _agree(self) -> Group:
        if self.prompts_of is not None and self.shared_prefix_tokens is not None:
            raise conflict("shared_prefix_tokens beside prompts_of", "one of the two")
        if self.turns and self.fork:
            raise conflict("fork beside turns", "one of the two")
        if self.fork and self.fork.after_tokens >= self.output_tokens.largest:
            raise conflict(
                f"fork.after_tokens is past the parent's end (got {self.fork.after_tokens})",
                f"less than the parent's output_tokens ({self.output_tokens.largest})",
            )
        return self


class Trace(Strict):
    """Arrivals and lengths of a recorded trace; `speed` divides its arrival times."""

    format: Literal["azure", "mooncake"]
    path: Text | None = None
    limit: Count | None = None
    scale_lengths: PositiveFloat = 1.0
    speed: PositiveFloat = 1.0


class AcceptanceFlag(Strict):
    """An `acceptance` named outside a workload."""

    acceptance: AcceptanceValue


class DelayFlag(Strict):
    """A `delay` named outside a workload."""

    delay: Delay


class Workload(Strict):
    """What requests come when: request groups or a trace. `name` is the file's.

    `acceptance`: how often the drafts of drafter `replay` are to be right. `delay`: planted before
    every operation of a stream, as `copy=2ms` or `copy=2ms+load=500us`.
    """

    name: str = Field(default="", exclude=True)
    description: Text
    engine: EngineSettings = EngineSettings()
    acceptance: AcceptanceValue = None
    delay: Delay = NO_DELAY
    requests: Annotated[tuple[Group, ...], Field(strict=False)] | None = None
    trace: Trace | None = None
    scale_lengths: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _agree(self) -> Workload:
        self.only("requests", "trace")
        if self.requests == ():
            raise conflict("requests is empty (got [])", "at least one group")
        if self.trace and "scale_lengths" in self.model_fields_set:
            raise conflict("scale_lengths beside trace", "scale_lengths within trace")
        _check_names(self.requests or ())
        return self

    @property
    def length_scale(self) -> float:
        """Factor on every token count, of request groups and traces alike."""
        return self.trace.scale_lengths if self.trace else self.scale_lengths


def _check_names(groups: Sequence[Group]) -> None:
    """Names are of one group each, and whose prompts are said again is further up."""
    above: list[str] = []
    for index, group in enumerate(groups):
        source = group.prompts_of
        if source is not None and source not in above:
            raise conflict(
                f"no group of that name further up (got {source!r})",
                choices(source, above) if above else "the `name` of a group above this one",
                at=("requests", index, "prompts_of"),
            )
        if group.name in above:
            raise conflict(
                f"two groups of one name (got {group.name!r})",
                "names that differ",
                at=("requests", index, "name"),
            )
        above += [group.name] if group.name is not None else []
