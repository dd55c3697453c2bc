"""The results file: `samples.jsonl`, one JSON object a line, written as it happens.

Knows the shape of the records and of the file; does not know how anything was measured, nor what
is computed from it. Invariant: a line is handed to the system whole before the next is begun, and
one that does not fit on the disk is taken back, so a run that is killed or runs out of room leaves
a file that can be read up to its last whole line.

The first line is the `run` record. Times of requests and steps are seconds since the start of
their round. A number that is not finite is written as null: the file is strict JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from bench.disk import cannot_write
from deepinfer.errors import UserError

SCHEMA_VERSION = 1
SAMPLES_FILE = "samples.jsonl"
FORKED = "forked"  # finish reason of a parent whose children carry on
# Of each checker, what a round's counters call its findings; a checker that was off counts none.
FINDING_COUNTERS = {"tags": "wrong_rows", "order": "hazards", "conservation": "contradictions"}


def axis_text(value: object) -> str:
    """The value of an axis as one would write it on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def label_of_axes(axes: Mapping[str, object]) -> str:
    """A cell's settings in one word, such as `deferred/reverse`."""
    return "/".join(map(axis_text, axes.values())) or "the run"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What was run, where and with which settings; the first line of the file.

    Attributes:
        workload, profile: their names.
        command: argv of the process.
        started_at: UTC, ISO 8601.
        environment: as `bench.collect.environment.collect_environment` gives it.
        config: the resolved configuration all cells share.
        config_hash: short hash of it.
        axes: name -> values, in the order given.
        rounds: measured rounds asked for per cell, warm-up not counted.
        notes: sentences a reader of the table must see, such as `lengths scaled by 0.1`.
        metadata: the user's own keys.
        num_blocks: in the pool of each cell, by its number; empty if no cell's was measured.
        sizings: each measurement of `num_blocks: auto`: the `cells` it was for, the number, and the
            `lines` of the memory it is from, in bytes.
    """

    kind: ClassVar[str] = "run"
    workload: str
    profile: str
    command: tuple[str, ...]
    started_at: str
    environment: dict[str, Any]
    config: dict[str, Any]
    config_hash: str
    axes: dict[str, Any]
    seed: int
    rounds: int
    notes: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    num_blocks: tuple[int, ...] = ()
    sizings: tuple[dict[str, Any], ...] = ()
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class CellRecord:
    """One point of the matrix; `unsafe` if its release policy may hand out blocks still in use."""

    kind: ClassVar[str] = "cell"
    cell: int
    axes: dict[str, Any]
    unsafe: bool = False
    baseline: bool = False


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One pass of the workload through one cell; written when the round has ended.

    Attributes:
        wall_s: from the first request's arrival to the last token, seconds.
        counters: what the engine counted in this round (`num_later`, `withheld_block_ms`, ...).
        memory: as `bench.collect.memory.MemoryCollector.read` gives it; where NVML works, `gpu`
            too, as `bench.collect.sampler.NvmlSampler.summary` gives it.
        elapsed_s: what the round cost whoever waited for it, making the engine and verifying
            included, seconds; None in files of older versions.
        findings: the first of what its checkers found, in words; `counters` has all of them.
    """

    kind: ClassVar[str] = "round"
    cell: int
    round: int
    warmup: bool
    wall_s: float
    num_output_tokens: int
    num_prompt_tokens: int
    counters: dict[str, float | None]
    memory: dict[str, Any]
    elapsed_s: float | None = None
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """Stands in place of a round that raised: `reason` is the error on one line.

    The cell is not run on. A round of the same cell later in the file (the run was resumed) makes
    the failure void.
    """

    kind: ClassVar[str] = "failure"
    cell: int
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request of one round.

    Attributes:
        first_scheduled_s: None if it never ran.
        token_times_s: when each output token reached the host, one entry a token (tokens that
            came together have equal entries), ascending.
        finish_reason: `length`, `stop`, `abort`, `never` (can never fit the pool), or `forked` (a
            parent whose children carry on).
    """

    kind: ClassVar[str] = "request"
    cell: int
    round: int
    request_id: str
    arrival_s: float
    first_scheduled_s: float | None
    token_times_s: tuple[float, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: str
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One engine step.

    Attributes:
        end_s: when its results were committed.
        host_us: host microseconds by phase (schedule, submit, release, collect, commit), without
            the two waits below.
        wait_us: host blocked in the release policy's synchronisation.
        result_wait_us: host blocked until the step's tokens arrived.
        device_ms: from the device's events; None where it has none.
        slots_held, slots_withheld: state slots; None for a model without state.
        gap_us: how long the device had nothing to do before it, from its events; None where there
            was nothing for it to do, and in files of older versions.
        blocks_ahead, blocks_for_drafts: of the blocks held, those for tokens the host did not know;
            and of these, those that only drafts asked for. None in files of older versions.
        num_draft_rows: rows computed for drafts, those among them for which there was none.
        num_drafting: requests that had drafts verified.
        drafts_proposed, drafts_accepted: how many had, and got accepted, a first draft, a second
            one, and so on.
    """

    kind: ClassVar[str] = "step"
    cell: int
    round: int
    step: int
    end_s: float
    num_tokens: int
    num_running: int
    num_waiting: int
    blocks_free: int
    blocks_held: int
    blocks_withheld: int
    num_copies: int
    host_us: dict[str, float]
    wait_us: float
    result_wait_us: float
    device_ms: float | None
    slots_held: int | None = None
    slots_withheld: int | None = None
    gap_us: float | None = None
    blocks_ahead: int | None = None
    blocks_for_drafts: int | None = None
    num_draft_rows: int = 0
    num_drafting: int = 0
    drafts_proposed: tuple[int, ...] = ()
    drafts_accepted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VerificationRecord:
    """The verdict on one round's tokens.

    Attributes:
        near_ties: tokens that differ from the reference's best within the tolerance.
        max_logprob_diff: natural log; None if nothing could be compared or it was not finite.
        wrong_ids: the requests that count in `wrong_requests`.
    """

    kind: ClassVar[str] = "verification"
    cell: int
    round: int
    checked_requests: int
    wrong_requests: int
    near_ties: int
    max_logprob_diff: float | None
    logprob_tolerance: float
    wrong_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EndRecord:
    """How the run ended: `complete` or `interrupted`; the last line, absent after a crash."""

    kind: ClassVar[str] = "end"
    status: str
    reason: str = ""


