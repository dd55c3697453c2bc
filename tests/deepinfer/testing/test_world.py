"""The world notices what an engine does wrong; transfers do what a writer must, and no more."""

from __future__ import annotations

import pytest

from deepinfer.block_manager import BlockManager
from deepinfer.config import EngineConfig
from deepinfer.testing.world import World, right_answer

SMALL = {"block_size": 2, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 32}


def world(num_blocks=8, block_manager=BlockManager, **settings):
    config = EngineConfig(num_blocks=num_blocks, **{**SMALL, **settings})
    return World(config, block_manager=block_manager)


class Leaky(BlockManager):
    """Forgets the last block of every longer table."""

    def release(self, table, *, fenced=False):
        return super().release(table[:-1] if len(table) > 1 else table, fenced=fenced)


class Hasty(BlockManager):
    """Ignores fences."""

    def release(self, table, *, fenced=False):
        super().release(table)
        return []


def test_a_clean_run_has_no_problems_and_right_answers():
    """Forks, aborts and transfers on a good engine."""
    w = world()
    w.add("a", [1, 2, 3], max_tokens=3)
    w.step()
    w.fork("a", "b", max_tokens=2)
    w.save("s", "a")
    w.load("x", 3)
    w.drain()
    assert (w.problems, w.wrong_rows, w.wrong_tokens()) == ([], 0, 0)
    assert w.ended["a"] == ("length", [1, 2, 3, *right_answer([1, 2, 3], 3)])


def test_a_leak_is_a_problem():
    """Blocks that do not come back are missed at the end."""
    w = world(block_manager=Leaky)
    w.add("a", [1, 2, 3], max_tokens=1)
    w.drain()
    assert w.problems == ["drained, and 6 of 7 blocks are free"]


def test_a_block_handed_out_behind_the_fence_is_a_wrong_row():
    """A save under a safe policy reads the next owner's rows if the pool ignores its fence."""
    wrong = {}
    for manager in (BlockManager, Hasty):
        w = world(3, manager, release="step")
        w.add("a", [1, 2, 3], max_tokens=2)
        w.step()
        w.save("s", "a")
        w.add("b", [4, 5, 6], max_tokens=1)  # so that the abort leaves no idle engine, which waits
        w.abort("a")
        w.step()
        w.device.synchronize()
        wrong[manager] = w.wrong_rows
    assert wrong == {BlockManager: 0, Hasty: 2}  # tables of 3 rows, the other way round


def test_a_load_without_room_changes_nothing():
    """It is refused, and holds nothing."""
    w = world(3)
    assert w.load("x", 3)
    assert not w.load("y", 1)
    assert list(w.transfers.held) == ["x"]
    w.use("x")
    w.drain()
    assert w.problems == []


@pytest.mark.parametrize(("release", "first"), [("ordered", "compute"), ("early", "load")])
def test_a_load_waits_on_its_own_stream_for_the_fences_of_its_blocks(release, first):
    """With `ordered` the load is held until the step that used the block is done."""
    w = world(2, release=release)
    w.add("a", [1, 2], max_tokens=1)
    w.submit()
    w.abort("a")
    assert w.load("x", 2)
    can_run = w.device.runnable()
    assert ("load" in can_run) == (first == "load")
    w.drain()
    assert w.problems == []
