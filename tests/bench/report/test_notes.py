"""What is said beside the table, so that no row seems to say more than it does."""

from __future__ import annotations

from bench.report.table import build_table


def notes(samples):
    """The notes of a file, as one text."""
    return "\n".join(build_table(samples).notes)


def test_a_comparison_names_rounds_baseline_and_noise(comparison):
    """Rounds, baseline, notes of the run, unsafe cells, and which rows are no different."""
    said = notes(comparison)
    assert "3 measured rounds per cell; baseline: deferred/reverse" in said
    assert "lengths scaled by 0.1" in said
    assert "early/reverse: UNSAFE" in said
    assert "same as the baseline within noise (the interval covers 1): early/reverse" in said
    assert "polled" not in said


def test_a_complete_run_has_no_alarm(synthetic):
    """Nothing failed: the notes hold the rounds and nothing else."""
    run = synthetic()
    run.round(run.cell())
    assert build_table(run.end()).notes == ("1 measured round per cell",)


def test_failed_requests_are_told_with_their_share(synthetic):
    """NEVER and aborted are counted over requests (fw-ai/benchmark#136)."""
    run = synthetic()
    done = (0.0, (0.1, 0.2), "length")
    run.round(run.cell(), requests=[done] * 7 + [(0.0, (), "never")] * 2 + [(0.0, (), "abort")])
    assert "2 NEVER (cannot fit the pool) and 1 aborted of 10 requests (30 % failed)" in notes(
        run.end()
    )


def test_rounds_that_were_not_run_and_the_interruption_are_told(synthetic):
    """Ctrl-C after the first round of the second cell: what is missing is named by cell."""
    run = synthetic(rounds=2)
    first, second = run.cell(), run.cell({"release": "polled", "free_order": "reverse"})
    run.round(first, 0)
    run.round(second, 0)
    run.round(first, 1)
    said = notes(run.end("interrupted", "Ctrl-C"))
    assert "INTERRUPTED (Ctrl-C): the table shows what was measured" in said
    assert "polled/reverse: not run: 1 of 2 rounds" in said
    assert "deferred/reverse: not run" not in said


def test_a_file_without_an_end_or_cut_off_says_so(synthetic):
    """A killed run is not shown as a whole one."""
    run = synthetic()
    run.round(run.cell())
    assert "UNFINISHED" in notes(run.read())
    source = run.folder / "samples.jsonl"
    source.write_bytes(source.read_bytes() + b'{"kind": "en')
    assert "TRUNCATED" in notes(run.read())


def test_unverified_rounds_and_near_ties_are_told(synthetic):
    """Answers nobody checked are named; near-ties are counted apart from wrong ones."""
    run = synthetic(rounds=2)
    cell = run.cell()
    run.round(cell, 0, near_ties=2)
    run.round(cell, 1, wrong=None)
    said = notes(run.end())
    assert "UNVERIFIED, the answers of 1 of 2 rounds" in said
    assert "2 near-ties, not counted as wrong" in said


def test_what_holds_for_every_cell_is_said_once(synthetic):
    """The same failure in all cells is one note."""
    run = synthetic()
    for release in ("deferred", "polled"):
        cell = run.cell({"release": release})
        run.round(cell, requests=[(0.0, (0.1, 0.2), "length"), (0.0, (), "never")])
    said = notes(run.end())
    assert said.count("NEVER") == 1
    assert "every cell: 1 NEVER (cannot fit the pool) of 2 requests (50 % failed)" in said
