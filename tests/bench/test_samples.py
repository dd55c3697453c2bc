"""The results file: written line by line, read back whole, refused when it is something else."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bench.samples import EndRecord, SampleWriter, label_of_axes, read_samples
from deepinfer.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def test_records_come_back_as_they_were_written(synthetic, make_step):
    """Every kind of record survives the file unchanged."""
    run = synthetic(metadata={"ticket": 7}, notes=("a", "b"))
    cell = run.cell(unsafe=True, baseline=True)
    run.round(cell, wrong=1)
    samples = run.end("interrupted", "Ctrl-C")
    assert samples.run.metadata == {"ticket": 7}
    assert samples.run.notes == ("a", "b")
    assert (samples.cells[0].unsafe, samples.cells[0].baseline) == (True, True)
    assert samples.steps == [make_step()]
    assert samples.requests[0].token_times_s == (0.1, 0.2, 0.4)
    assert samples.rounds[0].memory["process_rss_bytes"] == 512 * 2**20
    assert samples.verifications[0].wrong_ids == ("r0",)
    assert (samples.end.status, samples.end.reason) == ("interrupted", "Ctrl-C")
    assert not samples.truncated


def test_a_failure_holds_until_its_round_has_ended(synthetic):
    """Of several the last round's counts; one that was run again and ended is void."""
    run = synthetic()
    first, second = run.cell(), run.cell()
    run.fail(first, 0, "RuntimeError: once")
    run.fail(second, 0, "RuntimeError: ever")
    run.fail(second, 1, "RuntimeError: again")
    run.round(first, 0)
    samples = run.end()
    assert len(samples.failures) == 3
    assert samples.failure_of(first) is None
    assert samples.failure_of(second).reason == "RuntimeError: again"


def test_a_file_can_be_appended_to(synthetic):
    """Only if asked; what was there stays."""
    run = synthetic()
    cell = run.cell()
    path = run.folder / "samples.jsonl"
    before = path.read_bytes()
    with SampleWriter(run.folder, append=True) as writer:
        writer.write(EndRecord("complete"))
    assert path.read_bytes().startswith(before)
    samples = read_samples(run.folder)
    assert [record.cell for record in samples.cells] == [cell]
    assert samples.end == EndRecord("complete")


def test_each_line_is_on_disk_before_the_next_is_begun(synthetic):
    """What was written can be read while the run still goes on."""
    run = synthetic()
    assert run.read().cells == []
    run.cell()
    assert len(run.read().cells) == 1
    assert run.read().end is None


def test_the_reader_takes_the_folder_or_the_file(synthetic):
    """A run is named by its folder or by its samples.jsonl."""
    run = synthetic()
    assert read_samples(run.folder).run == read_samples(run.folder / "samples.jsonl").run


def test_numbers_that_are_not_finite_become_null(synthetic):
    """The file is strict JSON even when a difference was infinite (memtier#271, ginkgo#514)."""
    run = synthetic()
    run.round(run.cell(), max_logprob_diff=math.inf, counters={"withheld_peak": math.nan})
    samples = run.end()
    assert samples.verifications[0].max_logprob_diff is None
    assert samples.rounds[0].counters["withheld_peak"] is None
    for line in (run.folder / "samples.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} in the file"))


def test_numpy_scalars_are_written_as_numbers(synthetic):
    """Counters may come straight from numpy arrays."""
    run = synthetic()
    run.round(run.cell(), counters={"num_later": np.int64(3)})
    assert run.read().rounds[0].counters["num_later"] == 3


def test_an_existing_file_is_refused_and_kept(synthetic):
    """Results are never overwritten."""
    run = synthetic()
    before = (run.folder / "samples.jsonl").read_bytes()
    with pytest.raises(UserError, match="results exist already"):
        SampleWriter(run.folder)
    assert (run.folder / "samples.jsonl").read_bytes() == before


