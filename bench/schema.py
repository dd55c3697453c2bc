"""What a workload and a profile may say: keys, types, ranges and what must agree within one file.

Knows nothing of files or lines (`bench.validation` words the errors) and nothing of how profile,
workload and flags are merged (`bench.spec`). Invariant: an object made here is frozen and valid on
its own. A default stands in one place: those of the engine in `EngineConfig`, all others here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from deepinfer.config import MIN_TEMPERATURE, EngineConfig
from deepinfer.names import DESCRIPTIONS

_ENGINE = EngineConfig()


def _greedy_or_warm(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise PydanticCustomError("too_cold", f"0 (greedy) or at least {MIN_TEMPERATURE:g}")
    return temperature


# Ids, positions and counters are int32.
Count = Annotated[int, Field(ge=1, lt=2**31)]
NumRequests = Annotated[int, Field(ge=1, le=1_000_000)]  # each is drawn before the first runs
Seed = Annotated[int, Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Temperature = Annotated[
    float,
    Field(ge=0, le=100, allow_inf_nan=False),
    AfterValidator(_greedy_or_warm),
]
Text = Annotated[str, Field(min_length=1)]


def _one_of(kind: str) -> AfterValidator:
    def check(value: str) -> str:
        if value not in DESCRIPTIONS[kind]:
            names = list(DESCRIPTIONS[kind])
            raise PydanticCustomError("unknown_name", "unknown name", {"valid": names})
        return value

    return AfterValidator(check)


Device = Annotated[str, _one_of("device")]


def _conflict(text: str, expected: str) -> PydanticCustomError:
    return PydanticCustomError("conflict", "{text}", {"text": text, "expected": expected})


class Strict(BaseModel):
    """Exact types, no unknown key, no change after it is made."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())

    def only(self, *names: str) -> None:
        """Refuse any number but one of these keys."""
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            what = f"several forms (got {' and '.join(given)})" if given else "no form given"
            raise _conflict(what, f"one of {', '.join(names)}")


class EngineSettings(Strict):
    """The keys of `EngineConfig` that one file or the command line sets; see there."""

    block_size: Count = _ENGINE.block_size
    num_blocks: Annotated[int, Field(ge=2, lt=2**31)] = (
        _ENGINE.num_blocks
    )  # block 0 is never handed out
    max_num_seqs: Count = _ENGINE.max_num_seqs
    max_num_batched_tokens: Count = _ENGINE.max_num_batched_tokens
    max_model_len: Annotated[int, Field(ge=2, lt=2**31)] = _ENGINE.max_model_len
    release: Annotated[str, _one_of("release")] = _ENGINE.release
    free_order: Annotated[str, _one_of("free_order")] = _ENGINE.free_order
    discipline: Annotated[str, _one_of("discipline")] = _ENGINE.discipline
    fence: Annotated[str, _one_of("fence")] = _ENGINE.fence
    admission: Annotated[str, _one_of("admission")] = _ENGINE.admission
    preemption: Annotated[str, _one_of("preemption")] = _ENGINE.preemption
    fork_tail_copy: Annotated[str, _one_of("fork_tail_copy")] = _ENGINE.fork_tail_copy
    seed: Seed = _ENGINE.seed

    def given(self) -> dict[str, Any]:
        """Only what was set, by name."""
        return {name: getattr(self, name) for name in self.model_fields_set}


class ModelSettings(Strict):
    """A geometry with weights drawn from `seed`, or `path`: a Hugging Face folder that has both."""

    path: Text | None = None
    num_hidden_layers: Count | None = None
    hidden_size: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: Count | None = None
    vocab_size: Annotated[int, Field(ge=2)] | None = None
    rope_theta: PositiveFloat = 1e6
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = True
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: Seed = 0

    @model_validator(mode="after")
    def _agree(self) -> ModelSettings:
        if self.path is not None:
            beside = sorted(self.model_fields_set - {"path", "dtype"})
            if beside:
                raise _conflict(f"`path` beside {', '.join(beside)}", "path alone, or a geometry")
            return self
        missing = [name for name in GEOMETRY if getattr(self, name) is None]
        if missing:
            raise _conflict(f"missing {', '.join(missing)}", "a whole geometry, or path")
        heads, kv_heads, head_dim = (
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
        )
        assert heads is not None
        assert kv_heads is not None
        assert head_dim is not None
        if heads % kv_heads:
            raise _conflict(
                f"query heads do not share KV heads evenly (got {heads} and {kv_heads})",
                "num_attention_heads a multiple of num_key_value_heads",
            )
        if head_dim % 2:
            raise _conflict(f"head_dim cannot be halved (got {head_dim})", "an even number")
        return self


GEOMETRY = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


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
    """A machine and a model: device, geometry, pool and tolerances. `name` is the file's."""

    name: str = Field(default="", exclude=True)
    description: Text
    device: Device = "cpu"
    model: ModelSettings
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
            raise _conflict(f"uniform runs backwards (got {list(self.uniform)})", "[low, high]")
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
            raise _conflict("start_s beside at_s", "at_s alone")
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


class Group(Strict):
    """`count` requests drawn alike."""

    count: NumRequests
    prompt_tokens: Lengths
    output_tokens: Lengths
    arrival: Arrival = Arrival(at_s=0.0)
    temperature: Temperature = 0.0
    fork: Fork | None = None
    abort: Abort | None = None

    @model_validator(mode="after")
    def _agree(self) -> Group:
        if self.fork and self.fork.after_tokens >= self.output_tokens.largest:
            raise _conflict(
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


class Workload(Strict):
    """What requests come when: request groups or a trace. `name` is the file's."""

    name: str = Field(default="", exclude=True)
    description: Text
    engine: EngineSettings = EngineSettings()
    requests: Annotated[tuple[Group, ...], Field(strict=False)] | None = None
    trace: Trace | None = None
    scale_lengths: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _agree(self) -> Workload:
        self.only("requests", "trace")
        if self.requests == ():
            raise _conflict("requests is empty (got [])", "at least one group")
        if self.trace and "scale_lengths" in self.model_fields_set:
            raise _conflict("scale_lengths beside trace", "scale_lengths within trace")
        return self

    @property
    def length_scale(self) -> float:
        """Factor on every token count, of request groups and traces alike."""
        return self.trace.scale_lengths if self.trace else self.scale_lengths
