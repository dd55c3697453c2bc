"""The account of a step: phases without the policy's waits, and the waits apart."""

from __future__ import annotations

from types import SimpleNamespace

from deepinfer.step_account import Counts, Reading, SubmittedStep


def test_a_wait_is_in_no_phase():
    """Phases are differences of the host's clock without waits; the sum of waits stands alone."""
    plan = SimpleNamespace(step=3, num_tokens=5, num_seqs=2, block_copies=[(1, 2)])
    flight = SimpleNamespace(device_ms=lambda: 0.5)
    readings = (Reading(100, 0), Reading(110, 0), Reading(150, 20), Reading(200, 65))
    counts = Counts(2, 1, 7, 3, 1, None, None)
    step = SubmittedStep(plan, flight, None, [], readings, counts, [])
    stats = step.stats(300, 340, Reading(350, 65), Reading(420, 70))
    assert (stats.schedule_ns, stats.submit_ns, stats.release_ns) == (10, 20, 5)
    assert (stats.result_wait_ns, stats.collect_ns, stats.commit_ns) == (40, 10, 65)
    assert stats.wait_ns == 70
    assert (stats.blocks_free, stats.slots_held, stats.num_copies) == (7, None, 1)
    assert (stats.start_ns, stats.end_ns) == (100, 420)
