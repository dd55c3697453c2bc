"""`check explore`: the table, the exit code and the files."""

from __future__ import annotations

import json

from click.testing import CliRunner

from bench.commands.check import command
from deepinfer.errors import UserError
from deepinfer.testing.explorer.recording import happened, read_file
from deepinfer.testing.explorer.runs import replay


def invoke(*args):
    return CliRunner().invoke(command, ["explore", "--jobs", "1", *args])


def test_a_table_row_for_each_policy_and_a_rate(tmp_path):
    """What was run, what it brought, and that it is as expected."""
    result = invoke("--scenario", "save-at-finish", "--release", "early", "--save", str(tmp_path))
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if line.startswith("save-at")]
    assert [row[1:3] for row in rows] == [["separate", "early"], ["one", "early"]]
    assert int(rows[0][4]) > 0 == int(rows[1][4])
    assert "interleavings in" in result.output
    (path,) = tmp_path.glob("*.json")
    recording = read_file(path)
    assert happened(replay(recording.setup, recording.performed)) == recording.happened


def test_early_that_does_not_fail_where_it_must_is_an_error():
    """One run is not enough to see it: exit code 1, and the row is named."""
    result = invoke("--scenario", "save-at-finish", "--release", "early", "--limit", "1")
    assert result.exit_code == 1
    assert "NOT AS EXPECTED: save-at-finish, separate streams, early" in result.output


def test_json_has_every_number():
    """The same rows for a program."""
    result = invoke("--scenario", "abort", "--release", "step", "--format", "json")
    (row,) = json.loads(result.stdout)["rows"]
    assert row["complete"]
    assert row["as_expected"]
    assert row["num_runs"] == 180
    assert row["num_corrupt"] == row["num_hazardous"] == 0


def test_random_operations_are_counted_by_policy():
    """Calls and device operations, and no alarm."""
    result = invoke("--operations", "2000", "--release", "polled", "--format", "json")
    assert result.exit_code == 0
    (one,) = json.loads(result.stdout)["policies"]
    assert one["num_actions"] + one["num_ops"] >= 2000
    assert one["num_alarms"] == one["num_failed"] == 0


def test_an_alarm_is_an_error_and_is_kept(tmp_path):
    """Under the unsafe policy the walks find something: exit code 1, and files to replay."""
    result = invoke("--operations", "1500", "--release", "early", "--save", str(tmp_path))
    assert result.exit_code == 1
    assert list(tmp_path.glob("walk-*-early.json"))


def test_unknown_names_are_refused():
    """With the nearest valid one."""
    result = invoke("--scenario", "save-at-finsh")
    assert isinstance(result.exception, UserError)
    assert "save-at-finish" in str(result.exception.hint)


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path):
    """Before anything is explored."""
    (tmp_path / "file").write_text("")
    result = invoke("--scenario", "fork", "--save", str(tmp_path / "file" / "folder"))
    assert isinstance(result.exception, UserError)
    assert "cannot make the folder" in str(result.exception)


def test_random_operations_take_no_scenario():
    """An option that would do nothing is refused."""
    result = invoke("--operations", "10", "--scenario", "fork")
    assert result.exit_code == 2
    assert "no --scenario" in result.output
