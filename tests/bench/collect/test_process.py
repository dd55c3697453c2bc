"""Memory and CPU time of this process."""

from __future__ import annotations

import time

import psutil

from bench.collect.process import ProcessCollector


def test_cpu_seconds_count_from_the_start_of_the_context():
    """0.2 s of work inside count; the same work before another context does not."""
    with ProcessCollector() as collector:
        start_s = time.process_time()
        while time.process_time() - start_s < 0.2:
            sum(range(1000))
        assert collector.read().values["process_cpu_s"] >= 0.15
    with ProcessCollector() as later:
        assert later.read().values["process_cpu_s"] < 0.15


def test_resident_memory_grows_with_what_is_held():
    """64 MiB written are seen within a factor of two."""
    with ProcessCollector() as collector:
        before = collector.read().values["process_rss_bytes"]
        held = bytearray(b"x") * (64 << 20)
        grown = collector.read().values["process_rss_bytes"] - before
    assert len(held) // 2 < grown < len(held) * 2


def test_a_process_that_cannot_be_read_is_none_with_a_reason(monkeypatch):
    """A system that denies the figures does not stop a run."""

    def deny(self):
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil.Process, "memory_info", deny)
    with ProcessCollector() as collector:
        reading = collector.read()
    assert set(reading.values.values()) == {None}
    assert reading.reason
