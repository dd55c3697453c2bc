"""All cells of a comparison, interleaved round by round, each verified before its time counts.

    warm-up     cell 0, cell 1, ...      other prompts, few tokens, no time of theirs in a table;
                                         the first with rows tagged; again until step times settle
    round 0     the cells in an order drawn from the seed
    round 1     ...

Every measured round replays the same requests on a new engine, so a ratio between two cells of one
round compares like with like, and one dense reference answers for all cells that emitted the same
tokens. A round in which the GPU was throttled is run once more: both are kept, the second counts.
Knows nothing of tables. Invariant: a record is on disk before the next round begins, so
whatever ends a run early ends it with everything measured so far.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np

from bench.arrivals import ForkSpec, RequestSpec, build_requests
from bench.collect.environment import collect_environment
from bench.collect.reading import one_line
from bench.resume import Kept
from bench.rounds import (
    DEFAULT_ROUNDS,
    MAX_WARMUPS,
    THROTTLED_ROUND,
    WARMUP_ROUND,
    Auto,
    is_settled,
    median_step_us,
    play_rounds,
    slowdowns,
)
from bench.runner import Round, RoundResult, Target, with_tags
from bench.samples import (
    FINDING_COUNTERS,
    CellRecord,
    EndRecord,
    FailureRecord,
    Record,
    RoundRecord,
    RunRecord,
    SampleWriter,
    VerificationRecord,
    axis_text,
)
from bench.schema import Workload
from bench.spec import Resolved
from deepinfer.errors import DeviceError, DeviceTimeoutError, UserError

REASON_LENGTH = 500  # a time-out names blocks and requests
WARMUP_TOKENS = 8  # outputs of a warm-up request at most
WARMUP_PROMPT_TOKENS = 4096  # of all warm-up requests together, if the first has no more

Progress = Callable[[str], None]
NOTHING_KEPT = Kept()


class _Stopped(Exception):
    """A round failed, and the user asked to stop at that."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the matrix: its values by axis, and everything they resolve to."""

    index: int
    axes: dict[str, Any]
    resolved: Resolved

    @property
    def label(self) -> str:
        """`release=deferred free_order=reverse`."""
        return " ".join(f"{name}={axis_text(value)}" for name, value in self.axes.items())


