"""`compare` on the command line: its cells, its table, and what Ctrl-C leaves."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from bench.commands import main
from bench.samples import read_samples
from deepinfer.cache_engine import KVCache
from tests.bench.tiny import cli_command

WORKLOAD = """\
description: one parent and its children
requests:
  - count: 1
    prompt_tokens: 40
    output_tokens: 9
    fork: {children: 3, output_tokens: 10}
"""
LONG = """\
description: more than a minute
requests:
  - {count: 2, prompt_tokens: 16, output_tokens: 8, arrival: {every_s: 0.2}}
  - {count: 1, prompt_tokens: 16, output_tokens: 8, arrival: {at_s: 100}}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one workload, to work in."""
    (tmp_path / "mine.yaml").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compare(*args: object) -> int:
    """`compare mine.yaml ... --profile cpu-tiny -o out`, in this process."""
    options = ["--profile", "cpu-tiny", "-o", "out"]
    return main(["compare", "mine.yaml", *map(str, args), *options])


def test_every_combination_is_a_cell(capsys: pytest.CaptureFixture[str]) -> None:
    """Shorthands come first, the first values make the baseline, and the ratios are to it."""
    axes = ("-a", "block_size=16,8", "--release", "step,polled", "--free-order", "forward")
    assert compare(*axes, "-r", 2, "--format", "json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = [(row["release"], row["free_order"], row["block_size"]) for row in rows]
    expected = [("step", 16), ("step", 8), ("polled", 16), ("polled", 8)]
    assert found == [(release, "forward", size) for release, size in expected]
    assert [row["baseline"] for row in rows] == [True, False, False, False]
    assert rows[0]["vs_baseline"] == 1
    assert all(row["vs_baseline_low"] <= row["vs_baseline_high"] for row in rows)
    assert all(row["wrong_requests"] == 0 for row in rows)


def test_progress_is_on_stderr_and_the_table_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """Three rounds asked for are three measured rounds."""
    assert compare("-r", 3) == 0
    shown = capsys.readouterr()
    rounds = [record.round for record in read_samples("out").rounds if not record.warmup]
    assert rounds == [0, 1, 2]
    assert "mine: 1 cell, 3 rounds -> out" in shown.err
    assert "round 3/3" in shown.err
    assert "round 3/3" not in shown.out


def test_rounds_are_added_until_the_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    """By default rounds are added as needed; the end says why there are no more."""
    assert compare("--max-time", 0.001) == 0
    shown = capsys.readouterr()
    assert "mine: 1 cell, 7 rounds or more -> out" in shown.err
    assert "rounds were added until: --max-time of 0.001 s" in shown.out
    assert [record.round for record in read_samples("out").rounds if not record.warmup] == [0]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("-r", 3, "--max-time", 5), "--max-time 5 with -r 3: expected -r auto"),
        (("-r", "many"), "'many' is neither a number of rounds from 1 on nor auto"),
        (("-r", 0), "'0' is neither a number of rounds from 1 on nor auto"),
    ],
)
def test_bad_rounds_are_refused(
    options: tuple[object, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is run, and the message says what is valid."""
    assert compare(*options) == 2
    assert part in capsys.readouterr().err


def test_settings_apply_to_all_cells() -> None:
    """`--set` and `--seed` are what the cells have in common."""
    options = ("--release", "step,polled", "-s", "max_num_seqs=2", "--seed", 9, "-r", 1)
    assert compare(*options) == 0
    samples = read_samples("out")
    assert samples.run.config["engine"]["max_num_seqs"] == 2
    assert samples.run.seed == 9
    assert samples.run.axes == {"release": ["step", "polled"]}
    assert max(step.num_running for step in samples.steps) == 2


def test_one_wrong_cell_fails_the_comparison(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong answers in any cell are exit code 1, and the cell that is right shows 0."""
    plain_copy = KVCache.copy_blocks

    def lose_small(self: KVCache, pairs: object) -> None:
        if self.block_size == 16:
            plain_copy(self, pairs)  # type: ignore[arg-type]

    monkeypatch.setattr(KVCache, "copy_blocks", lose_small)
    assert compare("-a", "block_size=16,32", "-r", 1, "--format", "json") == 1
    shown = capsys.readouterr()
    rows = json.loads(shown.out)["rows"]
    assert [row["wrong_requests"] for row in rows] == [0, 3]
    assert shown.err.count("3 WRONG") == 1


def test_ctrl_c_keeps_what_was_measured_and_says_so(here: Path) -> None:
    """SIGINT in the middle of a round: the rest is kept, a table is printed, the code is 130."""
    (here / "long.yaml").write_text(LONG)
    command = cli_command("compare", "long.yaml", "--profile", "cpu-tiny", "-o", "out")
    process = subprocess.Popen(
        command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        first = [process.stderr.readline() for _ in range(2)]  # the start, and the warm-up
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert "warm-up" in first[1]
    assert process.returncode == 130
    assert "interrupted; what was measured is in out" in err
    assert "INTERRUPTED (Ctrl-C): the table shows what was measured" in out
    samples = read_samples(here / "out")
    assert samples.end is not None
    assert samples.end.status == "interrupted"
    assert samples.rounds
    assert all(record.warmup for record in samples.rounds)


def test_planted_delays_are_an_axis_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A row each; what is late is waited for, and the answers are right."""
    assert compare("-a", "delay=none,copy=20ms", "-r", 2, "--format", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["delay"] for row in shown["rows"]] == ["none", "copy=20ms"]
    assert all(row["wrong_requests"] == 0 for row in shown["rows"])
    (first, second) = (row["tok_per_s"] for row in shown["rows"])
    assert second < first
    assert not any("delays planted" in note for note in shown["notes"])


def test_a_delay_for_all_cells_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    """Times with planted delays are no machine's."""
    assert compare("--release", "step,polled", "--delay", "copy=1ms", "-r", 1) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "delays planted before every operation: copy=1ms" in shown
