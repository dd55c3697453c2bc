"""Every fault over several seeds, and the clean engine over the same: rows of the table.

Knows neither faults nor formats. Invariant: a row's figures are over the same seeds, and a clean
row is judged by the same scenarios as the faults.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median_low

from deepinfer.names import CHECKS, RELEASE_POLICIES, UNSAFE_POLICIES
from deepinfer.testing.faults.harness import ENGINE, Outcome, run_trial
from deepinfer.testing.faults.plant import Fault

COLUMNS = (*CHECKS, ENGINE)
CLEAN, STATE, LOOKING_AHEAD, STORE = "clean", "state", "ahead", "store"
KINDS = [(with_state, ahead, False) for ahead, with_state in product((False, True), repeat=2)]
KINDS_WITH_STORE = [(False, True, True), (True, True, True)]


@dataclass(frozen=True, slots=True)
class Row:
    """One fault, or the clean engine under one policy.

    Attributes:
        name, what, report: of the fault; of a clean engine its policy, its company, and nothing.
            With `STATE` in its name, in a model whose requests have state slots; with
            `LOOKING_AHEAD` the clean engine plans steps ahead and verifies drafts, and with `STORE`
            it keeps rows beyond its pool, too.
        is_clean: whether it has no fault.
        num_seeds: scenarios run.
        num_found: by column, in how many of them something was found; columns without any left out.
        first_step: by column, the step at which it was first found; the median of those.
        example: by column, the message of the first seed that has one.
    """

    name: str
    what: str
    report: str
    is_clean: bool
    num_seeds: int
    num_found: dict[str, int]
    first_step: dict[str, int]
    example: dict[str, str]

    @property
    def passed(self) -> bool:
        """A fault: found by a checker; a clean engine: by nobody, the engine included."""
        return not self.num_found if self.is_clean else bool(self.num_found.keys() & set(CHECKS))


def survey(faults: Sequence[Fault], num_seeds: int) -> Iterator[Row]:
    """The clean engine under every policy, then each fault.

    An unsafe policy is clean only where nobody writes blocks beside the steps; with such a client
    it is a fault, and with a store it would be. What concerns the client is run over rows of both
    kinds: K and V of every token, and compressed rows of a model with state.
    """
    seeds = range(num_seeds)
    for release in RELEASE_POLICIES:
        alone = release in UNSAFE_POLICIES
        for with_state, ahead, store in KINDS if alone else KINDS + KINDS_WITH_STORE:
            runs = [
                run_trial(
                    None,
                    seed,
                    release=release,
                    transfers=not alone,
                    with_state=with_state,
                    ahead=ahead,
                    store=store,
                )
                for seed in seeds
            ]
            marks = {STATE: with_state, LOOKING_AHEAD: ahead, STORE: store}
            name = ", ".join([CLEAN, release, *(mark for mark, has in marks.items() if has)])
            company = "no other writer" if alone else "loads and saves beside it"
            yield _row(name, "loads and saves of its own" if store else company, "", True, runs)
    for fault in faults:
        for with_state in (False, True) if fault.of_client else (False,):
            runs = [run_trial(fault, seed, with_state=with_state) for seed in seeds]
            name = _name(fault.name, with_state)
            yield _row(name, fault.what, fault.report, False, runs)


def _name(of: str, with_state: bool) -> str:
    return f"{of}, {STATE}" if with_state else of


def _row(name: str, what: str, report: str, is_clean: bool, runs: Sequence[Outcome]) -> Row:
    steps = {column: [r.first[column] for r in runs if column in r.first] for column in COLUMNS}
    return Row(
        name,
        what,
        report,
        is_clean,
        len(runs),
        {column: len(found) for column, found in steps.items() if found},
        {column: median_low(found) for column, found in steps.items() if found},
        {
            column: next(r.messages[column] for r in runs if column in r.messages)
            for column, found in steps.items()
            if found
        },
    )
