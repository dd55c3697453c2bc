"""The event profile: its rows, what they measure, and what a wait is found to do."""

from __future__ import annotations

import math
import time

import pytest

from bench.probes import events
from bench.probes.events import (
    CALLS,
    FENCE_POLICIES,
    NUM_BLOCKS,
    NUM_THREADS,
    PENDING_CALLS,
    THREADED_CALLS,
    EventRow,
    profile_events,
    step_that_gives_up,
    wait_verdict,
)
from bench.probes.harness import Call, Contest
from deepinfer.block_manager import BlockManager
from deepinfer.device import open_device
from deepinfer.errors import UserError

BLOCK_ROWS = {
    f"{policy}_event_per_{fence}" for policy in FENCE_POLICIES for fence in ("step", "block")
}


@pytest.fixture(scope="module")
def profile():
    """One quick run on both CPU devices."""
    return profile_events(["cpu", "cpu-stepped"], quick=True)


def row_of(profile, device, name, num_threads=1, num_blocks=None):
    """The one row with these coordinates."""
    wanted = (device, name, num_threads, num_blocks)
    (row,) = (r for r in profile.rows if (r.device, r.name, r.num_threads, r.num_blocks) == wanted)
    return row


@pytest.mark.parametrize("device", ["cpu", "cpu-stepped"])
def test_every_call_thread_count_and_block_count_has_a_row(profile, device):
    """Each once, with the unit of its figure."""
    rows = [row for row in profile.rows if row.device == device]
    assert len({row.key for row in rows}) == len(rows)
    names = {row.name for row in rows if row.num_threads == 1 and row.num_blocks is None}
    assert names == {
        *CALLS,
        *PENDING_CALLS,
        "step_fence",
        "synchronize_waiting",
        "wait_cpu_share",
    }
    threaded = {(row.name, row.num_threads) for row in rows if row.num_threads > 1}
    assert threaded == {(name, n) for name in THREADED_CALLS for n in NUM_THREADS}
    blocks = {(row.name, row.num_blocks) for row in rows if row.num_blocks is not None}
    assert blocks == {(name, n) for name in BLOCK_ROWS for n in NUM_BLOCKS}
    assert {row.unit for row in rows if row.num_blocks is not None} == {"us/step"}


def test_every_figure_is_finite_or_has_a_reason(profile):
    """A value without the harness, which is shown; nothing undefined in silence."""
    for row in profile.rows:
        if row.value is None:
            assert profile.undefined[row.key]
            assert row.p99 is row.mean is row.harness is None
            continue
        assert row.key not in profile.undefined
        assert all(math.isfinite(figure) for figure in (row.value, row.p99, row.mean))
        assert row.p99 >= row.value
        assert row.num_calls > 0
        assert (row.harness is None) == (row.unit == "% of wall")


def test_our_own_wait_blocks(profile):
    """The host sleeps on a lock of the CPU device: a few percent of CPU time at most."""
    row = row_of(profile, "cpu", "wait_cpu_share")
    assert row.value < 20
    assert row.verdict == "blocks, as it should"


def test_a_device_without_threads_has_nothing_to_wait_for(profile):
    """The host runs the operation itself, so there is no wait to judge, and the profile says so."""
    row = row_of(profile, "cpu-stepped", "wait_cpu_share")
    assert row.value is None
    assert "itself runs" in profile.undefined[row.key]


def test_waiting_costs_more_than_finding_it_done(profile):
    """To be woken takes a thread switch; a look takes none. Device time is not in the figure."""
    waiting = row_of(profile, "cpu", "synchronize_waiting")
    assert waiting.value > row_of(profile, "cpu", "synchronize_done").value
    assert waiting.value < 1e6 * events.WAIT_S


def test_an_event_per_block_costs_many_times_one_per_step(profile):
    """At 1,000 blocks by a factor of ten at least: the difference the rows are there to show."""
    for device in ("cpu", "cpu-stepped"):
        for policy in FENCE_POLICIES:
            per_step, per_block = (
                row_of(profile, device, f"{policy}_event_per_{fence}", num_blocks=1000).value
                for fence in ("step", "block")
            )
            assert per_block > 10 * per_step