Record = (
    RunRecord
    | CellRecord
    | RoundRecord
    | RequestRecord
    | StepRecord
    | VerificationRecord
    | FailureRecord
    | EndRecord
)


@dataclass(slots=True)
class Samples:
    """A results file in memory, records in file order.

    `truncated` says that the last line was cut off and left out.
    """

    path: Path
    run: RunRecord
    cells: list[CellRecord] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    verifications: list[VerificationRecord] = field(default_factory=list)
    failures: list[FailureRecord] = field(default_factory=list)
    end: EndRecord | None = None
    truncated: bool = False

    def failure_of(self, cell: int) -> FailureRecord | None:
        """The cell's last failure, unless the round that failed was run again and ended."""
        ended = {record.round for record in self.rounds if record.cell == cell}
        failures = (f for f in self.failures if f.cell == cell and f.round not in ended)
        return max(failures, key=lambda failure: failure.round, default=None)


class SampleWriter:
    """Appends records to a new results file; a context manager.

    `path` is the run's folder, made if missing, or a file name ending in `.jsonl`. Raises UserError
    if the file exists already or cannot be made; an existing file is touched only to `append`.
    """

    def __init__(self, path: Path | str, *, append: bool = False) -> None:
        self.path = samples_path(path)
        mode: Literal["ab", "xb"] = "ab" if append else "xb"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Without a buffer: what the disk refuses would wait there and be refused once more.
            # SIM115 wants a `with`, but the file stays open for the life of the writer.
            self._file = open(self.path, mode, buffering=0)  # noqa: SIM115
        except FileExistsError as error:
            if not self.path.is_file():  # a file stands where the folder should be
                raise UserError(f"{self.path.parent}: not a folder") from error
            raise UserError(
                f"{self.path}: results exist already",
                hint="choose another folder with -o, or carry the run on with --resume",
            ) from error
        except OSError as error:
            raise self._refused(error) from error

    def write(self, record: Record) -> None:
        """Append one line. Raises UserError if the disk refuses it; then nothing of it is there."""
        line = memoryview(f"{_encode(record)}\n".encode())
        start = self._file.tell()
        try:
            while len(line):  # a disk that is nearly full takes a part, and then refuses the rest
                line = line[self._file.write(line) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # what cannot be cut is read as a torn last line
                self._file.truncate(start)
                self._file.seek(start)
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> UserError:
        return cannot_write(
            self.path,
            error,
            room="make room, then carry the run on with the same command and --resume",
            place="choose a folder you may write to with -o",
        )

    def close(self) -> None:
        """Close the file; harmless when closed."""
        self._file.close()

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def samples_path(path: Path | str) -> Path:
    """The results file meant by a run folder or by the file itself."""
    path = Path(path)
    return path if path.suffix == ".jsonl" else path / SAMPLES_FILE


def read_samples(path: Path | str) -> Samples:
    """Read a run folder or its `samples.jsonl`.

    A last line that was cut off is left out (`truncated`). Kinds and fields this version does not
    know are ignored. Raises UserError, naming file and line, for anything else that is not a
    results file of this schema version.
    """
    source = _existing_file(Path(path))
    try:
        lines = source.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{source}: cannot read: {error.strerror}") from error
    if not lines[-1]:
        lines.pop()  # nothing follows the last newline of a whole file
        is_whole = True
    else:
        is_whole = False
    if not lines or (not is_whole and len(lines) == 1 and never_began(lines[0])):
        raise UserError(
            f"{source}: nothing was measured: the run was stopped before it began",
            hint="its command with --resume begins it again",
        )
    samples: Samples | None = None
    for number, line in enumerate(lines, start=1):
        where = f"{source}:{number}"
        try:
            entry = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            if samples is not None and not is_whole and number == len(lines):
                samples.truncated = True
                break
            raise UserError(f"{where}: not a line of JSON") from error
        record = _decode(entry, where)
        if samples is not None:
            _append(samples, record, where)
        elif isinstance(record, RunRecord):
            samples = Samples(path=source, run=record)
        else:
            raise UserError(f"{where}: not a results file: its first line is no `run` record")
    assert samples is not None, "there is a first line, and it is a `run` record"
    return samples


def never_began(first_line: bytes) -> bool:
    """Whether a file's only line, which has no end, is what is left of a run killed writing it."""
    start = b'{"kind": "run"'
    return start.startswith(first_line[: len(start)])


def _existing_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.exists():
        raise UserError(f"{path}: no such results folder or file")
    source = path / SAMPLES_FILE
    if source.is_file():
        return source
    try:
        names = sorted(p.name for p in path.iterdir())
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror}") from error
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    raise UserError(
        f"{path}: no {SAMPLES_FILE} in it; there is {shown or 'nothing'}",
        hint="name one run's folder, such as results/<run>",
    )


