"""The scenario of the planted faults: eventful, and the same for the same seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from deepinfer.observer import Access, BlockIds, Observer
from deepinfer.testing.faults import run_trial


class Events(Observer):
    """Counts ways to get blocks, to give them up, and what runs on which stream."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def took(self, owner: str, ids: BlockIds, path: str) -> None:
        self.counts[path] += 1

    def giving_up(
        self, table: BlockIds, step: int | None, owner: str, path: str, event: object = None
    ) -> None:
        self.counts[path if step is None else f"{path} behind a fence"] += 1

    def submitted(
        self, stream: str, label: str, reads: Sequence[Access], writes: Sequence[Access]
    ) -> None:
        self.counts[f"{label.split(' ')[0]} on {stream}"] += 1


def counts_of(seed: int) -> Counter[str]:
    events = Events()
    run_trial(None, seed, observers=(events,))
    return events.counts


def test_everything_happens() -> None:
    """Every path on which blocks change hands, with and without a step in flight."""
    counts = counts_of(0) + counts_of(1) + counts_of(2)
    assert {
        *("admit", "append", "fork", "copy-on-write", "load", "save", "finish", "preempt"),
        *("abort", "abort behind a fence", "fork source behind a fence"),
        *("load on load", "save on load", "use on compute", "copy_blocks on copy"),
    } <= counts.keys()
    assert {"unpin", "unpin behind a fence"} & counts.keys()


def test_a_seed_gives_the_same_life() -> None:
    """And another seed another one."""
    assert counts_of(3) == counts_of(3)
    assert counts_of(3) != counts_of(4)
