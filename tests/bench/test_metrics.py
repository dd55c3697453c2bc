"""Records -> figures, checked against small cases worked out by hand."""

from __future__ import annotations

import math

import pytest

from bench.metrics import compute_metrics, request_times

LATENCIES = ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms", "itl_ms_p99")


def only_cell(samples):
    """The metrics of a file with one cell."""
    (metrics,) = compute_metrics(samples)
    return metrics


def test_latencies_of_a_request_follow_their_formulas(synthetic):
    """Arrival at 1, tokens at 3, 4 and 7: TTFT 2, E2E 6, TPOT (6 - 2) / 2, gaps 1 and 3."""
    run = synthetic()
    run.round(run.cell(), requests=[(1.0, (3.0, 4.0, 7.0), "length")])
    times = request_times(run.read().requests[0])
    assert (times.ttft_s, times.e2e_s, times.tpot_s, times.itl_s) == (2.0, 6.0, 2.0, (1.0, 3.0))


def test_one_token_has_no_tpot_and_no_gap(synthetic):
    """TPOT divides by n - 1: with one token it is undefined, with its reason, never 0."""
    run = synthetic()
    run.round(run.cell(), requests=[(0.0, (0.5,), "stop")])
    metrics = only_cell(run.end())
    assert metrics.ttft_ms_p50.value == 500.0
    assert (metrics.tpot_ms.value, metrics.itl_ms_p99.value) == (None, None)
    assert metrics.tpot_ms.reason == "no request had two output tokens"


def test_throughput_counts_tokens_not_chunks(synthetic):
    """Chunks of 4, 1 and 3 tokens in one second are 8 tok/s, not 3 (vllm#35471)."""
    run = synthetic()
    times = (0.2,) * 4 + (0.5,) + (1.0,) * 3
    run.round(run.cell(), requests=[(0.0, times, "length")], wall_s=1.0)
    samples = run.end()
    assert only_cell(samples).tok_per_s.value == 8.0
    assert len(request_times(samples.requests[0]).itl_s) == 7


def test_a_run_whose_requests_all_failed_has_no_latency_and_says_so(synthetic):
    """All failed: null with a reason, no crash, `all_failed` for the exit code (sglang#35005)."""
    run = synthetic()
    run.round(run.cell(), requests=[(0.0, (), "never"), (0.0, (0.1, 0.2), "abort")])
    metrics = only_cell(run.end())
    assert metrics.all_failed
    for name in (*LATENCIES, "tok_per_s"):
        assert getattr(metrics, name).value is None
        assert getattr(metrics, name).reason == "no request was completed"


@pytest.mark.parametrize("name", ["ttft_ms_p50", "ttft_ms_p99"])
def test_one_request_is_every_quantile(synthetic, name):
    """n = 1: p50 and p99 are that value (HF inference-benchmarker#45)."""
    run = synthetic()
    run.round(run.cell(), requests=[(0.0, (0.25,), "length")])
    assert getattr(only_cell(run.end()), name).value == 250.0


def test_failures_are_counted_per_request(synthetic):
    """10 failed of 100 requests are 10 of 100, however many tokens there were (fw-ai#136)."""
    run = synthetic()
    good = [(0.0, tuple(0.01 * i for i in range(1, 20)), "length")] * 90
    run.round(run.cell(), requests=[*good, *[(0.0, (), "abort")] * 7, *[(0.0, (), "never")] * 3])
    metrics = only_cell(run.end())
    assert (metrics.num_requests, metrics.num_failed) == (100, 10)
    assert (metrics.num_aborted, metrics.num_never) == (7, 3)
    assert not metrics.all_failed


def test_failed_requests_do_not_enter_the_latencies(synthetic):
    """An aborted request's early token is no fast answer."""
    run = synthetic()
    run.round(run.cell(), requests=[(0.0, (0.001,), "abort"), (0.0, (0.5, 0.6), "length")])
    assert only_cell(run.end()).ttft_ms_p50.value == 500.0