def test_a_folder_that_cannot_be_written_is_a_user_error(tmp_path):
    """A file in the place of the folder, or of one above it, is named in one line."""
    (tmp_path / "taken").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="taken"):
        SampleWriter(tmp_path / "taken")
    with pytest.raises(UserError, match="taken"):
        SampleWriter(tmp_path / "taken" / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_a_user_error(tmp_path):
    """No permission is one line, not a traceback."""
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot write"):
        SampleWriter(tmp_path / "run")


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_file_cut_off_in_its_last_line_is_read_up_to_there(synthetic, cut):
    """A killed run loses the line it was writing, and says so; the newline alone loses nothing."""
    run = synthetic()
    run.round(run.cell())
    run.end()
    source = run.folder / "samples.jsonl"
    source.write_bytes(source.read_bytes()[:-cut])
    samples = read_samples(run.folder)
    assert samples.truncated is (cut > 1)
    assert (samples.end is None) is (cut > 1)
    assert len(samples.rounds) == len(samples.verifications) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"kind": "cell", "cell": 0', "not a line of JSON"),
        ('{"kind": "cell", "cell": NaN, "axes": {}}', "not a line of JSON"),
        ("[1, 2]", "no `kind`"),
        ('{"cell": 0}', "no `kind`"),
        ('{"kind": "cell", "axes": {}}', "`cell` is missing"),
        ('{"kind": "cell", "cell": true, "axes": {}}', "bad value for `cell`"),
        ('{"kind": "cell", "cell": 1.5, "axes": {}}', "bad value for `cell`"),
        ('{"kind": "end", "status": null}', "bad value for `status`"),
        ("", "not a line of JSON"),
        ("caf\udce9", "not a line of JSON"),
    ],
)
def test_a_bad_line_in_the_middle_is_named_by_file_and_line(synthetic, line, said):
    """Damage that a kill cannot explain is refused, with its place."""
    run = synthetic()
    source = run.folder / "samples.jsonl"
    with open(source, "ab") as file:
        file.write(line.encode("utf-8", "surrogateescape") + b"\n")
        file.write(b'{"kind": "end", "status": "complete"}\n')
    with pytest.raises(UserError, match=r"samples\.jsonl:2: ") as caught:
        read_samples(run.folder)
    assert said in str(caught.value)


def test_a_bad_last_line_that_is_whole_is_not_a_cut(synthetic):
    """A line that ends with its newline was not cut off by a kill: it is damage."""
    source = synthetic().folder / "samples.jsonl"
    with open(source, "ab") as file:
        file.write(b'{"kind": "ce\n')
    with pytest.raises(UserError, match=r"samples\.jsonl:2: not a line of JSON"):
        read_samples(source)


def test_what_a_newer_version_adds_is_ignored(synthetic):
    """Unknown fields and kinds within the schema version do not stop a reader."""
    run = synthetic()
    source = run.folder / "samples.jsonl"
    with open(source, "a", encoding="utf-8") as file:
        file.write('{"kind": "cell", "cell": 0, "axes": {}, "color": "red"}\n')
        file.write('{"kind": "tag", "row": 1}\n')
    assert len(read_samples(run.folder).cells) == 1


def test_another_schema_version_is_refused(synthetic):
    """A file of another schema is not half understood."""
    run = synthetic()
    source = run.folder / "samples.jsonl"
    text = source.read_text(encoding="utf-8")
    source.write_text(text.replace('"schema_version": 1', '"schema_version": 2'), encoding="utf-8")
    with pytest.raises(UserError, match="schema_version 2, this version reads 1"):
        read_samples(run.folder)


def test_what_is_no_results_file_is_refused(tmp_path):
    """Missing, empty and foreign files each get a line that names them."""
    with pytest.raises(UserError, match="no such results folder"):
        read_samples(tmp_path / "absent")
    (tmp_path / "samples.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="nothing was measured"):
        read_samples(tmp_path)
    (tmp_path / "samples.jsonl").write_text('{"kind": "end", "status": "x"}\n', encoding="utf-8")
    with pytest.raises(UserError, match="no `run` record"):
        read_samples(tmp_path)


def test_a_folder_without_results_says_what_is_there(tmp_path):
    """The folder above the runs is a likely slip; its content shows the way."""
    (tmp_path / "fork-batch-1").mkdir()
    with pytest.raises(UserError, match="there is fork-batch-1"):
        read_samples(tmp_path)


def test_a_hundred_thousand_steps_are_read_in_seconds(synthetic, make_step, tmp_path):
    """Long runs can be tabulated at once."""
    run = synthetic()
    run.cell()
    source = run.folder / "samples.jsonl"
    with SampleWriter(tmp_path / "one.jsonl") as writer:
        writer.write(make_step())
    line = (tmp_path / "one.jsonl").read_bytes()
    with open(source, "ab") as file:
        file.write(line * 100_000)
    start_s = time.process_time()  # CPU time: the test must not fail because others work
    assert len(read_samples(run.folder).steps) == 100_000
    assert time.process_time() - start_s < 3


def test_the_locale_does_not_matter(tmp_path):
    """Names outside ASCII survive a C locale with UTF-8 mode off (mempalace#1203)."""
    code = """
import sys
from bench.samples import EndRecord, RunRecord, SampleWriter, read_samples
name = "caf\\u00e9 \\u4e2d"
run = RunRecord(name, "p", (), "now", {}, {}, "h", {}, 0, 1)
with SampleWriter(sys.argv[1]) as writer:
    writer.write(run)
assert read_samples(sys.argv[1]).run.workload == name
"""
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-X", "warn_default_encoding", "-W", "error::EncodingWarning"]
    done = subprocess.run(
        [*command, "-c", code, str(tmp_path / "run")], env=env, cwd=ROOT, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


def test_axes_read_as_they_are_written_on_the_command_line():
    """`false`, and not Python's word for it."""
    assert label_of_axes({"prefix_cache": False, "overlap": "on", "drafts": 3}) == "false/on/3"
    assert label_of_axes({}) == "the run"