class Matrix:
    """A prepared comparison: devices open, weights loaded, requests drawn; nothing written yet.

    Args:
        cells: the first is the baseline. All share one model and one workload.
        rounds: measured rounds per cell; the fewest of them if `auto`.
        auto: adds rounds until it says that they are enough.
        make_round: for rounds that do more than the plain one.
        metadata: the user's own keys, stored with the run.
        kept: what a run that is carried on has already.
        fail_fast: end the run at the first round that raises; else its cell is left alone and the
            others run on.
        tag_warmup: tag the rows of each cell's first warm-up, whatever its `checks` say.
        sizings: how pools were measured, as `RunRecord` has it.
        notes: what a table must say of that.

    Raises UserError for whatever the devices, weights, engines or the trace refuse, and for what
    does not fit in memory. A context manager.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        *,
        rounds: int,
        axes: dict[str, Any],
        progress: Progress,
        auto: Auto | None = None,
        make_round: Callable[..., Round] = Round,
        metadata: dict[str, Any] | None = None,
        kept: Kept = NOTHING_KEPT,
        fail_fast: bool = False,
        tag_warmup: bool = True,
        sizings: tuple[dict[str, Any], ...] = (),
        notes: tuple[str, ...] = (),
    ) -> None:
        self._cells, self._rounds, self._axes = list(cells), rounds, axes
        self._progress, self._metadata = progress, metadata or {}
        self._kept, self._fail_fast = kept, fail_fast
        self._tag_warmup, self._sizings, self._notes = tag_warmup, sizings, notes
        self._failed: set[int] = set()  # cells that are left alone
        self._auto, self._make_round = auto, make_round
        self._speeds: list[dict[int, float]] = [{} for _ in cells]  # tok/s by round
        for record in kept.rounds:
            self._note_speed(record)
        self._environment = collect_environment()
        self._targets: dict[str, Target] = {}
        workload, seed, vocab_size = _shared_input(cells)
        with ExitStack() as stack:
            with _in_memory(f"the requests of {workload.name}", "fewer or shorter requests"):
                self._requests = build_requests(workload, seed, vocab_size, 0)
                warmup = build_requests(workload, seed, vocab_size, WARMUP_ROUND)
            self._warmup_requests = _shortened(warmup)
            for cell in cells:
                stack.callback(self._close_target, cell.resolved.device)
                self._try_engine(cell)
            gc.collect()
            gc.freeze()  # torch's many objects: going through them would cost a round 0.1 s a time
            stack.callback(gc.unfreeze)
            self._stack = stack.pop_all()

    def __enter__(self) -> Matrix:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def run(self, writer: SampleWriter) -> bool:
        """Measure everything not yet done; False if something ended it early.

        That is Ctrl-C, or a failure with `fail_fast`. What was measured is kept either way.
        """
        self._write_header(writer)
        try:
            self._warm_up(writer)
            ended = self._measure(writer)
        except KeyboardInterrupt:
            writer.write(EndRecord("interrupted", "Ctrl-C"))
            return False
        except _Stopped as stop:
            writer.write(EndRecord("stopped", str(stop)))
            return False
        writer.write(EndRecord("complete", ended))
        return True

    def rounds_left(self, cell: Cell) -> int:
        """Measured rounds of the cell that an earlier run has not done."""
        return sum((cell.index, index) not in self._kept.done for index in range(self._rounds))

    def _warm_up(self, writer: SampleWriter) -> None:
        """All cells in turn, those again whose step times have not settled."""
        step_us: dict[int, list[float | None]] = {cell.index: [] for cell in self._cells}
        for number in range(MAX_WARMUPS):
            for cell in self._cells:
                if not self.rounds_left(cell) or is_settled(step_us[cell.index]):
                    continue
                if result := self._run_round(writer, cell, WARMUP_ROUND - number):
                    step_us[cell.index].append(median_step_us(result.steps))

    def _measure(self, writer: SampleWriter) -> str:
        """All rounds not yet done; with `auto`, why there are no more."""

        def play(cell: int, index: int) -> None:
            if (cell, index) not in self._kept.done:
                self._run_round(writer, self._cells[cell], index)

        return play_rounds(
            play,
            self._speeds,
            seed=self._cells[0].resolved.seed,
            rounds=self._rounds,
            auto=self._auto,
            is_over=lambda: len(self._failed) == len(self._cells),
        )

    def _try_engine(self, cell: Cell) -> None:
        """Make the cell's engine once and let go of it: what it refuses, it refuses now."""
        engine = cell.resolved.engine
        pool = f"{engine.num_blocks} blocks of {engine.block_size} tokens"
        with _in_memory(
            f"{pool}, {engine.max_num_seqs} requests of at most {engine.max_model_len} tokens",
            "less of num_blocks, block_size, max_num_seqs or max_model_len",
        ):
            self._round(cell, 0)

    def _run_round(self, writer: SampleWriter, cell: Cell, index: int) -> RoundResult | None:
        """Run, verify and write one round; None if it raised, now or in an earlier one."""
        if cell.index in self._failed:
            return None
        start = time.perf_counter()
        try:
            result = self._round(cell, index).run()
            if index >= 0 and slowdowns(result.round.memory):
                self._write(writer, _set_aside(result))
                result = self._round(cell, index).run()
            verdict = None if result.round.warmup else self._verify(cell, result, index)
        except Exception as error:  # whatever it is, it is this cell's; the others can still run
            self._fail(writer, cell, index, error)
            return None
        if (cell.index, index) not in self._kept.done:  # a warm-up that is run once more
            self._write(writer, result, verdict, time.perf_counter() - start)
            self._note_speed(result.round)
        if index >= WARMUP_ROUND:  # the first warm-up stands for all in the count of what is left
            self._progress(_progress_line(cell, index, self._rounds, result.round, verdict))
        return result

    def _write(
        self,
        writer: SampleWriter,
        result: RoundResult,
        verdict: VerificationRecord | None = None,
        elapsed_s: float | None = None,
    ) -> None:
        """All records of a round, the one that says that it is whole last."""
        records: list[Record] = [*result.requests, *result.steps]
        for record in records:
            writer.write(record)
        if verdict is not None:
            writer.write(verdict)
        writer.write(dataclasses.replace(result.round, elapsed_s=elapsed_s))

    def _note_speed(self, record: RoundRecord) -> None:
        if not record.warmup and record.wall_s > 0 and record.num_output_tokens > 0:
            speed = record.num_output_tokens / record.wall_s
            self._speeds[record.cell][record.round] = speed

    def _fail(self, writer: SampleWriter, cell: Cell, index: int, error: Exception) -> None:
        """Note why a round gave no result; its cell is not run on."""
        reason = one_line(f"{type(error).__name__}: {error}", REASON_LENGTH)
        writer.write(FailureRecord(cell.index, index, reason))
        self._failed.add(cell.index)
        name = cell.label or cell.resolved.workload.name
        self._progress(f"{_which_round(index, self._rounds)}  {name}  FAILED: {reason}")
        if isinstance(error, DeviceTimeoutError):
            # What hangs has not ended: it would be in the way of whatever is measured beside it.
            raise _Stopped(f"{name} hangs") from error
        if isinstance(error, DeviceError):  # a failed device takes no more work
            self._close_target(cell.resolved.device)
        if self._fail_fast:
            raise _Stopped(f"{name} failed") from error

    def _target(self, cell: Cell) -> Target:
        """The cell's device, opened when it is first asked for, and again after it failed."""
        name = cell.resolved.device
        if name not in self._targets:
            self._targets[name] = Target(cell.resolved)
        return self._targets[name]

    def _close_target(self, device: str) -> None:
        target = self._targets.pop(device, None)
        if target is not None:  # None: it could not be opened again
            target.close()

    def _round(self, cell: Cell, index: int) -> Round:
        warmup = index < 0
        is_tagged = index == WARMUP_ROUND and self._tag_warmup
        return self._make_round(
            with_tags(cell.resolved) if is_tagged else cell.resolved,
            self._target(cell),
            self._warmup_requests if warmup else self._requests,
            cell=cell.index,
            index=index,
            warmup=warmup,
        )

    def _verify(self, cell: Cell, result: RoundResult, index: int) -> VerificationRecord:
        """Every request of the round once more, through the dense reference."""
        judged = self._target(cell).verify(list(result.emissions.values()), cell.resolved.verify)
        verdicts = dict(zip(result.emissions, judged, strict=True))
        disproved = [name for name, verdict in verdicts.items() if verdict.wrong]
        wrong_ids = tuple(dict.fromkeys([*disproved, *result.problems]))
        return VerificationRecord(
            cell=cell.index,
            round=index,
            checked_requests=len(verdicts),
            wrong_requests=len(wrong_ids),
            near_ties=sum(verdict.near_ties for verdict in verdicts.values()),
            max_logprob_diff=max((v.max_logprob_diff for v in verdicts.values()), default=None),
            logprob_tolerance=cell.resolved.verify.logprob_tolerance,
            wrong_ids=wrong_ids,
        )

    def _write_header(self, writer: SampleWriter) -> None:
        if not self._kept.has_run:
            writer.write(self._run_record())
        for cell in self._cells[self._kept.num_cells :]:
            writer.write(
                CellRecord(
                    cell=cell.index,
                    axes=cell.axes,
                    unsafe=cell.resolved.unsafe,
                    baseline=cell.index == 0,
                )
            )

    def _run_record(self) -> RunRecord:
        first = self._cells[0].resolved
        return RunRecord(
            workload=first.workload.name,
            profile=first.profile_name,
            command=tuple(sys.argv),
            started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            environment=self._environment,
            config=first.to_dict(),
            config_hash=first.config_hash,
            axes=self._axes,
            seed=first.seed,
            rounds=self._rounds,
            notes=(*_common_notes(self._cells), *self._notes, *_auto_note(self._auto)),
            metadata=self._metadata,
            num_blocks=tuple(cell.resolved.engine.num_blocks for cell in self._cells)
            if self._sizings
            else (),
            sizings=self._sizings,
        )