def test_warm_up_rounds_do_not_count(synthetic):
    """A slow warm-up changes no figure but the verdict on answers."""
    run = synthetic(rounds=1)
    cell = run.cell()
    run.round(
        cell, 0, warmup=True, wall_s=100.0, requests=[(0.0, (90.0,), "length")], host_us=[9e9]
    )
    run.round(cell, 1)
    metrics = only_cell(run.end())
    assert (metrics.num_rounds, metrics.num_requests) == (1, 1)
    assert metrics.tok_per_s.value == 3.0
    assert metrics.ttft_ms_p99.value == 100.0
    assert metrics.host_us_per_step.value == 100.0


def test_a_wrong_answer_in_the_warm_up_is_wrong(synthetic):
    """Wrong requests are summed over every verified round."""
    run = synthetic()
    cell = run.cell()
    run.round(cell, 0, warmup=True, wrong=1, max_logprob_diff=0.5)
    run.round(cell, 1, wrong=0, near_ties=2)
    metrics = only_cell(run.end())
    assert metrics.wrong_requests.value == 1
    assert (metrics.near_ties.value, metrics.max_logprob_diff.value) == (2, 0.5)


def test_a_round_that_never_ended_does_not_count(synthetic):
    """Requests and steps of an interrupted round have no round record and are left out."""
    run = synthetic(rounds=2)
    cell = run.cell()
    run.round(cell, 0)
    run.round(cell, 1, requests=[(0.0, (50.0,), "length")])
    source = run.folder / "samples.jsonl"
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
    source.write_text("".join(lines[:-2]), encoding="utf-8")  # round and verification of round 1
    samples = run.read()
    assert len(samples.requests) == 2
    metrics = only_cell(samples)
    assert (metrics.num_rounds, metrics.num_requests) == (1, 1)
    assert metrics.ttft_ms_p99.value == 100.0


def test_throughput_is_the_median_of_the_rounds(synthetic):
    """One slow round of three does not move it."""
    run = synthetic(rounds=3)
    cell = run.cell()
    for number, wall_s in enumerate((1.0, 1.5, 100.0)):
        run.round(cell, number, wall_s=wall_s)
    metrics = only_cell(run.end())
    assert metrics.tok_per_s.value == 2.0
    assert metrics.tok_per_s_by_round == {0: 3.0, 1: 2.0, 2: 0.03}


def test_step_time_holds_the_waits_and_host_time_does_not(synthetic):
    """Host 100, 200, 900 us, waits 10 + 390 us: median host 200 us, p50 step 0.6 ms."""
    run = synthetic()
    run.round(run.cell(), host_us=(100.0, 200.0, 900.0), wait_us=10.0)
    metrics = only_cell(run.end())
    assert metrics.host_us_per_step.value == 200.0
    assert metrics.wait_us_per_step.value == 10.0
    assert metrics.step_ms_p50.value == pytest.approx(0.6)


def test_gaps_within_a_delivery_are_gaps_of_tokens_alone(synthetic):
    """Three tokens at once, then two: four gaps of tokens, one of deliveries."""
    run = synthetic()
    run.round(run.cell(), requests=[(0.0, (1.0, 1.0, 1.0, 1.5, 1.5), "length")])
    samples = run.end()
    times = request_times(samples.requests[0])
    assert times.itl_s == (0, 0, 0.5, 0)
    assert times.delivery_gaps_s == (0.5,)
    assert times.tpot_s == pytest.approx(0.125)
    assert only_cell(samples).itl_delivery_ms_p99.value == pytest.approx(500)


def test_drafts_and_blocks_given_back_are_those_of_a_round(synthetic):
    """15 rows for 13 drafts, of which 6 are accepted: 9 rows thrown away; what a file does not
    count has no figure."""
    counters = {
        "num_draft_rows": 15,
        "num_drafts_proposed": 13,
        "num_drafts_accepted": 6,
        "num_blocks_shrunk": 3,
    }
    run = synthetic()
    run.round(run.cell(), counters=counters)
    metrics = only_cell(run.end())
    assert (metrics.drafts_proposed.value, metrics.drafts_accepted.value) == (13, 6)
    assert (metrics.draft_rows_rejected.value, metrics.blocks_shrunk.value) == (9, 3)
    older = synthetic("older")
    older.round(older.cell())
    metrics = only_cell(older.end())
    assert metrics.blocks_shrunk.reason == "no round counted num_blocks_shrunk"
    assert metrics.draft_rows_rejected.reason == "no round counted num_draft_rows"


