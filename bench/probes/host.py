"""What the engine's host side costs: microbenchmarks of block manager, scheduler, release queue.

Each figure stands beside that of `PlainPool`, the simplest pool one would write in Python, taken in
the same run: rounds of ours and of the yardstick alternate, so a slow minute of the machine hits
both, and the ratio is the centre of the rounds' ratios. Times are CPU time of this thread, with the
garbage collector off.

Knows how the engine uses these parts, not how they work; knows no output format. Invariant: both
sides do the same work on pools in the same state, and each measured pool is proved consistent
before its figures count.
"""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from bench.probes.harness import gc_off
from bench.probes.plain_pool import PlainPool
from bench.stats import Interval, median, paired_ratio
from deepinfer.block_manager import BlockManager
from deepinfer.config import EngineConfig
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.errors import OwnershipError
from deepinfer.names import RELEASE_POLICIES
from deepinfer.plan import Int32, StepPlan, StepResult
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.scheduler import Scheduler
from deepinfer.sequence import SamplingParams

NUM_BLOCKS = 65_536
SEED = 0
NUM_RUNNING = (1, 64, 256, 1024, 4096)  # of the `schedule_commit_*` rows

# Ratios to the yardstick that the engine is to stay below.
TARGETS = {"alloc_free_1024": 0.25, "decode_like_step": 1.2, "schedule_commit_256": 3.5}
SCALING_TARGET = 6.0  # schedule_commit_4096 over schedule_commit_256
NO_YARDSTICK = "a plain pool withholds nothing, so there is nothing to compare with"

Timed = Callable[[int], float]  # runs so many operations, returns nanoseconds of one


@dataclass(frozen=True, slots=True)
class HostRow:
    """One figure.

    Attributes:
        name: what was measured.
        value: ours, median over the rounds.
        unit: `ns/block`, `us/step` or `us/table`.
        yardstick_value: the plain pool's, in the same unit; None where it has no counterpart.
        ratio: centre of the rounds' ratios of the two; None likewise.
        interval: of that ratio.
    """

    name: str
    value: float
    unit: str
    yardstick_value: float | None = None
    ratio: float | None = None
    interval: Interval | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """What a ratio was to be, and what it is."""

    name: str
    at_most: float
    ratio: float

    @property
    def met(self) -> bool:
        """Whether the ratio is within the target."""
        return self.ratio <= self.at_most


@dataclass(frozen=True, slots=True)
class HostProfile:
    """All figures of one run.

    Attributes:
        undefined: name of a row without yardstick -> why it has none.
        num_rounds: measured rounds of each row.
    """

    rows: tuple[HostRow, ...]
    undefined: dict[str, str]
    targets: tuple[Target, ...]
    num_rounds: int


def profile_host(
    *, quick: bool = False, on_probe: Callable[[str], None] = lambda name: None
) -> HostProfile:
    """Measure every row; some 15 seconds, or with `quick` a few seconds of rougher figures.

    `on_probe` is called with the name of each row before it is measured.
    """
    num_rounds, share = (7, 0.25) if quick else (61, 1.0)
    rows = []
    with gc_off():
        for probe in _probes():
            on_probe(probe.name)
            rows.append(_measure(probe, num_rounds, share))
    return HostProfile(
        rows=tuple(rows),
        undefined={row.name: NO_YARDSTICK for row in rows if row.yardstick_value is None},
        targets=tuple(_check_targets(rows)),
        num_rounds=num_rounds,
    )


# -- measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Side:
    """One contestant: `run` is timed; `check` raises if its pool was damaged meanwhile.

    `num_ops` operations make a round.
    """

    num_ops: int
    run: Timed
    check: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Probe:
    """One row to be measured; the sides are built when it is its turn, and dropped after it.

    `ns_per_unit` is what the nanoseconds of one operation are divided by.
    """

    name: str
    unit: str
    ns_per_unit: float
    ours: Callable[[], _Side]
    yardstick: Callable[[], _Side] | None = None


def _timed(statement: str, **names: Any) -> Timed:
    """Times `statement` written out in a loop, so that no call is added to what is measured."""
    timer = timeit.Timer(statement, timer=time.thread_time_ns, globals=names)
    return lambda num_ops: timer.timeit(num_ops) / num_ops


def _measure(probe: _Probe, num_rounds: int, share: float) -> HostRow:
    """One row: `num_rounds` rounds, each with `share` of the sides' operations."""
    builders = [probe.ours] if probe.yardstick is None else [probe.ours, probe.yardstick]
    sides = [build() for build in builders]
    times: list[list[float]] = [[] for _ in sides]
    for number in range(1 + num_rounds):
        order = range(len(sides)) if number % 2 else reversed(range(len(sides)))
        for index in order:
            side = sides[index]
            op_ns = side.run(max(1, int(side.num_ops * share)))
            if number > 0:  # round 0 warms up
                times[index].append(op_ns / probe.ns_per_unit)
    for side in sides:
        side.check()
    values = [median(side_times) for side_times in times]
    assert values[0] is not None, "at least one round is measured"
    if len(sides) == 1:
        return HostRow(probe.name, values[0], probe.unit)
    paired = paired_ratio(dict(enumerate(times[0])), dict(enumerate(times[1])))
    assert paired is not None, "both sides ran in every round"
    return HostRow(probe.name, values[0], probe.unit, values[1], paired.center, paired.interval)


