"""Every scenario under every policy, free order and discipline: what it comes to, row by row.

    row    a scenario, its streams, a policy
    cell   a row under one free order and one discipline

The order checker runs in one cell of each row: what it finds does not depend on which id a block
has, and it takes more time than the run. Knows what is expected: `early` corrupts where transfers
race on a stream of their own, and nothing else ever does. Invariant: a row is called complete only
if all interleavings of all its cells have been run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context

from deepinfer.names import DISCIPLINES, FREE_ORDERS, UNSAFE_POLICIES
from deepinfer.testing.explorer.explore import Explored, explore
from deepinfer.testing.explorer.runs import ONE, SEPARATE, Outcome, Setup, setup_of
from deepinfer.testing.explorer.scenarios import SCENARIOS

ORDERS = tuple(product(FREE_ORDERS, DISCIPLINES))


@dataclass(frozen=True, slots=True)
class Cell:
    """What is explored at a time."""

    scenario: str
    streams: str
    release: str
    free_order: str
    discipline: str

    @property
    def setup(self) -> Setup:
        """The engine."""
        checked = (self.free_order, self.discipline) == ORDERS[0]
        return setup_of(
            SCENARIOS[self.scenario],
            self.release,
            self.free_order,
            self.discipline,
            self.streams,
            "order" if checked else "off",
        )


@dataclass(slots=True)
class Row:
    """A scenario under one policy, over all orders.

    Attributes:
        must_corrupt: whether it has to go wrong: an unsafe policy, and transfers that race.
        example: a run that went wrong, with its setup; the first corrupt one if there is any.
    """

    scenario: str
    streams: str
    release: str
    must_corrupt: bool
    num_cells: int
    num_complete: int = 0
    num_runs: int = 0
    num_random: int = 0
    num_redundant: int = 0
    num_corrupt: int = 0
    num_checked: int = 0
    num_hazardous: int = 0
    num_failed: int = 0
    wrong_rows: int = 0
    num_actions: int = 0
    num_ops: int = 0
    example: tuple[Setup, Outcome] | None = None

    @property
    def complete(self) -> bool:
        """Whether these are all interleavings there are."""
        return self.num_complete == self.num_cells

    @property
    def as_expected(self) -> bool:
        """Whether it went wrong exactly where it had to."""
        if self.must_corrupt:
            return self.num_corrupt > 0 and (self.num_hazardous > 0 or not self.num_checked)
        return self.num_failed == 0

    def add(self, cell: Cell, explored: Explored) -> None:
        """One more cell."""
        self.num_complete += explored.complete
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(explored, name))
        found = explored.first_corrupt or explored.first_failed
        if found and (self.example is None or found.corrupt > self.example[1].corrupt):
            self.example = (cell.setup, found)


_SUMS = (
    *("num_runs", "num_random", "num_redundant", "num_corrupt", "num_checked", "num_hazardous"),
    *("num_failed", "wrong_rows", "num_actions", "num_ops"),
)


def survey(
    scenarios: Sequence[str],
    releases: Sequence[str],
    limit: int,
    *,
    seconds: float | None = None,
    orders: Sequence[tuple[str, str]] = ORDERS,
    jobs: int = 1,
    tell: Callable[[str], None] | None = None,
) -> list[Row]:
    """Explore all cells of these scenarios and policies.

    Args:
        limit: most interleavings of a cell run in order; half as many random ones follow.
        seconds: in all; each cell gets its share of what is left.
        jobs: processes.
        tell: told now and then how far it is.
    """
    rows = {
        (name, streams, release): Row(
            name,
            streams,
            release,
            release in UNSAFE_POLICIES and streams == SEPARATE and SCENARIOS[name].races,
            len(orders),
        )
        for name in scenarios
        for streams in ((SEPARATE, ONE) if SCENARIOS[name].races else (SEPARATE,))
        for release in releases
    }
    cells = [Cell(*key, *order) for order in orders for key in rows]
    cells.sort(key=lambda cell: len(SCENARIOS[cell.scenario].program.actions))
    share = _Share(limit, None if seconds is None else time.time() + seconds, len(cells), jobs)
    work = ((cell, replace(share, cells_left=len(cells) - i)) for i, cell in enumerate(cells))
    for done, (cell, explored) in enumerate(_in_processes(work, jobs), start=1):
        rows[cell.scenario, cell.streams, cell.release].add(cell, explored)
        if tell is not None and done % 100 == 0:
            tell(f"{done} of {len(cells)} cells")
    return list(rows.values())


@dataclass(frozen=True, slots=True)
class _Share:
    """How much one cell may use up: interleavings, and its part of the time left."""

    limit: int
    until: float | None  # of `time.time()`, which all processes share
    cells_left: int
    jobs: int


def _explore(work: tuple[Cell, _Share]) -> tuple[Cell, Explored]:
    cell, share = work
    deadline = None
    if share.until is not None:
        # Most cells need much less than their share, so one may take several.
        left = max(share.until - time.time(), 0)
        deadline = time.perf_counter() + min(left, 20 * left * share.jobs / share.cells_left)
    program = SCENARIOS[cell.scenario].program
    return cell, explore(cell.setup, program, share.limit, deadline=deadline)


def _in_processes(
    work: Iterable[tuple[Cell, _Share]], jobs: int
) -> Iterator[tuple[Cell, Explored]]:
    if jobs == 1:
        yield from map(_explore, work)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_explore, work, chunksize=4)
