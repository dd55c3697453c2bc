"""A comparison with the real engine: order, warm-up, what is on disk when, how it can end."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.arrivals import RequestSpec
from bench.matrix import WARMUP_TOKENS, Cell, Matrix
from bench.metrics import compute_metrics
from bench.report import build_table
from bench.rounds import Auto
from bench.runner import Round, RoundResult
from bench.samples import Samples, SampleWriter, read_samples
from bench.schema import Workload
from deepinfer.cache_engine import KVCache
from deepinfer.errors import UserError
from tests.bench.tiny import PLAIN, cells_of, measured, run_matrix, silent, workload

AXES = ("release=deferred,polled,step", "free_order=reverse,forward")


@pytest.fixture(scope="module")
def small() -> Workload:
    """Forks and plain requests, over in milliseconds."""
    fork = {"children": 3, "output_tokens": 8}
    return workload({**PLAIN, "count": 1, "fork": fork}, {**PLAIN, "temperature": 1.0})


@pytest.fixture(scope="module")
def comparison(small: Workload, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Six cells, three rounds."""
    complete, samples = run_matrix(tmp_path_factory.mktemp("run"), cells_of(small, *AXES), 3)
    assert complete
    return samples


def played(samples: Samples) -> list[tuple[int, int]]:
    """(round, cell) in the order in which they ended."""
    return [(record.round, record.cell) for record in samples.rounds]


def test_cells_run_interleaved_after_their_warm_ups(comparison: Samples) -> None:
    """First all warm-ups, then round by round every cell once, not always in the same order."""
    order = played(comparison)
    assert order[:12] == [(number, cell) for number in (-1, -2) for cell in range(6)]
    order = [entry for entry in order if entry[0] >= 0]
    rounds = [order[begin : begin + 6] for begin in (0, 6, 12)]
    for index, entries in enumerate(rounds):
        assert sorted(entries) == [(index, cell) for cell in range(6)]
    assert len({tuple(cell for _, cell in entries) for entries in rounds}) > 1
    assert len(order) == 18


def test_the_order_is_drawn_from_the_seed(small: Workload, tmp_path: Path) -> None:
    """The same seed plays the same order again, another seed another one."""
    orders = []
    for number, seed in enumerate((1, 1, 2)):
        cells = cells_of(small, "release=deferred,polled,step,ordered", seed=seed)
        samples = run_matrix(tmp_path / str(number), cells)[1]
        orders.append([entry for entry in played(samples) if entry[0] >= 0])
    assert orders[0] == orders[1] != orders[2]


def test_every_round_is_whole_and_verified(comparison: Samples) -> None:
    """Each round has all its requests and steps, and each measured one a verdict: no fault."""
    for record in comparison.rounds:
        key = (record.cell, record.round)
        requests = [r for r in comparison.requests if (r.cell, r.round) == key]
        steps = [s for s in comparison.steps if (s.cell, s.round) == key]
        assert len(requests) == 8
        assert len(steps) == record.counters["num_steps"]
        found = [v for v in comparison.verifications if (v.cell, v.round) == key]
        if record.warmup:
            assert found == []
        else:
            assert [(v.checked_requests, v.wrong_requests) for v in found] == [(8, 0)]
    assert [cell.baseline for cell in comparison.cells] == [True, *[False] * 5]
    assert comparison.end is not None
    assert comparison.end.status == "complete"


def test_warm_ups_are_in_no_figure(comparison: Samples) -> None:
    """A cell's figures count its measured rounds alone."""
    for cell in compute_metrics(comparison):
        assert cell.num_rounds == 3
        assert cell.num_requests == 3 * 7  # not the parent, whose children carry on
    assert len(build_table(comparison).rows) == 6


class Recorded(Round):
    """A round that notes the requests it was given."""

    given: list[tuple[int, list[RequestSpec]]]

    def __init__(self, resolved: Any, target: Any, requests: Any, **keys: Any) -> None:
        super().__init__(resolved, target, requests, **keys)
        self.asked = (keys["index"], list(requests))

    def run(self) -> Any:
        """As `Round.run`."""
        Recorded.given.append(self.asked)
        return super().run()