def test_counters_are_medians_of_rounds_and_the_peak_is_the_largest(synthetic):
    """Rounds with 1, 2 and 9 give 2, and 9 for the peak."""
    run = synthetic(rounds=3)
    cell = run.cell()
    for number, count in enumerate((1, 9, 2)):
        run.round(cell, number, counters={"withheld_peak": count, "num_later": count})
    metrics = only_cell(run.end())
    assert (metrics.later.value, metrics.withheld_blocks_peak.value) == (2, 9)


def test_a_counter_nobody_counted_is_undefined(synthetic):
    """Absent is None with a reason; a counted 0 is 0."""
    run = synthetic()
    run.round(run.cell(), counters={"num_later": None, "num_preemptions": 0})
    metrics = only_cell(run.end())
    assert (metrics.later.value, metrics.later.reason) == (None, "no round counted num_later")
    assert metrics.preemptions.value == 0


def test_unverified_answers_are_unknown_not_right(synthetic):
    """Without a verification record wrong_requests is None, and the round is counted."""
    run = synthetic()
    run.round(run.cell(), wrong=None)
    metrics = only_cell(run.end())
    assert (metrics.wrong_requests.value, metrics.num_unverified_rounds) == (None, 1)
    assert metrics.wrong_requests.reason == "no request was verified"


def test_a_difference_that_was_not_finite_is_not_hidden_by_the_others(synthetic):
    """The largest of 0.1 and infinity is unknown, not 0.1."""
    run = synthetic(rounds=2)
    cell = run.cell()
    run.round(cell, 0, max_logprob_diff=0.1)
    run.round(cell, 1, max_logprob_diff=math.inf)
    assert only_cell(run.end()).max_logprob_diff.value is None


def test_memory_is_in_mib_or_undefined_with_the_collectors_reason(synthetic):
    """512 MiB of RSS, no NVML."""
    run = synthetic()
    run.round(run.cell())
    metrics = only_cell(run.end())
    assert metrics.process_rss_mib.value == 512.0
    assert metrics.nvml_used_mib.value is None
    assert metrics.nvml_used_mib.reason == "nvml: no usable NVIDIA driver"


def test_a_cell_that_never_ran_is_undefined_throughout(synthetic):
    """Interrupted before its first round: every figure None, each with a reason."""
    run = synthetic()
    run.cell()
    metrics = only_cell(run.end("interrupted"))
    assert metrics.tok_per_s.reason == "no measured round"
    assert metrics.step_ms_p50.reason == "no step in a measured round"
    assert metrics.ttft_ms_p50.reason == "no request in a measured round"
    assert metrics.later.value is None
    assert metrics.process_rss_mib.reason == "no process_rss_bytes recorded"
    assert metrics.num_failed == 0


def test_a_cell_that_failed_has_its_reason_for_every_figure(synthetic):
    """Also those of its good rounds: it did not do its work. Wrong answers stay wrong."""
    run = synthetic(rounds=2)
    cell, other = run.cell(), run.cell()
    run.round(cell, 0, wrong=1)
    run.fail(cell, 1, "RuntimeError: no")
    run.round(other, 0)
    failed, good = compute_metrics(run.end())
    reason = "failed in round 2: RuntimeError: no"
    assert (failed.tok_per_s.value, failed.tok_per_s.reason) == (None, reason)
    assert failed.process_rss_mib.reason == reason
    assert failed.tok_per_s_by_round == {}
    assert failed.wrong_requests.value == 1
    assert good.tok_per_s.value == 3.0


def test_a_warm_up_can_fail_too(synthetic):
    """Then nothing was measured or verified, and that is the reason."""
    run = synthetic()
    run.fail(run.cell(), -1, "RuntimeError: no")
    metrics = only_cell(run.end())
    assert metrics.wrong_requests.reason == "failed in its warm-up: RuntimeError: no"
