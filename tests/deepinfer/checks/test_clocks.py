"""Vector clocks over streams, events and the host."""

from __future__ import annotations

import pytest

from deepinfer.checks.clocks import Clocks


@pytest.fixture
def clocks():
    return Clocks()


def test_a_stream_orders_its_own_operations_and_no_others(clocks):
    """Two streams know nothing of one another."""
    clocks.submit("a")
    assert clocks.submit("a") == {"a": 2}
    assert clocks.submit("b") == {"b": 1}


def test_a_wait_brings_what_the_event_marked_when_recorded(clocks):
    """What was queued after the record is not waited for."""
    clocks.submit("a")
    clocks.record("a", 7)
    clocks.submit("a")
    clocks.wait("b", 7)
    assert clocks.submit("b") == {"a": 1, "b": 1}


def test_order_is_passed_on_from_event_to_event(clocks):
    """a before b and b before c is a before c."""
    clocks.submit("a")
    clocks.record("a", 1)
    clocks.wait("b", 1)
    clocks.record("b", 2)
    clocks.wait("c", 2)
    assert clocks.submit("c") == {"a": 1, "c": 1}


def test_a_host_wait_orders_whatever_is_queued_later(clocks):
    """Every stream learns it at its next submit, and not before the host waited."""
    clocks.submit("a")
    clocks.record("a", 1)
    assert "a" not in clocks.submit("b")
    clocks.synchronize(1)
    assert clocks.host == {"a": 1}
    assert clocks.submit("b")["a"] == 1


def test_waiting_for_everything_waits_for_every_stream(clocks):
    """As a device-wide synchronize does."""
    clocks.submit("a")
    clocks.submit("b")
    clocks.synchronize(None)
    assert clocks.host == {"a": 1, "b": 1}


def test_recording_again_moves_the_event(clocks):
    """Whoever waits then waits for the new point alone."""
    clocks.submit("a")
    clocks.record("a", 1)
    clocks.submit("b")
    clocks.record("b", 1)
    clocks.synchronize(1)
    assert clocks.host == {"b": 1}


@pytest.mark.parametrize("recorded", [False, True])
def test_an_event_that_was_never_recorded_or_was_recycled_orders_nothing(clocks, recorded):
    """It passes at once, whatever is queued."""
    clocks.submit("a")
    if recorded:
        clocks.record("a", 1)
        clocks.recycle(1)
    clocks.wait("b", 1)
    clocks.synchronize(1)
    assert clocks.host == {}
    assert clocks.submit("b") == {"b": 1}