def test_rounds_replay_the_same_requests_and_warm_ups_others(
    small: Workload, tmp_path: Path
) -> None:
    """Measured rounds get equal requests; a warm-up shares no prompt with them and is short.

    vllm#54227, LMBenchmark#35: a warm-up of the same prompts filled the cache for what is measured.
    """
    Recorded.given = []
    cells = cells_of(small, "release=deferred,step")
    with (
        Matrix(cells, rounds=2, axes={}, progress=silent, make_round=Recorded) as prepared,
        SampleWriter(tmp_path) as writer,
    ):
        assert prepared.run(writer)
    assert [index for index, _ in Recorded.given if index >= -1] == [-1, -1, 0, 0, 1, 1]
    warm = [spec for index, specs in Recorded.given if index < 0 for spec in specs]
    rounds = [
        [(s.request_id, s.arrival_s, s.prompt_token_ids.tobytes(), s.seed) for s in specs]
        for index, specs in Recorded.given
        if index >= 0
    ]
    assert all(specs == rounds[0] for specs in rounds)
    prompts = {prompt for _, _, prompt, _ in rounds[0]}
    assert warm
    assert prompts.isdisjoint(spec.prompt_token_ids.tobytes() for spec in warm)
    assert all(spec.max_tokens <= WARMUP_TOKENS for spec in warm)


def test_what_was_measured_is_on_disk_before_the_next_round(
    small: Workload, tmp_path: Path
) -> None:
    """When a round is reported, the file already holds it, whole."""
    seen: list[int] = []

    def progress(text: str) -> None:
        samples = read_samples(tmp_path)
        assert not samples.truncated
        seen.append(len(measured(samples)))

    run_matrix(tmp_path, cells_of(small, "release=deferred,step"), 2, progress)
    assert seen == [0, 0, 1, 2, 3, 4]


