"""From files, flags and axes to one resolved configuration, merged in one place.

Merge order: defaults < profile < workload < flags (`resolve`). Knows nothing of engines or devices
and never loads torch. Invariant: `Resolved.to_dict()` holds everything that decides what a cell
computes, so equal `config_hash` means equal work.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from bench.model_schema import GEOMETRY, HybridSettings
from bench.nearest import choices
from bench.schema import (
    AUTO,
    SWITCHES,
    AcceptanceFlag,
    DelayFlag,
    DeviceFlag,
    EngineSettings,
    Profile,
    Trace,
    Verify,
    Workload,
)
from bench.strict import Strict
from bench.validation import describe, validate
from bench.yaml_source import Problem, Source, SourceError, parse, show_value
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.device.delayed import NO_DELAY
from deepinfer.errors import UserError
from deepinfer.models.hf_config import model_config_from_folder
from deepinfer.models.hybrid.geometry import Geometry
from deepinfer.models.hybrid.layer_plan import HybridConfig, check_drafts
from deepinfer.names import DESCRIPTIONS, UNSAFE_POLICIES

# `seed` is left out: every cell of a comparison gets the same requests.
AXES = (
    *(name for name in EngineSettings.model_fields if name != "seed"),
    *("device", "acceptance", "delay"),
)
NOT_OF_ENGINE: dict[str, type[Strict]] = {
    "device": DeviceFlag,
    "acceptance": AcceptanceFlag,
    "delay": DelayFlag,
}
UNMEASURED = 0  # `num_blocks: auto` before it is measured; no engine takes it
# Of a configuration, all that its `auto` depends on beside the model and its memory.
POOL_KEYS = (
    *("block_size", "max_num_seqs", "num_state_slots", "max_num_batched_tokens", "max_model_len"),
    *("drafts", "drafter"),
)
_WHOLE = re.compile(r"-?(0|[1-9][0-9]*)")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+")

_File = TypeVar("_File", Workload, Profile)
_Flags = TypeVar("_Flags", bound=Strict)


def check_file(model: type[_File], path: Path) -> tuple[_File | None, list[Problem]]:
    """The file as a workload or profile, and every problem found in it."""
    return validate(model, parse(path, SWITCHES), name=path.stem)


def load_workload(path: Path) -> Workload:
    """The workload in a YAML file; a relative `trace.path` is taken from the file's folder.

    Raises UserError, or SourceError with all problems.
    """
    workload = _load(Workload, path)
    if workload.trace is None or workload.trace.path is None:
        return workload
    trace = workload.trace.model_copy(update={"path": _beside(path, workload.trace.path)})
    return workload.model_copy(update={"trace": trace})


def load_profile(path: Path) -> Profile:
    """The profile in a YAML file; a relative `model.path` is taken from the file's folder.

    Raises UserError, or SourceError with all problems.
    """
    profile = _load(Profile, path)
    if isinstance(profile.model, HybridSettings) or profile.model.path is None:
        return profile
    model = profile.model.model_copy(update={"path": _beside(path, profile.model.path)})
    return profile.model_copy(update={"model": model})


def _beside(file: Path, written: str) -> str:
    return str(file.parent / Path(written).expanduser())


def _load(model: type[_File], path: Path) -> _File:
    loaded, problems = check_file(model, path)
    if loaded is None:
        raise SourceError(problems)
    return loaded


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line sets; None and absent keys leave files and defaults alone.

    Attributes:
        engine: `EngineConfig` keys with typed values.
        seed: of requests and the `shuffled` order (short for `engine["seed"]`).
        device: a name in `deepinfer.names.DEVICES`.
        acceptance: of replayed drafts, as a workload has it.
        delay: before every operation of a stream, as a workload has it.
        trace_path: the user's copy of the trace that the workload replays.
        limit: requests to read of the trace.
        scale_lengths: factor on every token count.
        speed: divides the arrival times of the trace.
    """

    engine: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    device: str | None = None
    acceptance: Any = None
    delay: str | None = None
    trace_path: str | None = None
    limit: int | None = None
    scale_lengths: float | None = None
    speed: float | None = None

    def with_cell(self, cell: Mapping[str, Any]) -> Flags:
        """These flags with one value for each axis of a cell."""
        engine = {name: value for name, value in cell.items() if name not in NOT_OF_ENGINE}
        others = {name: cell[name] for name in NOT_OF_ENGINE if name in cell}
        return dataclasses.replace(self, engine={**self.engine, **engine}, **others)