def _common_notes(cells: Sequence[Cell]) -> list[str]:
    """What a table must say of the input of all cells; what an axis changes, the cells tell."""
    first, *others = (cell.resolved.notes for cell in cells)
    return [note for note in first if all(note in notes for notes in others)]


def _auto_note(auto: Auto | None) -> list[str]:
    if auto is None:
        return []
    width = f"{100 * auto.half_width:g} %"
    return [
        f"-r auto: at least {DEFAULT_ROUNDS} rounds, more until half of every interval is within "
        f"{width}, at most {auto.max_time_s:g} s"
    ]


def _set_aside(result: RoundResult) -> RoundResult:
    """A throttled round under a number of its own: kept in the file, in no figure."""
    number = THROTTLED_ROUND - result.round.round
    return RoundResult(
        dataclasses.replace(result.round, round=number, warmup=True),
        [dataclasses.replace(record, round=number) for record in result.requests],
        [dataclasses.replace(record, round=number) for record in result.steps],
        result.emissions,
        result.problems,
    )


def _shared_input(cells: Sequence[Cell]) -> tuple[Workload, int, int]:
    """Workload, seed and vocabulary size, which all cells have in common."""
    first = cells[0].resolved
    return first.workload, first.seed, first.model.vocab_size


@contextmanager
def _in_memory(what: str, hint: str) -> Iterator[None]:
    """UserError if there is no memory for `what`. torch's CPU allocator has no error type."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        detail = str(error).splitlines()[0] if str(error) else "no more could be had"
        raise UserError(f"out of memory for {what}: {detail}", hint=hint) from error


def _shortened(specs: Sequence[RequestSpec]) -> list[RequestSpec]:
    """The warm-up's requests: the first few, each phase at once, with few tokens each."""
    prompt_tokens = np.cumsum([len(spec.prompt_token_ids) for spec in specs])
    count = max(int(np.searchsorted(prompt_tokens, WARMUP_PROMPT_TOKENS, side="right")), 1)
    return [_shorten(spec) for spec in specs[:count]]