def test_all_cells_and_runs_emit_the_same_tokens(
    small: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One seed means one set of tokens: in every cell, round and run."""
    emissions: list[Any] = []
    plain_run = Round.run

    def run(self: Round) -> Any:
        result = plain_run(self)
        if not result.round.warmup:
            emissions.append(
                {name: list(emission.token_ids) for name, emission in result.emissions.items()}
            )
        return result

    monkeypatch.setattr(Round, "run", run)
    for number in range(2):
        cells = cells_of(small, "release=blocking,ordered", "block_size=16,32", seed=5)
        run_matrix(tmp_path / str(number), cells)
    assert len(emissions) == 8
    assert all(tokens == emissions[0] for tokens in emissions)


def interrupt_at(count: int) -> Any:
    """A progress callback during which Ctrl-C is pressed at its `count`-th call."""
    calls: list[str] = []

    def progress(text: str) -> None:
        calls.append(text)
        if len(calls) == count:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize(("count", "num_measured"), [(1, 0), (3, 1), (5, 3)])
def test_ctrl_c_keeps_what_was_measured(
    small: Workload, tmp_path: Path, count: int, num_measured: int
) -> None:
    """The rounds that ended are kept, the file says `interrupted`, and a table can be made."""
    cells = cells_of(small, "release=deferred,step")
    complete, samples = run_matrix(tmp_path, cells, 2, interrupt_at(count))
    assert not complete
    assert len(measured(samples)) == num_measured
    assert samples.end is not None
    assert samples.end.status == "interrupted"
    table = build_table(samples)
    assert any("INTERRUPTED" in note for note in table.notes)
    assert sum(row.values["tok_per_s"] is not None for row in table.rows) == min(num_measured, 2)


def test_a_round_that_was_interrupted_midway_does_not_count(
    small: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while steps run loses that round, and only that."""
    plain_take = Round._take
    steps = iter(range(10**6))

    def take(self: Round, output: Any) -> None:
        if self._index == 1 and next(steps) == 5:
            raise KeyboardInterrupt
        plain_take(self, output)

    monkeypatch.setattr(Round, "_take", take)
    complete, samples = run_matrix(tmp_path, cells_of(small), 3)
    assert not complete
    assert [entry for entry in played(samples) if entry[0] >= 0] == [(0, 0)]


def test_wrong_answers_are_counted_and_named(
    small: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that copies no block is caught: the children whose tail is missing are wrong."""
    monkeypatch.setattr(KVCache, "copy_blocks", lambda self, pairs: None)
    lines: list[str] = []
    _, samples = run_matrix(tmp_path, cells_of(small), progress=lines.append)
    (verdict,) = samples.verifications
    assert verdict.wrong_requests == 3
    assert verdict.wrong_ids == ("r0-0-0.0", "r0-0-0.1", "r0-0-0.2")
    assert lines[-1].endswith("3 WRONG")
    assert build_table(samples).num_wrong_requests == 3


@pytest.mark.parametrize(
    ("axis", "part"),
    [
        ("device=cpu,cuda", "cuda"),
        ("block_size=16,2000000000", "out of memory for 257 blocks of 2000000000 tokens"),
    ],
)
def test_what_a_cell_refuses_is_refused_before_anything_runs(
    small: Workload, axis: str, part: str
) -> None:
    """A device or a pool that cannot be had ends it at the start, and open devices are closed."""
    import torch

    if torch.cuda.is_available() and "cuda" in axis:
        pytest.skip("there is a CUDA device")
    before = threading.active_count()
    with pytest.raises(UserError, match=part):
        Matrix(cells_of(small, axis), rounds=1, axes={}, progress=silent)
    assert threading.active_count() == before


class Hot(Round):
    """A round whose GPU is throttled, as often as told."""

    num_hot: int

    def run(self) -> RoundResult:
        """As `Round.run`, with the memory of a throttled GPU."""
        result = super().run()
        if result.round.warmup or Hot.num_hot == 0:
            return result
        Hot.num_hot -= 1
        gpu = {"slowdowns": ["hw_thermal_slowdown"]}
        memory = {**result.round.memory, "torch_peak_allocated_bytes": 1, "gpu": gpu}
        return replace(result, round=replace(result.round, memory=memory))


@pytest.mark.parametrize(("num_hot", "num_left"), [(1, 0), (2, 1)])
def test_a_throttled_round_is_run_once_more(
    small: Workload, tmp_path: Path, num_hot: int, num_left: int
) -> None:
    """The first attempt is kept under a number of its own; the second counts, throttled or not."""
    Hot.num_hot = num_hot
    (cell,) = cells_of(small)
    with (
        Matrix([cell], rounds=2, axes={}, progress=silent, make_round=Hot) as prepared,
        SampleWriter(tmp_path) as writer,
    ):
        assert prepared.run(writer)
    samples = read_samples(tmp_path)
    numbers = [record.round for record in samples.rounds if record.round not in (-2, -3, -4)]
    assert numbers == [-1, -1001, 0, 1]
    (metrics,) = compute_metrics(samples)
    assert (metrics.num_rounds, metrics.num_repeated_rounds) == (2, 1)
    assert len(metrics.slowed_rounds) == num_left
    assert metrics.num_requests == 2 * 7


def test_rounds_are_added_as_long_as_intervals_are_wide(small: Workload, tmp_path: Path) -> None:
    """No interval is within a millionth of a percent, so only the time ends the run."""
    cells = cells_of(small, "release=deferred,step")
    auto = Auto(half_width=1e-8, max_time_s=2.0)
    with (
        Matrix(cells, rounds=7, axes={}, progress=silent, auto=auto) as prepared,
        SampleWriter(tmp_path) as writer,
    ):
        assert prepared.run(writer)
    samples = read_samples(tmp_path)
    assert samples.end is not None
    assert samples.end.reason == "--max-time of 2 s"
    assert any("-r auto: at least 7 rounds" in note for note in samples.run.notes)
    assert len(measured(samples)) % 2 == 0


def test_the_label_of_a_cell_is_its_axes(small: Workload) -> None:
    """Progress lines name a cell by its values."""
    (cell,) = cells_of(small)
    assert Cell(0, {"release": "step", "block_size": 16}, cell.resolved).label == (
        "release=step block_size=16"
    )


def test_a_warm_up_goes_through_phases_and_turns(tmp_path: Path) -> None:
    """Few tokens each and nobody thinks; what comes back in a round comes back here, too."""
    turns = {"count": 2, "prompt_tokens": 3, "think_s": 0.2}
    later = {**PLAIN, "count": 1, "phase": 2, "arrival": {"at_s": 0.2}, "turns": turns}
    Recorded.given = []
    cells = cells_of(workload({**PLAIN, "count": 1}, later))
    with (
        Matrix(cells, rounds=1, axes={}, progress=silent, make_round=Recorded) as prepared,
        SampleWriter(tmp_path) as writer,
    ):
        assert prepared.run(writer)
    given = dict(Recorded.given)
    assert [(spec.phase, spec.arrival_s) for spec in given[-1]] == [(1, 0.0), (2, 0.0)]
    assert [(spec.phase, spec.arrival_s) for spec in given[0]] == [(1, 0.0), (2, 0.2)]
    turn = given[-1][1].next_turn
    assert turn is not None
    assert (turn.arrival_s, turn.max_tokens) == (0.0, WARMUP_TOKENS)
    asked = {(r.round, r.request_id) for r in read_samples(tmp_path).requests}
    assert {(-1, "w-1-0"), (-1, "w-1-0-1"), (0, "r0-1-0"), (0, "r0-1-0-1")} <= asked