def _check_targets(rows: list[HostRow]) -> Iterator[Target]:
    by_name = {row.name: row for row in rows}
    for name, at_most in TARGETS.items():
        ratio = by_name[name].ratio
        assert ratio is not None, f"{name} has a yardstick"
        yield Target(f"{name} / yardstick", at_most, ratio)
    many, few = (f"schedule_commit_{num_running}" for num_running in (4096, 256))
    yield Target(f"{many} / {few}", SCALING_TARGET, by_name[many].value / by_name[few].value)


def _probes() -> Iterator[_Probe]:
    """Block manager, scheduler, and what each release policy costs, in the order of the table."""
    for size, num_ops in ((1, 8000), (8, 3000), (1024, 60)):
        sides = partial(_alloc_free, size, num_ops), partial(_plain_alloc_free, size, num_ops)
        yield _Probe(f"alloc_free_{size}", "ns/block", size, *sides)
    yield _Probe("decode_like_step", "us/step", 1e3, _decode_like, _plain_decode_like)
    yield _Probe("fork_release_512", "us/table", 1e3, _fork_release, _plain_fork_release)
    for num_running in NUM_RUNNING:
        ours = partial(_schedule_commit, num_running)
        name = f"schedule_commit_{num_running}"
        yield _Probe(name, "us/step", 1e3, ours, _plain_decode_like)
    growing = partial(_schedule_commit, 256, all_alike=False)
    yield _Probe("schedule_commit_256_growing", "us/step", 1e3, growing, _plain_decode_like)
    for policy in RELEASE_POLICIES:
        yield _Probe(f"release_queue_{policy}", "us/table", 1e3, partial(_release_queue, policy))


# -- pools that have aged in use ----------------------------------------------------------------


def _aged_order() -> Int32:
    return np.random.default_rng(SEED).permutation(np.arange(1, NUM_BLOCKS, dtype=np.int32))


def _aged_pool() -> BlockManager:
    """Our pool, all free, its list in the order of an engine that has run for long."""
    blocks = BlockManager(NUM_BLOCKS)
    blocks.allocate(NUM_BLOCKS - 1)
    blocks.release(_aged_order())
    return blocks


def _aged_plain_pool() -> PlainPool:
    """The yardstick's pool with the same free list.

    It keeps its int objects and so gets them in scattered order: new ones, made in the order of the
    list, would lie side by side in memory as they never do in a pool that has aged in use.
    """
    pool = PlainPool(NUM_BLOCKS)
    ids = pool.allocate(NUM_BLOCKS - 1)
    pool.release([ids[block_id - 1] for block_id in _aged_order().tolist()])
    return pool


# -- block manager -------------------------------------------------------------------------------


def _alloc_free(size: int, num_ops: int) -> _Side:
    """Hand out `size` blocks and take them back."""
    pool = _aged_pool()
    one = "pool.release([pool.allocate_one()])"
    run = _timed(one if size == 1 else f"pool.release(pool.allocate({size}))", pool=pool)
    return _Side(num_ops, run, pool.check_integrity)


def _plain_alloc_free(size: int, num_ops: int) -> _Side:
    pool = _aged_plain_pool()
    run = _timed(f"pool.release(pool.allocate({size}))", pool=pool)
    return _Side(num_ops, run, pool.check_integrity)