def _shorten(spec: RequestSpec) -> RequestSpec:
    fork = spec.fork
    if fork is not None:
        children = tuple(
            dataclasses.replace(child, max_tokens=min(child.max_tokens, WARMUP_TOKENS))
            for child in fork.children
        )
        fork = ForkSpec(fork.after_tokens, children, fork.keep_parent)
    return dataclasses.replace(
        spec,
        arrival_s=0.0,
        max_tokens=min(spec.max_tokens, max(WARMUP_TOKENS, fork.after_tokens + 1 if fork else 0)),
        fork=fork,
        abort_after_tokens=None,
        next_turn=_shorten(spec.next_turn) if spec.next_turn is not None else None,
    )


def _progress_line(
    cell: Cell,
    index: int,
    rounds: int,
    record: RoundRecord,
    verdict: VerificationRecord | None,
) -> str:
    speed = f"{record.num_output_tokens / record.wall_s:8.1f} tok/s" if record.wall_s else ""
    wrong = f"  {verdict.wrong_requests} WRONG" if verdict and verdict.wrong_requests else ""
    found = sum(record.counters.get(name) or 0 for name in FINDING_COUNTERS.values())
    unsafe = f"  UNSAFE: {record.findings[0]}" if found else ""
    which = _which_round(index, rounds)
    return f"{which}  {cell.label or cell.resolved.workload.name}  {speed}{wrong}{unsafe}"


def _which_round(index: int, rounds: int) -> str:
    return "warm-up " if index < 0 else f"round {index + 1}/{rounds}"
