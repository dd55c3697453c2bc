"""One pool of a replay: what was counted, and what does not add up."""

from __future__ import annotations

from deepinfer.block_manager import BlockManager
from deepinfer.observer import BlockIds, Observer
from deepinfer.release import Fence
from deepinfer.testing.oplog.pools import ReplayPool


def pool_of(size: int, release: str = "step") -> tuple[ReplayPool, list[str]]:
    complaints: list[str] = []
    blocks = BlockManager(size)
    return ReplayPool("state slot", size, blocks, release, None, complaints.append), complaints


def test_figures_follow_ids() -> None:
    """Handed out, withheld, refused, handed out again."""
    pool, complaints = pool_of(4)
    first = pool.allocate(2)
    pool.pin(first[:1])
    pool.queue.give_up(first, Fence(1))
    pool.given_up(first)
    pool.release_point()
    assert not pool.queue.make_room(2)
    pool.queue.collected(1)
    assert pool.queue.make_room(2)
    pool.allocate(2)
    pool.check()
    assert complaints == []
    figures = pool.figures
    assert (figures.allocations, figures.blocks_allocated, figures.blocks_touched) == (2, 4, 3)
    assert (figures.withheld_peak, figures.withheld_block_steps) == (1, 1)
    assert figures.refused_while_withheld == 1
    assert figures.reuse_distance == 1.0


def test_what_does_not_add_up_is_a_complaint() -> None:
    """By the pool's own count of owners, in its own words."""
    pool, complaints = pool_of(4)
    (slot,) = pool.allocate(1)
    pool.blocks.release([slot])
    pool.check()
    assert complaints == ["3 free + 0 held + 0 withheld of 3 state slots; 1 have owners"]


def test_a_refusal_has_the_numbers() -> None:
    """Who asked, and what there is."""
    pool, _ = pool_of(3)
    pool.allocate(2)
    assert pool.refusal(1, "a (admit)") == (
        "does not fit: 1 state slots for a (admit), with 0 free, 2 held and 0 withheld of 2"
    )


class Paths(Observer):
    """Notes on which paths ids go back."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def giving_up(
        self, table: BlockIds, step: int | None, owner: str, path: str, event: object = None
    ) -> None:
        self.paths.append(path)


def test_the_queue_tells_the_observer() -> None:
    """Whoever watches the pool hears of its releases."""
    paths = Paths()
    pool = ReplayPool("block", 4, BlockManager(4), "step", paths, lambda text: None)
    pool.queue.give_up(pool.allocate(1), path="finish")
    assert paths.paths == ["finish"]
