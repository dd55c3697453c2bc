"""The parts of a step add up, and belong where they are put."""

from __future__ import annotations

import pytest

from bench.probes.step import (
    DEVICE,
    DEVICE_PARTS,
    HOST,
    HOST_PARTS,
    busy_ns,
    profile_steps,
    step_times,
)
from bench.probes.watch import Span
from bench.probes.watched_engine import draw_requests, run_plain, run_watched
from bench.runner import Target
from bench.spec import Flags, resolve
from tests.bench.tiny import load_profile_tiny, workload

FORK = {"children": 3, "output_tokens": 4, "after_tokens": 1}
WORK = workload({"count": 1, "prompt_tokens": 40, "output_tokens": 2, "fork": FORK})


def on(device, **engine):
    """The workload of these tests on a device."""
    return resolve(load_profile_tiny(), WORK, Flags(device=device, engine=engine))


@pytest.fixture(params=["cpu", "cpu-stepped"])
def resolved(request):
    """The workload on each CPU device."""
    return on(request.param)


@pytest.fixture
def target(resolved):
    """Its device and weights."""
    opened = Target(resolved)
    yield opened
    opened.close()


@pytest.mark.parametrize("release", ["deferred", "blocking", "step"])
def test_host_parts_add_up_and_device_parts_fit_in(resolved, target, release):
    """To the rounding of a float, under policies that wait at different places."""
    watched = run_watched(resolved.with_engine(release=release), target, draw_requests(resolved))
    steps = step_times(watched)
    assert len(steps) == len(watched.result.steps)
    for times, step in zip(steps, watched.steps, strict=True):
        moments = step.stats.moments
        wall_us = (moments.committed - moments.started) / 1e3
        assert sum(times[HOST, part] for part in HOST_PARTS) == pytest.approx(wall_us)
        device = {part: times[DEVICE, part] for part in DEVICE_PARTS}
        assert min(device.values()) >= 0
        assert device["forward"] > 0
        assert device["sampling"] > 0
        assert bool(device["copies"]) == bool(step.stats.num_copies)
        assert sum(device.values()) == pytest.approx(wall_us)  # nothing runs beside anything here


def test_watching_changes_no_token(resolved, target):
    """The emissions of a watched round are those of a plain one."""
    requests = draw_requests(resolved)
    plain = run_plain(resolved, target, requests)
    watched = run_watched(resolved, target, requests)
    tokens = {name: emission.token_ids for name, emission in plain.emissions.items()}
    assert tokens == {
        name: emission.token_ids for name, emission in watched.result.emissions.items()
    }


def test_every_policy_has_all_parts_and_its_price():
    """Rows by policy in the order asked for, shares of one step, a ratio for the observer."""
    said = []
    profile = profile_steps(
        on("cpu-stepped"), ["deferred", "early"], num_rounds=2, on_probe=said.append
    )
    places = [(HOST, part) for part in HOST_PARTS] + [(DEVICE, part) for part in DEVICE_PARTS]
    assert [(row.release, row.where, row.part) for row in profile.rows] == [
        (release, *place) for release in ("deferred", "early") for place in places
    ]
    shares = [row.share for row in profile.rows if row.release == "early" and row.where == HOST]
    assert sum(shares) == pytest.approx(1)
    assert [policy.unsafe for policy in profile.policies] == [False, True]
    for policy in profile.policies:
        assert policy.num_wrong == 0
        assert policy.observer.num_values == 2
        assert policy.clock_error_us == policy.drift_us == 0
    assert [(gap.release, gap.overlap) for gap in profile.gaps] == [
        (release, overlap) for release in ("deferred", "early") for overlap in ("off", "on")
    ]
    assert all(0 <= gap.median_percent <= 100 and gap.median_us >= 0 for gap in profile.gaps)
    assert said[:2] == ["deferred: warm-up", "early: warm-up"]
    assert said[2:4] == ["deferred: round 1 of 2", "early: round 1 of 2"]


@pytest.mark.parametrize(
    ("spans", "busy"),
    [
        ([], 0),
        ([(10, 20), (30, 50)], 30),
        ([(10, 30), (20, 40)], 30),  # two streams at once
        ([(10, 50), (20, 30), (45, 60)], 50),
        ([(-10, 5), (95, 200)], 10),  # what lies outside the step does not count
    ],
)
def test_busy_time_counts_each_moment_once(spans, busy):
    """The union of the spans, cut to the step."""
    assert busy_ns([Span("", *span) for span in spans], 0, 100) == busy