@dataclass(frozen=True, slots=True)
class PoolQuestion:
    """How many blocks is there memory for? Equal questions have one answer.

    `memory_bytes` may be divided; None = all that is free.
    """

    model: ModelConfig | HybridConfig
    engine: EngineConfig
    device: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Resolved:
    """Everything that decides what one cell computes.

    Attributes:
        memory_bytes: of the profile; decides nothing once `num_blocks` is a number.
    """

    workload: Workload
    profile_name: str
    engine: EngineConfig
    model: ModelConfig | HybridConfig
    device: str
    verify: Verify
    memory_bytes: int | None = None

    @property
    def pool_question(self) -> PoolQuestion | None:
        """What to measure before an engine can be made, whatever its policies; None if nothing."""
        if self.engine.num_blocks != UNMEASURED:
            return None
        engine = EngineConfig(**{key: getattr(self.engine, key) for key in POOL_KEYS})
        return PoolQuestion(self.model, engine, self.device, self.memory_bytes)

    def with_engine(self, **settings: Any) -> Resolved:
        """The same with other choices of the engine."""
        return dataclasses.replace(self, engine=dataclasses.replace(self.engine, **settings))

    @property
    def seed(self) -> int:
        """Of the requests; the engine's `shuffled` order has the same one."""
        return self.engine.seed

    @property
    def unsafe(self) -> bool:
        """Whether the release policy may hand out a block that is still being read."""
        return self.engine.release in UNSAFE_POLICIES

    @property
    def notes(self) -> tuple[str, ...]:
        """What a table of these results must say about its input."""
        notes = []
        if self.workload.length_scale != 1.0:
            notes.append(f"lengths scaled by {self.workload.length_scale:g}")
        if trace := self.workload.trace:
            if trace.speed != 1.0:
                notes.append(f"arrivals sped up by {trace.speed:g}")
            if trace.limit is not None:
                notes.append(f"at most the first {trace.limit} requests of the trace")
        if self.workload.delay != NO_DELAY:
            notes.append(f"delays planted before every operation: {self.workload.delay}")
        return tuple(notes)

    def to_dict(self) -> dict[str, Any]:
        """Strict-JSON form, for the results file."""
        return {
            "workload": {"name": self.workload.name, **_plain(self.workload)},
            "profile": self.profile_name,
            "device": self.device,
            "engine": dataclasses.asdict(self.engine),
            "model": _plain_model(self.model),
            "verify": _plain(self.verify),
        }

    @property
    def config_hash(self) -> str:
        """First 12 hex digits of the SHA-256 of `to_dict()`."""
        text = json.dumps(self.to_dict(), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _plain(settings: Strict) -> dict[str, Any]:
    """A workload's `engine` is left out: it is merged into the resolved one."""
    return settings.model_dump(mode="json", exclude_none=True, exclude={"engine"})


def _plain_model(model: ModelConfig | HybridConfig) -> dict[str, Any]:
    plain = dataclasses.asdict(model)
    return {**plain, "path": str(plain["path"])} if plain.get("path") is not None else plain


def resolve(profile: Profile, workload: Workload, flags: Flags | None = None) -> Resolved:
    """Merge defaults < profile < workload < flags.

    Raises UserError if a flag is not valid, or changes a trace that the workload does not have.
    """
    flags = flags or Flags()
    from_flags = {**flags.engine, **({} if flags.seed is None else {"seed": flags.seed})}
    engine = engine_config(
        profile.engine, workload.engine, _check_flags(EngineSettings, from_flags)
    )
    _check_budget(engine)
    model = model_config(profile)
    if isinstance(model, HybridConfig):
        Geometry.of(model, engine.block_size)  # no single file or flag is wrong here either
    check_drafts(model, engine)
    device = profile.device if flags.device is None else flags.device
    _check_flags(DeviceFlag, {"device": device})
    _check_memory(profile, engine, device)
    workload = _override_input(workload, flags)
    _check_acceptance(workload, engine)
    _check_delay(workload, device)
    return Resolved(
        workload=workload,
        profile_name=profile.name,
        engine=engine,
        model=model,
        device=device,
        verify=profile.verify,
        memory_bytes=profile.memory_bytes,
    )


def engine_config(*layers: EngineSettings) -> EngineConfig:
    """The settings of all layers, the last on top; `auto` as `UNMEASURED`."""
    given = {name: value for layer in layers for name, value in layer.given().items()}
    if given.get("num_blocks") == AUTO:
        given["num_blocks"] = UNMEASURED
    return EngineConfig(**given)


def _check_memory(profile: Profile, engine: EngineConfig, device: str) -> None:
    """A GPU is the run's own; what a CPU has free is everybody's, and another amount each time."""
    if engine.num_blocks == UNMEASURED and device != "cuda" and profile.memory_bytes is None:
        raise UserError(
            f"num_blocks: auto on device {device}, but profile {profile.name} has no memory_bytes",
            hint="memory_bytes: how much weights, steps, state and blocks may take together",
        )


def _check_budget(engine: EngineConfig) -> None:
    """No file or flag is wrong alone here, so no single one can be named: both keys are."""
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        raise UserError(
            f"max_num_batched_tokens: out of range (got {engine.max_num_batched_tokens}); "
            f"expected at least max_num_seqs ({engine.max_num_seqs})",
            hint="every running request needs a token of the budget in each step",
        )


def _check_acceptance(workload: Workload, engine: EngineConfig) -> None:
    """How often replayed drafts are right is nobody's default."""
    if engine.drafts and engine.drafter == "replay" and workload.acceptance is None:
        raise UserError(
            f"drafter: replay, but workload {workload.name} has no acceptance",
            hint="-a acceptance=0.7, or `acceptance:` in the workload; see docs/drafts.md",
        )


def _check_delay(workload: Workload, device: str) -> None:
    """Where the host runs one operation after the other, a delay would change no order."""
    if workload.delay != NO_DELAY and device == "cpu-stepped":
        raise UserError(
            f"delay: {workload.delay}, but the streams of device {device} do not run side by side; "
            "expected device cpu or cuda",
            hint="`check explore` runs cpu-stepped in every order",
        )


def _check_flags(model: type[_Flags], values: Mapping[str, Any]) -> _Flags:
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        problem = describe(Source(None), model, detail)
        raise UserError(problem.text, hint=problem.hint) from error


def _override_input(workload: Workload, flags: Flags) -> Workload:
    """The workload with the flags that change its requests."""
    given: dict[str, Any] = {
        "path": flags.trace_path,
        "limit": flags.limit,
        "scale_lengths": flags.scale_lengths,
        "speed": flags.speed,
    }
    given = {name: value for name, value in given.items() if value is not None}
    for name in ("acceptance", "delay"):
        if (value := getattr(flags, name)) is not None:
            _check_flags(NOT_OF_ENGINE[name], {name: value})
            workload = workload.model_copy(update={name: value})
    before = workload.trace.model_dump(exclude_none=True) if workload.trace else {"format": "azure"}
    trace = _check_flags(Trace, {**before, **given})
    if workload.trace is not None:
        return workload.model_copy(update={"trace": trace})
    for name in ("path", "limit", "speed"):
        if name in given:
            flag = "--trace-file" if name == "path" else f"--{name}"
            raise UserError(
                f"{flag}: workload {workload.name} replays no trace "
                f"(got {show_value(given[name])}); expected a workload with `trace:`, as azure-code"
            )
    return workload.model_copy(update=given)


def model_config(profile: Profile) -> ModelConfig | HybridConfig:
    """The model of a profile. Raises UserError if a folder it names has none."""
    settings = profile.model
    if isinstance(settings, HybridSettings):
        return settings.config()
    if settings.path is not None:
        config = model_config_from_folder(Path(settings.path))
        if "dtype" not in settings.model_fields_set:
            return config
        return dataclasses.replace(config, dtype=settings.dtype)
    geometry: dict[str, Any] = {name: getattr(settings, name) for name in GEOMETRY}
    return ModelConfig(
        **geometry,
        rope_theta=settings.rope_theta,
        rms_norm_eps=settings.rms_norm_eps,
        tie_word_embeddings=settings.tie_word_embeddings,
        dtype=settings.dtype,
        seed=settings.seed,
    )


def parse_axes(items: Iterable[str], *, what: str = "axis") -> dict[str, tuple[Any, ...]]:
    """`["release=deferred,polled", "block_size=64,128"]` as typed values by axis, in order.

    A dash in a name counts as an underscore. Raises UserError, which calls an item `what`, for a
    name or value that is not valid, a value given twice, or an axis given twice.
    """
    axes: dict[str, tuple[Any, ...]] = {}
    for item in items:
        written, equals, values = item.partition("=")
        name = written.strip().replace("-", "_")
        if not equals:
            raise UserError(f"{what} {item!r}: no values; expected NAME=VALUE,VALUE")
        if name == "seed":
            raise UserError(
                f"{what} seed: not an axis, since all cells get the same requests; expected --seed"
            )
        if name not in AXES:
            shown = name or repr(name)
            raise UserError(f"{what} {shown}: unknown name; expected {choices(name, AXES)}")
        if name in axes:
            raise UserError(f"{what} {name}: given twice; expected one list of values")
        axes[name] = _axis_values(what, name, values)
    return axes


def _axis_values(what: str, name: str, text: str) -> tuple[Any, ...]:
    """Typed and checked values of one axis."""
    values: list[Any] = []
    model = NOT_OF_ENGINE.get(name, EngineSettings)
    is_text = name in DESCRIPTIONS
    for part in (part.strip() for part in text.split(",")):
        if not part:
            raise UserError(f"{what} {name}: an empty value (got {text!r}); expected VALUE,VALUE")
        value = part if is_text else _number(part)
        try:
            _check_flags(model, {name: value})
        except UserError as error:
            raise UserError(f"{what} {error}", hint=error.hint) from error
        if value in values:
            raise UserError(f"{what} {name}: {part} is given twice; expected different values")
        values.append(value)
    return tuple(values)


def _number(text: str) -> bool | int | float | str:
    """`text` as the number, or the true or false, that it writes plainly; any other as it is."""
    if text in ("true", "false"):
        return text == "true"
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _DECIMAL.fullmatch(text) else text


def resolve_cells(
    profile: Profile, workload: Workload, flags: Flags, axes: Mapping[str, Sequence[Any]]
) -> list[tuple[dict[str, Any], Resolved]]:
    """Every combination of the axes' values, with its resolved configuration.

    The last axis varies fastest; no axes give one cell. Raises UserError if a key is both a flag
    and an axis, or a combination is not valid.
    """
    for name in axes:
        other = name in NOT_OF_ENGINE and getattr(flags, name) is not None
        if name in flags.engine or other:
            raise UserError(f"axis {name}: also set by a flag; expected one of the two")
    cells = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return [(cell, resolve(profile, workload, flags.with_cell(cell))) for cell in cells]