# In each step of `decode_like_step`, row `step % 256` ends with 64 blocks and a request with 48
# enters in its place; then 16 rows grow by one, each at ages 8, 24, ..., 248, so it ends with 64.
_GROWING = [np.flatnonzero(np.arange(256) % 16 == (step + 8) % 16) for step in range(16)]
_FIRST_LENGTHS: list[int] = (64 - (np.arange(256) + 8) // 16).tolist()


def _decode_like() -> _Side:
    """The block work of decoding: tables in one matrix, a step's growths in one allocation."""
    pool = _aged_pool()
    tables, lengths = np.zeros((256, 64), np.int32), np.array(_FIRST_LENGTHS)
    for row, length in enumerate(_FIRST_LENGTHS):
        tables[row, :length] = pool.allocate(length)
    steps = count()

    def step() -> None:
        number = next(steps)
        ended = number % 256
        pool.release(tables[ended, : lengths[ended]])
        tables[ended, :48] = pool.allocate(48)
        lengths[ended] = 48
        rows = _GROWING[number % 16]
        columns = lengths[rows]
        tables[rows, columns] = pool.allocate(16)
        lengths[rows] = columns + 1

    def check() -> None:
        pool.check_integrity()
        _check_held(pool.num_held, int(lengths.sum()))

    return _Side(300, _timed("step()", step=step), check)


def _plain_decode_like() -> _Side:
    """The same with lists: each request that grows asks for its block."""
    pool = _aged_plain_pool()
    tables = [pool.allocate(length) for length in _FIRST_LENGTHS]
    growing = [rows.tolist() for rows in _GROWING]
    steps = count()

    def step() -> None:
        number = next(steps)
        ended = number % 256
        pool.release(tables[ended])
        tables[ended] = pool.allocate(48)
        for row in growing[number % 16]:
            tables[row] += pool.allocate(1)

    def check() -> None:
        pool.check_integrity()
        _check_held(NUM_BLOCKS - 1 - len(pool.free), sum(map(len, tables)))

    return _Side(300, _timed("step()", step=step), check)


def _check_held(num_held: int, num_in_tables: int) -> None:
    if num_held != num_in_tables:
        raise OwnershipError(f"{num_held} blocks are held, but the tables name {num_in_tables}")


def _fork_release() -> _Side:
    """A fork pins its parent's 512 blocks and lets them go."""
    pool = _aged_pool()
    run = _timed("pool.pin(table); pool.release(table)", pool=pool, table=pool.allocate(512))
    return _Side(150, run, pool.check_integrity)


def _plain_fork_release() -> _Side:
    pool = _aged_plain_pool()
    run = _timed("pool.pin(table); pool.release(table)", pool=pool, table=pool.allocate(512))
    return _Side(150, run, pool.check_integrity)


# -- scheduler and release queue -----------------------------------------------------------------


def _schedule_commit(num_running: int, *, all_alike: bool = True) -> _Side:
    """Schedule a step of pure decode, and commit a result that needs no device.

    With `all_alike` every prompt has 1024 tokens, and a round's figure is its median step, as in
    the field's comparison: the step in which all requests grow at once does not count. Otherwise
    prompts have 960 to 1087 tokens, so that 1 in 128 requests grows in each step, and the figure is
    the mean step.
    """
    scheduler = _decoding_scheduler(num_running, all_alike)

    def timed_step() -> int:
        start = time.thread_time_ns()
        plan = scheduler.schedule()
        assert plan is not None, "the requests run to max_model_len, which no run reaches"
        scheduler.submitted(plan, Fence(plan.step))
        host_ns = time.thread_time_ns() - start
        result = _fake_result(plan)
        start = time.thread_time_ns()
        scheduler.release.collected(plan.step)
        scheduler.commit(plan, result)
        return host_ns + time.thread_time_ns() - start

    def run(num_ops: int) -> float:
        times = [timed_step() for _ in range(num_ops)]
        return statistics.median(times) if all_alike else statistics.fmean(times)

    def check() -> None:
        scheduler.blocks.check_integrity()
        if scheduler.num_running != num_running or scheduler.counters.num_preemptions:
            raise OwnershipError("not every request decoded in every step")

    return _Side(14, run, check)  # 14 steps of 62 rounds stay below max_model_len


def _decoding_scheduler(num_running: int, all_alike: bool) -> Scheduler:
    """A scheduler whose requests have all computed their prompts."""
    config = EngineConfig(
        block_size=128,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * 1088,
        max_model_len=2048,
        release="step",
    )
    pool = _aged_pool()
    scheduler = Scheduler(config, pool, ReleaseQueue(pool, config.release))
    for number in range(num_running):
        num_tokens = 1024 if all_alike else 960 + number * 37 % 128
        params = SamplingParams(max_tokens=config.max_model_len - num_tokens)
        scheduler.add(str(number), np.ones(num_tokens, np.int32), params)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.num_seqs == num_running, "the token budget holds all prompts"
    scheduler.submitted(plan, Fence(plan.step))
    scheduler.release.collected(plan.step)
    scheduler.commit(plan, _fake_result(plan))
    return scheduler


def _fake_result(plan: StepPlan) -> StepResult:
    num_sampled = len(plan.sample_seq)
    return StepResult(plan.step, np.ones(num_sampled, np.int32), np.zeros(num_sampled, np.float32))


def _release_queue(policy: str) -> _Side:
    """Give up a table of 64 blocks behind a fence, and get it back, the device being done."""
    pool = _aged_pool()
    queue = ReleaseQueue(pool, policy)
    passed = SteppedCpuDevice().event()  # nothing was recorded: it has passed
    steps = count(1)

    def run(num_ops: int) -> float:
        tables = [pool.allocate(64) for _ in range(num_ops)]
        start = time.thread_time_ns()
        for table in tables:
            step = next(steps)
            queue.give_up(table, Fence(step, passed))
            queue.release_point()
            queue.collected(step)
        return (time.thread_time_ns() - start) / num_ops

    def check() -> None:
        pool.check_integrity()
        _check_held(pool.num_held + pool.num_withheld, 0)

    return _Side(150, run, check)
