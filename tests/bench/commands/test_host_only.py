"""`compare --host-only`: its lists, its table in each format, and what does not belong to it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from bench.commands import main
from bench.commands.host_only import parse_setups
from tests.bench.tiny import AZURE_ROWS, MOONCAKE_ROWS


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a trace of either kind, to work in."""
    (tmp_path / "mooncake.jsonl").write_text("\n".join(MOONCAKE_ROWS) + "\n")
    (tmp_path / "azure.csv").write_text("\n".join(AZURE_ROWS) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compare(*args: str, workload: str = "mooncake", trace: str = "mooncake.jsonl") -> int:
    return main(["compare", workload, "--host-only", "--trace-file", trace, *args])


def test_lists_make_a_row_each_with_the_order_varying_fastest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every combination is a record with all counters; the orders are those of the caching pool."""
    lists = ("--free-order", "reverse,never_hit_first", "--blocks", "8,16", "--hold", "1,timed")
    assert compare(*lists, "--block-size", "512,128", "--format", "json") == 0
    document = json.loads(capsys.readouterr().out)
    rows = document["rows"]
    assert len(rows) == 16
    assert [row["free_order"] for row in rows[:2]] == ["reverse", "never_hit_first"]
    assert [(row["num_chunks"], row["block_size"], row["num_blocks"]) for row in rows[::4]] == [
        *((8, 512, 8), (16, 512, 16)),
        *((8, 128, 32), (16, 128, 64)),
    ]
    assert document["num_requests"] == len(MOONCAKE_ROWS)
    assert all(row["admitted"] + row["never"] == len(MOONCAKE_ROWS) for row in rows)
    assert all(len(row["digest"]) == 64 for row in rows)


def test_csv_has_the_figures_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The same record, as a program wants it."""
    assert compare("--format", "json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert compare("--format", "csv") == 0
    (fields,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert fields == {key: "" if value is None else str(value) for key, value in row.items()}


@pytest.mark.parametrize("format_name", ["text", "md"])
def test_paper_has_rates_and_what_they_mean(
    format_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Columns, a row, and the rate of a cache without limit."""
    assert compare("--format", format_name) == 0
    out = capsys.readouterr().out
    assert "token hit %" in out
    assert "a cache without limit would hit" in out


def test_the_whole_trace_is_read_unless_limited(capsys: pytest.CaptureFixture[str]) -> None:
    """The workload's own limit and scale are for machines that run the model."""
    rows = [json.dumps({**json.loads(MOONCAKE_ROWS[0]), "timestamp": i}) for i in range(50)]
    Path("many.jsonl").write_text("\n".join(rows))
    for options, number in (((), 50), (("--limit", "7"), 7)):
        assert compare("--format", "json", *options, trace="many.jsonl") == 0
        document = json.loads(capsys.readouterr().out)
        assert document["num_requests"] == number
        assert document["rows"][0]["prompt_tokens"] == number * 1200


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--blocks", "1"), "--blocks: '1'; expected whole numbers of at least 2"),
        (("--blocks", "8,x"), "--blocks: 'x'; expected whole numbers of at least 2"),
        (("--blocks", "8,8"), "--blocks: 8 is given twice"),
        (("--blocks", "9999999"), "--blocks 9999999: 9999999 blocks of 512 tokens; at most"),
        (("--hold", "0"), "--hold: '0'; expected whole numbers of at least 1"),
        (("--hold", "1,"), "--hold: ''; expected whole"),
        (("--block-size", "100"), "--block-size: '100'; expected divisors of 512"),
        (("--in-flight", "-1"), "--in-flight: '-1'; expected whole numbers of at least 0"),
        (("--free-order", "reverse_head"), "--free-order: 'reverse_head'; expected 'reverse"),
        (("--format", "html"), "--format html: not with --host-only; expected text, md, csv"),
        (("--release", "early"), "--release: changes nothing with --host-only"),
        (("-a", "block_size=16"), "-a: changes nothing with --host-only"),
        (("-o", "out"), "-o: changes nothing with --host-only"),
        (("--scale-lengths", "2"), "--scale-lengths: changes nothing with --host-only"),
    ],
)
def test_bad_values_and_options_of_the_other_kind_are_refused(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By flag and value, with what is valid, before anything is read."""
    assert compare(*args, trace="missing.jsonl") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [("--blocks", "8"), ("--hold", "1"), ("--block-size", "128"), ("--in-flight", "1")]
)
def test_its_options_are_refused_without_it(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """They would change nothing."""
    assert main(["compare", "mooncake", *option]) == 2
    assert f"{option[0]}: only with --host-only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("workload", "trace", "message"),
    [
        ("azure-code", "azure.csv", "azure.csv has no hash ids, so nothing can be hit"),
        ("fork-batch", "mooncake.jsonl", "workload fork-batch replays no trace"),
        ("mooncake", "missing.jsonl", "missing.jsonl: cannot be read"),
    ],
)
def test_only_a_trace_with_hash_ids_will_do(
    workload: str, trace: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without them no two prompts are known to be alike."""
    assert compare(workload=workload, trace=trace) == 2
    assert message in capsys.readouterr().err


def test_the_defaults_are_one_cell() -> None:
    """The engine's free order, 2,000 blocks of 512 tokens, the timed hold, nothing in flight."""
    (setup,) = parse_setups(None)
    assert (setup.free_order, setup.num_chunks, setup.hold) == ("reverse", 2000, "timed")
    assert (setup.block_size, setup.in_flight) == (512, 0)
