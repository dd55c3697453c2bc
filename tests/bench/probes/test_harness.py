"""How calls are timed: what is inside a figure, what is taken off, what several threads do."""

from __future__ import annotations

import gc
import sys
import threading
import time

import pytest

from bench.probes.harness import SWITCH_INTERVAL_S, Call, Contest, Loop, gc_off


def spin(seconds):
    """Keep this thread busy for so long."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def test_only_the_statement_itself_is_timed():
    """What stands before and after it runs in each turn, off the clock."""
    log = []
    call = Call("log.append('call')", "log.append('before'); sleep(0.002)", "log.append('after')")
    loop = Loop(call, {"log": log, "sleep": time.sleep})
    loop.run(3)
    assert log == ["before", "call", "after"] * 3
    assert len(loop.calls_ns) == 3
    assert min(loop.calls_ns) < 1e6
    assert loop.wall_ns > 6e6


def test_the_cost_of_a_call_is_found_without_the_harness():
    """A call that spins for 200 us costs that, an empty one nothing; the harness is shown."""
    cost = Contest(Call("spin(200e-6)"), [{"spin": spin}]).measure(3, 10)
    assert cost.num_calls == 30
    assert 199 < cost.median_us < 300
    assert cost.p99_us >= cost.median_us
    assert cost.mean_us > 199
    assert cost.harness_us > 0
    nothing = Contest(Call("pass"), [{}]).measure(5, 1000)
    assert abs(nothing.median_us) < 1


def test_loops_take_turns_and_the_first_round_does_not_count():
    """Who goes first changes from round to round; `settle` follows each loop."""
    log = []
    contest = Contest(
        Call("log.append('call')", before="log.append('before')"),
        [{"log": log}],
        settle=lambda: log.append("settle"),
    )
    cost = contest.measure(2, 1)
    ours, empty = ["before", "call", "settle"], ["before", "settle"]
    assert log == ours + empty + empty + ours + ours + empty
    assert cost.num_calls == 2


def test_what_the_device_took_comes_off_each_call():
    """A call of 1 ms of which the device had 0.8 costs 0.2; the warm-up's are forgotten."""
    took_ns = []
    call = Call("spin(1e-3)", after="less(0.8e6)")
    contest = Contest(call, [{"spin": spin, "less": took_ns.append}], correct=took_ns)
    cost = contest.measure(2, 5)
    assert len(took_ns) == cost.num_calls == 10
    assert 150 < cost.median_us < 500
    assert cost.mean_us > 150


def test_an_empty_loop_of_its_own_can_undo_what_stands_before():
    """The pair takes and gives back, so a pool of one survives both sides."""
    pool = [1]
    contest = Contest(
        Call("pool.append(taken)", before="taken = pool.pop()"),
        [{"pool": pool}],
        empty=Call("pass", before="taken = pool.pop()", after="pool.append(taken)"),
    )
    contest.measure(3, 10)
    assert pool == [1]


def test_threads_run_together_each_with_names_of_its_own():
    """Four threads meet inside the statement: were they to run in turn, it would never end."""
    meeting = threading.Barrier(4, timeout=10)
    seen = [[] for _ in range(4)]
    names = [{"meet": meeting.wait, "seen": one, "me": threading.current_thread} for one in seen]
    cost = Contest(Call("meet(); seen.append(me().name)"), names).measure(1, 2)
    assert cost.num_calls == 8
    assert [len(set(one)) for one in seen] == [2, 2, 2, 2]  # a thread in each round
    assert len({thread for one in seen for thread in one}) == 8


def test_waiting_for_the_interpreter_between_two_calls_is_in_the_mean():
    """Two threads whose calls took 100 ns each in loops of 2 us: the wall counts, not the calls."""
    contest = Contest(Call("pass"), [{}, {}])
    for ours, empty in zip(contest._loops, contest._empty, strict=True):
        ours.calls_ns[:], ours.wall_ns = [100] * 4, 2000.0
        empty.calls_ns[:], empty.wall_ns = [40] * 4, 400.0
    cost = contest._cost()
    assert (cost.median_us, cost.harness_us) == (0.06, 0.04)
    assert cost.mean_us == pytest.approx((2000 - 400) / 4 / 1e3)


def test_an_error_on_a_thread_reaches_the_caller_and_the_switch_interval_is_restored():
    """Also then; while threads run, Python switches often."""
    before_s, seen = sys.getswitchinterval(), []
    names = {"seen": seen, "interval": sys.getswitchinterval}
    with pytest.raises(ZeroDivisionError):
        Contest(Call("seen.append(interval()); 1 / 0"), [names] * 2).measure(1, 1)
    assert seen[0] == pytest.approx(SWITCH_INTERVAL_S)
    assert sys.getswitchinterval() == before_s


def test_the_garbage_collector_is_off_inside_and_then_as_before():
    """Whether it was on or not."""
    before = gc.isenabled()
    try:
        for switch, was_on in ((gc.enable, True), (gc.disable, False)):
            switch()
            with gc_off():
                assert not gc.isenabled()
            assert gc.isenabled() is was_on
    finally:
        gc.enable() if before else gc.disable()