@pytest.mark.parametrize("policy", FENCE_POLICIES)
@pytest.mark.parametrize(("fence", "num_events"), [("step", 1), ("block", 5)])
def test_a_step_withholds_behind_its_events_and_gets_everything_back(policy, fence, num_events):
    """One event, or one for each of five blocks; in the end all blocks are free, events pooled."""
    device = open_device("cpu-stepped")
    made = []
    new_event = device.event
    device.event = lambda: made.append(new_event()) or made[-1]
    pool = BlockManager(9)
    give_up = step_that_gives_up(device, pool, policy, fence)
    give_up(pool.allocate(5))
    assert len(made) == num_events
    assert all(event.pooled for event in made)
    give_up(pool.allocate(5))
    assert len({id(event) for event in made}) == num_events, "the second step reuses them"
    assert pool.num_free == 8
    pool.check_integrity()


def test_a_pending_event_that_passes_too_early_has_no_figure(monkeypatch):
    """With a wait in between nothing is pending any more: the row is empty and says why."""
    monkeypatch.setattr(events, "PENDING_S", 0.001)
    prober = events._Prober("cpu", num_rounds=1, share=1.0, on_probe=lambda name: None)
    too_late = Call("event.query()", before="event.synchronize()")
    row, reason = prober._pending("query_pending", too_late)
    assert row.value is None
    assert reason == events.NOT_PENDING


def test_calls_make_new_events_where_they_say_so():
    """`create` never gets an event of the pool, `reuse` always but the first time."""
    device = open_device("cpu-stepped")
    made = []
    new_event = device._events._make
    device._events._make = lambda timing: made.append(timing) or new_event(timing)
    names = events._names(device)
    for name, num_new in (("create", 3), ("create_and_record", 3), ("destroy", 3), ("reuse", 1)):
        made.clear()
        Contest(CALLS[name], [names], empty=Call("pass")).measure(2, 1)
        assert len(made) == num_new, name


@pytest.mark.parametrize(
    ("shares", "promise", "verdict"),
    [
        ([1.0, 2.0, 90.0], "blocks", "blocks, as it should"),
        ([99.0, 100.0], "spins", "spins, as it should"),
        ([99.0], "blocks", "SPINS, should be: blocks"),
        ([0.5], "spins", "BLOCKS, should be: spins"),
        ([50.0], "blocks", "UNCLEAR, should be: blocks"),
    ],
)
def test_a_wait_is_judged_by_its_median_share_of_cpu_time(shares, promise, verdict):
    """A wait that does not do what its device promises is in capitals."""
    assert wait_verdict(shares, promise) == verdict


def test_a_spinning_wait_would_be_found_out(monkeypatch):
    """The check of our own wait can fail: with an event that polls it says SPINS."""

    def spin(event):
        while not event.query():
            pass

    device = open_device("cpu")
    monkeypatch.setattr(type(device.event()), "synchronize", spin)
    device.close()
    prober = events._Prober("cpu", num_rounds=1, share=0.2, on_probe=lambda name: None)
    row, _ = prober._cpu_share(events.WAITS["cpu"][0])
    assert not row.verdict.startswith("blocks")


def test_a_missing_device_is_left_out_with_a_reason_unless_it_was_named(monkeypatch):
    """By default what there is is measured; who names a device is told that it is missing."""

    def refuse(name, **options):
        raise UserError(f"device {name!r}: none here")

    monkeypatch.setattr(events, "open_device", refuse)
    profile = profile_events(quick=True)
    assert profile.rows == ()
    assert profile.undefined["cuda"] == "not measured: device 'cuda': none here"
    with pytest.raises(UserError, match="none here"):
        profile_events(["cuda"], quick=True)


def test_rows_have_keys_in_words():
    """Device, call, blocks and threads, for footnotes and progress."""
    assert EventRow("cpu", "record", "us/call").key == "cpu record"
    assert EventRow("cpu", "record", "us/call", 8).key == "cpu record on 8 threads"
    row = EventRow("cuda", "polled_event_per_step", "us/step", num_blocks=10)
    assert row.key == "cuda polled_event_per_step of 10 blocks"


@pytest.mark.cuda
def test_cuda_waits_do_what_they_promise():
    """Every row has its figure; `blocking=True` frees the processor, the default spins."""
    began_s = time.monotonic()
    profile = profile_events(["cuda"], quick=True)
    assert time.monotonic() - began_s < 60
    assert not profile.undefined
    verdicts = {row.name: row.verdict for row in profile.rows if row.verdict}
    assert verdicts == {
        "wait_cpu_share_spinning": "spins, as it should",
        "wait_cpu_share_blocking": "blocks, as it should",
    }
    assert all(math.isfinite(row.value) for row in profile.rows)
