"""All cells of a comparison, interleaved round by round, each verified before its time counts.

    warm-up     cell 0, cell 1, ...      other prompts, few tokens, never in a table
    round 0     the cells in an order drawn from the seed
    round 1     ...

Every measured round replays the same requests on a new engine, so a ratio between two cells of one
round compares like with like, and one dense reference answers for all cells that emitted the same
tokens. Knows nothing of tables. Invariant: a record is on disk before the next round begins, so
whatever ends a run early ends it with everything measured so far.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np

from bench.arrivals import ForkSpec, RequestSpec, build_requests
from bench.collect.environment import collect_environment
from bench.runner import Round, RoundResult, Target
from bench.samples import (
    CellRecord,
    EndRecord,
    Record,
    RoundRecord,
    RunRecord,
    SampleWriter,
    VerificationRecord,
)
from bench.schema import Workload
from bench.spec import Resolved
from deepinfer.errors import UserError

WARMUP_ROUND = -1
WARMUP_TOKENS = 8  # outputs of a warm-up request at most
WARMUP_PROMPT_TOKENS = 4096  # of all warm-up requests together, if the first has no more

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the matrix: its values by axis, and everything they resolve to."""

    index: int
    axes: dict[str, Any]
    resolved: Resolved

    @property
    def label(self) -> str:
        """`release=deferred free_order=reverse`."""
        return " ".join(f"{name}={value}" for name, value in self.axes.items())


class Matrix:
    """A prepared comparison: devices open, weights loaded, requests drawn; nothing written yet.

    Args:
        cells: the first is the baseline. All share one model and one workload.
        rounds: measured rounds per cell.

    Raises UserError for whatever the devices, weights, engines or the trace refuse, and for what
    does not fit in memory. A context manager.
    """

    def __init__(
        self, cells: Sequence[Cell], *, rounds: int, axes: dict[str, Any], progress: Progress
    ) -> None:
        self._cells, self._rounds, self._axes = list(cells), rounds, axes
        self._progress = progress
        self._environment = collect_environment()
        self._targets: dict[str, Target] = {}
        workload, seed, vocab_size = _shared_input(cells)
        with ExitStack() as stack:
            with _in_memory(f"the requests of {workload.name}", "fewer or shorter requests"):
                self._requests = build_requests(workload, seed, vocab_size, 0)
                warmup = build_requests(workload, seed, vocab_size, WARMUP_ROUND)
            self._warmup_requests = _shortened(warmup)
            for cell in cells:
                name = cell.resolved.device
                if name not in self._targets:
                    self._targets[name] = Target(cell.resolved)
                    stack.callback(self._targets[name].close)
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
        """Measure everything; False if Ctrl-C ended it early (what was measured is kept)."""
        self._write_header(writer)
        try:
            for cell in self._cells:
                self._run_round(writer, cell, WARMUP_ROUND)
            for index in range(self._rounds):
                for cell in self._order(index):
                    self._run_round(writer, cell, index)
        except KeyboardInterrupt:
            writer.write(EndRecord("interrupted", "Ctrl-C"))
            return False
        writer.write(EndRecord("complete"))
        return True

    def _try_engine(self, cell: Cell) -> None:
        """Make the cell's engine once and let go of it: what it refuses, it refuses now."""
        engine = cell.resolved.engine
        pool = f"{engine.num_blocks} blocks of {engine.block_size} tokens"
        with _in_memory(
            f"{pool}, {engine.max_num_seqs} requests of at most {engine.max_model_len} tokens",
            "less of num_blocks, block_size, max_num_seqs or max_model_len",
        ):
            self._round(cell, 0)

    def _order(self, index: int) -> list[Cell]:
        """The cells in the order of one round."""
        seed = np.random.SeedSequence(self._cells[0].resolved.seed, spawn_key=(index,))
        order = np.random.default_rng(seed).permutation(len(self._cells))
        return [self._cells[i] for i in order]

    def _run_round(self, writer: SampleWriter, cell: Cell, index: int) -> None:
        result = self._round(cell, index).run()
        verdict = None if result.round.warmup else self._verify(cell, result, index)
        records: list[Record] = [*result.requests, *result.steps]
        for record in records:
            writer.write(record)
        if verdict is not None:
            writer.write(verdict)
        writer.write(result.round)
        self._progress(_progress_line(cell, index, self._rounds, result.round, verdict))

    def _round(self, cell: Cell, index: int) -> Round:
        warmup = index == WARMUP_ROUND
        return Round(
            cell.resolved,
            self._targets[cell.resolved.device],
            self._warmup_requests if warmup else self._requests,
            cell=cell.index,
            index=index,
            warmup=warmup,
        )

    def _verify(self, cell: Cell, result: RoundResult, index: int) -> VerificationRecord:
        """Every request of the round once more, through the dense reference."""
        target = self._targets[cell.resolved.device]
        judged = target.verify(list(result.emissions.values()))
        verdicts = dict(zip(result.emissions, judged, strict=True))
        wrong_ids = tuple(name for name, verdict in verdicts.items() if verdict.wrong)
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
        first = self._cells[0].resolved
        writer.write(
            RunRecord(
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
                notes=first.notes,
            )
        )
        for cell in self._cells:
            writer.write(
                CellRecord(
                    cell=cell.index,
                    axes=cell.axes,
                    unsafe=cell.resolved.unsafe,
                    baseline=cell.index == 0,
                )
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
    """The warm-up's requests: the first few, at once, with few tokens each."""
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
    )


def _progress_line(
    cell: Cell,
    index: int,
    rounds: int,
    record: RoundRecord,
    verdict: VerificationRecord | None,
) -> str:
    which = "warm-up " if record.warmup else f"round {index + 1}/{rounds}"
    speed = f"{record.num_output_tokens / record.wall_s:8.1f} tok/s" if record.wall_s else ""
    wrong = f"  {verdict.wrong_requests} WRONG" if verdict and verdict.wrong_requests else ""
    return f"{which}  {cell.label or cell.resolved.workload.name}  {speed}{wrong}"
