"""The account of a step: phases without the policy's waits, and the waits apart."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from deepinfer.plan import AheadResult
from deepinfer.step_account import Counts, Reading, SubmittedStep, draft_counts


def test_a_wait_is_in_no_phase():
    """Phases are differences of the host's clock without waits; the sum of waits stands alone."""
    plan = SimpleNamespace(step=3, num_tokens=5, num_seqs=2, block_copies=[(1, 2)], ahead=None)
    flight = SimpleNamespace(device_ms=lambda: 0.5)
    readings = (Reading(100, 0), Reading(110, 0), Reading(150, 20), Reading(200, 65))
    counts = Counts(2, 1, 7, 3, 1, None, None)
    step = SubmittedStep(plan, flight, None, [], readings, counts, [])
    stats = step.stats(300, 340, Reading(350, 65), Reading(420, 70), None, 0.25)
    assert (stats.schedule_ns, stats.submit_ns, stats.release_ns) == (10, 20, 5)
    assert (stats.result_wait_ns, stats.collect_ns, stats.commit_ns) == (40, 10, 65)
    assert stats.wait_ns == 70
    assert (stats.blocks_free, stats.slots_held, stats.num_copies) == (7, None, 1)
    assert (stats.start_ns, stats.end_ns) == (100, 420)
    assert (stats.gap_ms, stats.drafts) == (0.25, None)


def test_drafts_are_counted_by_their_position():
    """Three requests verify 3, 1 and no drafts and get 3, 1 and 1 tokens: 2, 0 and 0 accepted.

    Three rows were planned for each.
    """
    new, verified = np.array([3, 1, 1], np.int32), np.array([3, 1, 0], np.int32)
    ahead = SimpleNamespace(num_drafts=np.array([3, 3, 3], np.int32))
    found = AheadResult(new, verified, np.zeros(3, np.int32))
    assert draft_counts(ahead, found, new) == (9, 2, (2, 1, 1), (1, 1, 0))


def test_what_lies_behind_an_end_counts_for_nothing():
    """Of three accepted drafts each: one request stopped at its second token, one is stale."""
    ahead = SimpleNamespace(num_drafts=np.array([3, 3, 3], np.int32))
    new, three = np.array([4, 2, 0], np.int32), np.full(3, 3, np.int32)
    found = AheadResult(np.full(3, 4, np.int32), three, three)
    assert draft_counts(ahead, found, new) == (9, 2, (2, 2, 2), (2, 1, 1))


def test_rows_planned_for_drafts_that_nobody_proposed_count_as_rows():
    """They were computed, and there is no acceptance to speak of."""
    zeros = np.zeros(2, np.int32)
    ahead = SimpleNamespace(num_drafts=np.array([3, 2], np.int32))
    found = AheadResult(np.ones(2, np.int32), zeros, zeros)
    assert draft_counts(ahead, found, np.ones(2, np.int32)) == (5, 0, (), ())


def test_a_step_without_drafts_counts_none():
    """Nothing was planned: there is no acceptance to speak of, which is not one of 0."""
    zeros = np.zeros(2, np.int32)
    found = AheadResult(np.ones(2, np.int32), zeros, zeros)
    ahead = SimpleNamespace(num_drafts=zeros)
    assert draft_counts(ahead, found, np.ones(2, np.int32)) is None
    assert draft_counts(None, None, None) is None