def _append(samples: Samples, record: Record | None, where: str) -> None:
    """Put `record` where it belongs; None is a kind of record this version does not know."""
    match record:
        case StepRecord():
            samples.steps.append(record)
        case RequestRecord():
            samples.requests.append(record)
        case RoundRecord():
            samples.rounds.append(record)
        case VerificationRecord():
            samples.verifications.append(record)
        case CellRecord():
            samples.cells.append(record)
        case FailureRecord():
            samples.failures.append(record)
        case EndRecord():
            samples.end = record
        case RunRecord():
            raise UserError(f"{where}: a second `run` record")


# How records become lines and lines become records.

_KINDS: dict[str, type[Record]] = {cls.kind: cls for cls in get_args(Record)}
_Check = Callable[[Any], bool]


def _check_of(hint: Any) -> _Check:
    """A test whether a value as JSON gives it fits the type `hint` of a record's field."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: True
    if origin is tuple:  # tuple[X, ...]
        item = _check_of(args[0])
        return lambda value: type(value) is list and all(map(item, value))
    if origin is dict:  # dict[str, X]
        item = _check_of(args[1])
        return lambda value: type(value) is dict and all(map(item, value.values()))
    kinds = set(args) if origin in (Union, UnionType) else {hint}
    if float in kinds:
        kinds.add(int)
    return lambda value: type(value) in kinds  # exact: True is no number


def _fields_of(cls: type[Record]) -> list[tuple[str, _Check, bool]]:
    """Per field of a record: its name, its check, whether it must be there."""
    hints = get_type_hints(cls)
    return [
        (f.name, _check_of(hints[f.name]), f.default is MISSING and f.default_factory is MISSING)
        for f in fields(cls)
    ]


_FIELDS = {kind: _fields_of(cls) for kind, cls in _KINDS.items()}


def _decode(entry: Any, where: str) -> Record | None:
    kind = entry.get("kind") if type(entry) is dict else None
    if type(kind) is not str:
        raise UserError(f"{where}: not a record: no `kind`")
    cls = _KINDS.get(kind)
    if cls is None:
        return None
    if cls is RunRecord and entry.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{where}: schema_version {entry.get('schema_version')!r}, this version reads "
            f"{SCHEMA_VERSION}",
            hint="export it with the version of deepinfer-bench that wrote it",
        )
    values: dict[str, Any] = {}
    for name, fits, is_required in _FIELDS[kind]:
        if name in entry:
            value = entry[name]
            if not fits(value):
                raise UserError(f"{where}: {kind} record: bad value for `{name}`: {value!r:.60}")
            values[name] = tuple(value) if type(value) is list else value
        elif is_required:
            raise UserError(f"{where}: {kind} record: `{name}` is missing")
    return cls(**values)


def _encode(record: Record) -> str:
    entry = {"kind": record.kind}
    entry.update((name, getattr(record, name)) for name, _, _ in _FIELDS[record.kind])
    try:
        return json.dumps(entry, allow_nan=False, default=_plain)
    except ValueError:  # only now look for the number that is not finite: steps must be cheap
        return json.dumps(_finite(entry), allow_nan=False, default=_plain)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """numpy scalars and paths, which come in counters and configurations."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not belong in a sample: {value!r:.60}")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
