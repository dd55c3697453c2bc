"""`validate` says which files are valid, and prints every problem of the others."""

from pathlib import Path

import pytest

from bench.commands import main

ROOT = Path(__file__).resolve().parents[3]

WORKLOAD = "description: x\nrequests:\n  - {count: 2, prompt_tokens: 8, output_tokens: 4}\n"


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "mine.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_shipped_files_are_valid(capsys):
    """Every workload and profile that is shipped passes; each has a line on stdout."""
    files = [
        str(path) for kind in ("workloads", "profiles") for path in (ROOT / kind).glob("*.yaml")
    ]
    assert main(["validate", *files]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert len(captured.out.splitlines()) == len(files)
    name = str(ROOT / "workloads" / "fork-batch.yaml")
    assert f"{name}: valid workload, 1 request, 16 forked from them" in captured.out
    assert f"{ROOT / 'profiles' / 'h200.yaml'}: valid profile for device cuda" in captured.out


def test_every_problem_is_printed(write, capsys):
    """Problems of the reader and of the schema come together, one line each, in line order."""
    path = write(
        "descripton: x\n"
        "engine: {block_size: 017, release: defered}\n"
        "requests:\n"
        "  - {count: 0, prompt_tokens: 8, output_tokens: 4, temperature: 1e-3}\n"
    )
    assert main(["validate", path]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    keys = [line.removeprefix(f"error: {path}:").split(": ")[:2] for line in lines]
    assert sorted(keys) == [
        ["1", "descripton"],  # and not `description` missing as well
        ["2", "engine.block_size"],
        ["2", "engine.release"],
        ["4", "requests[0].count"],
        ["4", "requests[0].temperature"],
    ]
    assert "(hint: YAML reads 1e-3 as text; write 1.0e-3)" in captured.err


def test_good_files_are_reported_beside_bad_ones(write, capsys):
    """One bad file makes the exit code 2 and does not stop the others."""
    good, bad = write(WORKLOAD, "good.yaml"), write("- 1\n", "bad.yaml")
    assert main(["validate", bad, "nowhere.yaml", good]) == 2
    captured = capsys.readouterr()
    assert captured.out == f"{good}: valid workload, 2 requests\n"
    assert captured.err.splitlines() == [
        f"error: {bad}:1: top level is not a mapping (got a list); expected `key: value` lines",
        "error: nowhere.yaml: cannot be read (No such file or directory); expected a YAML file",
    ]


@pytest.mark.parametrize("text", ["description: x\n", WORKLOAD + "model: {path: x}\n"])
def test_kind_must_be_clear_or_given(write, capsys, text):
    """Keys of neither or of both kinds ask for --kind; with it the file is checked as that."""
    path = write(text)
    assert main(["validate", path]) == 2
    assert "neither clearly a workload nor a profile" in capsys.readouterr().err
    assert main(["validate", "--kind", "profile", path]) == 2
    err = capsys.readouterr().err
    assert "model: missing key" in err or "requests: unknown key" in err


def test_a_trace_workload_names_its_format(write, capsys):
    """A workload that replays a trace is valid without the trace."""
    path = write("description: x\ntrace: {format: mooncake}\n")
    assert main(["validate", path]) == 0
    assert capsys.readouterr().out == (
        f"{path}: valid workload, replays a trace in mooncake format\n"
    )


def test_later_turns_are_counted(write, capsys):
    """Requests that come back are not more requests."""
    path = write(WORKLOAD.replace("}", ", turns: {count: 4, prompt_tokens: 2}}"))
    assert main(["validate", path]) == 0
    assert "valid workload, 2 requests, 6 later turns" in capsys.readouterr().out


def test_rows_must_fit_into_blocks(write, capsys):
    """A model's ratios and the block size: two keys of different sections."""
    text = (ROOT / "profiles" / "cpu-v41-tiny.yaml").read_text()
    path = write(text.replace("\n  block_size: 4", "\n  block_size: 3"))
    assert main(["validate", path]) == 2
    assert capsys.readouterr().err == (
        f"error: {path}: engine.block_size: 3 and the ratio 2 of layer 1 do not divide one another "
        "(hint: a block would hold part of a row; 2 or 4 fits every layer)\n"
    )


def test_one_state_slot_is_nobodys(write, capsys):
    """Slot 0 is never handed out."""
    path = write(WORKLOAD + "engine: {num_state_slots: 1}\n")
    assert main(["validate", path]) == 2
    assert capsys.readouterr().err == (
        f"error: {path}:4: engine.num_state_slots: 1 leaves no usable slot "
        "(hint: 0 = by max_num_seqs, or at least 2)\n"
    )
