"""What checkers cost: who runs against whom, and what is counted besides."""

from __future__ import annotations

import pytest

from bench.probes import check_cost
from bench.probes.check_cost import choices_of, profile_checks
from deepinfer.cache_engine import KVCache
from deepinfer.errors import UserError
from tests.bench.tiny import tiny, workload

FORK = {"children": 3, "output_tokens": 4, "after_tokens": 1}
WORK = workload({"count": 1, "prompt_tokens": 40, "output_tokens": 2, "fork": FORK})


def test_each_alone_and_all_together():
    """One checker is not measured twice."""
    assert choices_of(["tags"]) == ("off", "tags")
    assert choices_of(["tags", "order"]) == ("off", "tags", "order", "tags+order")


def test_rounds_are_interleaved_and_compared_within_a_round(monkeypatch):
    """Every choice runs once a round; its ratio is to the step without checkers of that round."""
    played = []

    def period(result):
        played.append(result.round.counters.get("wrong_rows") is not None)
        return (2.0 if played[-1] else 1.0) * (1 + len(played) // 2)

    monkeypatch.setattr(check_cost, "step_period_s", period)
    profile = profile_checks(tiny(WORK), ["tags"], num_rounds=4)
    off, tags = profile.rows
    assert sorted(played) == [False] * 4 + [True] * 4
    assert played != sorted(played)
    assert (off.checks, off.ratio, tags.checks) == ("off", None, "tags")
    assert tags.ratio.num_values == 4
    assert (tags.num_findings, tags.num_wrong) == (0, 0)


def test_what_the_checkers_found_is_counted(monkeypatch):
    """An engine that loses its copies: wrong rows where they are tagged, wrong answers anywhere."""
    monkeypatch.setattr(KVCache, "copy_blocks", lambda self, pairs: None)
    off, tags = profile_checks(tiny(WORK), ["tags"], num_rounds=1).rows
    assert (off.num_findings, off.num_wrong) == (0, 3)
    assert tags.num_findings > 0


def test_a_workload_without_two_steps_has_no_step_time():
    """Refused with the reason, not reported as 0."""
    big = workload({"count": 1, "prompt_tokens": 5000, "output_tokens": 2})
    with pytest.raises(UserError, match="no step ran"):
        profile_checks(tiny(big), ["tags"], num_rounds=1)
