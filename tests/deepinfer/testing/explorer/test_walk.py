"""Random calls on random engines: no false alarm, however long.

`DEEPINFER_WALK_SECONDS` sets how long; by default a few seconds.
"""

from __future__ import annotations

import os
import sys

from deepinfer.testing.explorer.recording import happened
from deepinfer.testing.explorer.runs import replay
from deepinfer.testing.explorer.walk import SAFE, one_walk, tally

SECONDS = float(os.environ.get("DEEPINFER_WALK_SECONDS", "4"))


def test_safe_policies_raise_no_alarm():
    """Neither wrong rows nor wrong tokens nor findings of the checkers, under any safe policy."""
    tallies, failed = tally(sys.maxsize, seed=4, seconds=SECONDS)
    assert not [(walk.seed, walk.outcome.problems, walk.outcome.findings) for walk in failed]
    assert {one.release for one in tallies if one.num_walks} == set(SAFE)
    assert sum(one.num_actions + one.num_ops for one in tallies) > 100 * SECONDS


def test_the_unsafe_policy_is_found_out():
    """The same walks under `early` read wrong rows, and the order checker says why."""
    (early,), failed = tally(6000, seed=1, releases=["early"])
    assert early.num_failed > 5
    assert early.wrong_rows > 0
    assert any(walk.outcome.hazards for walk in failed)


def test_a_walk_is_made_again_by_its_seed_and_by_its_record():
    """So a failure can be kept and shrunk."""
    first, again = one_walk(7, "early"), one_walk(7, "early")
    assert happened(first.outcome) == happened(again.outcome)
    repeated = replay(first.setup, first.outcome.performed)
    assert repeated.wrong_rows == first.outcome.wrong_rows > 0
    assert repeated.findings == first.outcome.findings
