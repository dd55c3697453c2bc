"""Bad input at the command line: one line that names it, exit code 2, nothing left behind.

Each case is what a user might type or have in a file. One line on stderr begins with `error:` and
names file, key, value and what is valid; a second one may give a hint.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from bench.commands import main
from tests.bench.tiny import AZURE_ROWS, cli_command, run_cli

WORKLOAD = """\
description: d
requests:
  - count: 2
    prompt_tokens: 8
    output_tokens: 4
"""
PROFILE = """\
description: d
model:
  num_hidden_layers: 1
  hidden_size: 16
  num_attention_heads: 2
  num_key_value_heads: 1
  head_dim: 8
  intermediate_size: 16
  vocab_size: 64
engine: {num_blocks: 9, block_size: 16}
"""
TRACE = "\n".join(AZURE_ROWS)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with one good workload, profile and trace."""
    monkeypatch.chdir(tmp_path)
    Path("good.yaml").write_text(WORKLOAD)
    Path("profile.yaml").write_text(PROFILE)
    Path("good.csv").write_text(TRACE)
    Path("folder").mkdir()
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *args: object, code: int = 2) -> str:
    """What stderr says of a command that must be refused, without having left anything behind."""
    before = sorted(Path().rglob("*"))
    assert main([str(arg) for arg in args]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Traceback" not in shown.err
    lines = shown.err.splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: "))
    assert sorted(Path().rglob("*")) == before
    return shown.err


def run_args(workload: str = "good.yaml", *more: object, profile: str = "cpu-tiny") -> list[str]:
    """`run WORKLOAD --profile PROFILE ...`."""
    return ["run", workload, "--profile", profile, *map(str, more)]


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["run", "fork-bach"], ["workload 'fork-bach'", "'fork-batch' (the nearest of"]),
        (["compare", "fork-bach"], ["workload 'fork-bach'", "'fork-batch' (the nearest of"]),
        (["run", "nope.yaml"], ["workload nope.yaml", "no such file"]),
        (["run", "folder"], ["workload 'folder'", "expected one of"]),
        (["run", "folder/"], ["workload folder/", "no such file"]),
        (run_args(profile="cpu-tny"), ["profile 'cpu-tny'", "'cpu-tiny' (the nearest of"]),
        (run_args(profile="nope.yaml"), ["profile nope.yaml", "no such file"]),
        (run_args("good.yaml", "--release", "polld"), ["release", "'polld'", "'polled' (the"]),
        (run_args("good.yaml", "--free-order", "revers"), ["free_order", "'revers'", "'reverse'"]),
        (run_args("good.yaml", "--device", "cud"), ["device", "'cud'", "'cuda' (the nearest"]),
        (run_args("good.yaml", "--delay", "copi=2ms"), ["delay", "'copi'", "copy, compute, load"]),
        (run_args("good.yaml", "--delay", "copy=2"), ["delay", "'copy=2'", "as copy=2ms"]),
        (run_args("good.yaml", "-s", "delay=copy=2ms"), ["setting delay", "expected --delay"]),
        (run_args("good.yaml", "-s", "blok_size=4"), ["setting blok_size", "'block_size' (the"]),
        (run_args("good.yaml", "-s", "fence=blok"), ["setting fence", "'blok'", "'block' (the"]),
        (run_args("good.yaml", "--format", "xls"), ["--format", "'xls'", "'text', 'md'"]),
        (["check", "power", "--profile", "tiny"], ["profile 'tiny'", "'cpu-tiny'"]),
        (["check", "powr"], ["'powr'", "'power'"]),
        (["lab", "blcks"], ["'blcks'", "'blocks'"]),
        (["comprae", "fork-batch"], ["'comprae'", "'compare' (the nearest"]),
        (["list", "workload"], ["'workload'", "'workloads' (the nearest"]),
        (run_args("good.yaml", "--releese", "step"), ["--releese", "--release"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_unknown_names(
    args: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The name is quoted, with the nearest valid one or all of them."""
    error = refused(capsys, *args)
    for part in parts:
        assert part in error


@pytest.mark.parametrize(
    ("axes", "parts"),
    [
        (["-a", "relese=early"], ["axis relese", "'release' (the nearest"]),
        (["-a", "release=polld"], ["axis release", "'polld'", "'polled' (the nearest"]),
        (["--release", "deferred,polld"], ["axis release", "'polld'", "'polled' (the nearest"]),
        (["-a", "release="], ["axis release", "empty value (got '')"]),
        (["-a", "release=early,"], ["axis release", "empty value (got 'early,')"]),
        (["-a", "release=early,early"], ["axis release", "early is given twice"]),
        (["-a", "release"], ["axis 'release'", "NAME=VALUE"]),
        (["-a", "="], ["axis ''", "unknown name"]),
        (["--release", "polled", "-a", "release=step"], ["axis release", "given twice"]),
        (["-a", "block_size=8", "-s", "block_size=16"], ["axis block_size", "set by a flag"]),
        (["-a", "seed=1,2"], ["axis seed", "--seed"]),
        (["-a", "block_size=8,0"], ["axis block_size", "got 0", "at least 1"]),
        (["-a", "block_size=8,1e3"], ["axis block_size", "'1e3'", "a whole number"]),
        (["-a", "block_size=8,off"], ["axis block_size", "'off'", "a whole number"]),
        (["-a", "block_size=8,017"], ["axis block_size", "'017'", "a whole number"]),
        (["-a", "delay=none,copi=2ms"], ["axis delay", "'copi'", "copy, compute, load"]),
        (["-a", "device=cpu,gpu"], ["axis device", "'gpu'", "'cpu' (the nearest"]),
        (
            ["-a", "max_num_batched_tokens=256,8"],
            ["max_num_batched_tokens", "got 8", "at least max_num_seqs (64)"],
        ),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("-") else None,
)
def test_bad_axes(axes: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The axis and its value are named, before a cell is made."""
    error = refused(capsys, "compare", "good.yaml", "--profile", "cpu-tiny", *axes)
    for part in parts:
        assert part in error


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "parts"),
    [
        ("1e-3", ["got '1e-3'", "a whole number"]),
        ("1e3", ["got '1e3'", "write 1000"]),
        ("off", ["got off", "write false"]),
        ("017", ["got 017", "write 17"]),
        ("'2'", ["got '2'", "a whole number"]),
        ("2.5", ["got 2.5", "a whole number"]),
        ("true", ["got true", "a whole number"]),
        ("[1]", ["got [1]", "a whole number"]),
        ("", ["no value"]),
        (".inf", ["got .inf"]),
        ("-4", ["got -4", "at least 1"]),
        ("0", ["got 0", "at least 1"]),
        ("99999999999999999999", ["got 99999999999999999999", "at most 1000000"]),
    ],
)
def test_values_of_a_workload(
    written: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """File, line, key and value are named, and what would be right."""
    Path("bad.yaml").write_text(WORKLOAD.replace("count: 2", f"count: {written}"))
    error = refused(capsys, *run_args("bad.yaml"))
    for part in ["bad.yaml:3: requests[0].count: ", *parts]:
        assert part in error
    assert "bad.yaml:3: requests[0].count: " in refused(capsys, "validate", "bad.yaml")


@pytest.mark.parametrize(
    ("before", "after", "parts"),
    [
        (
            "prompt_tokens: 8",
            "promt_tokens: 8",
            [":4: requests[0].promt_tokens", "'prompt_tokens'"],
        ),
        ("description: d", "descripton: d", [":1: descripton", "'description'"]),
        ("requests:", "request:", [":2: request", "'requests'"]),
        (
            "    output_tokens: 4",
            "    output_tokens: 4\n    fork: {children: 2, output_tokens: 3, keep_parnt: true}",
            [":6: requests[0].fork.keep_parnt", "'keep_parent'"],
        ),
        ("prompt_tokens: 8", "prompt_tokens: {unifrm: [1, 2]}", ["unifrm", "'uniform'"]),
        ("prompt_tokens: 8", "prompt_tokens: {uniform: [9, 2]}", ["runs backwards", "[9, 2]"]),
        ("prompt_tokens: 8", "prompt_tokens: -8", [":4: requests[0].prompt_tokens", "got -8"]),
        ("count: 2", "count: 2\n    count: 3", [":4: requests[0].count", "written twice"]),
        ("count: 2", "count: 2\n\tx: 3", [":4: ", "indent with spaces"]),
        ("description: d", "description: d\nengine: {release: defered}", ["'deferred'"]),
        ("description: d", "description: d\nengine: {num_blocks: 1}", ["got 1", "at least 2"]),
    ],
)
def test_keys_of_a_workload(
    before: str, after: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown key, nested or not, is named with the nearest one, not what it leaves missing."""
    Path("bad.yaml").write_text(WORKLOAD.replace(before, after))
    error = refused(capsys, *run_args("bad.yaml"))
    for part in ["bad.yaml:", *parts]:
        assert part in error


@pytest.mark.parametrize(
    ("before", "after", "parts"),
    [
        ("head_dim: 8", "head_dims: 8", [":7: model.head_dims", "'head_dim'"]),
        ("head_dim: 8", "head_dim: 7", [":", "got 7", "an even number"]),
        ("engine:", "engin:", ["engin", "'engine'"]),
        ("num_blocks: 9", "num_bloks: 9", ["engine.num_bloks", "'num_blocks'"]),
        ("num_blocks: 9", "num_blocks: 1e3", ["engine.num_blocks", "got '1e3'", "write 1000"]),
        ("description: d", "description: d\ndevice: gpu", ["device", "got 'gpu'", "'cpu'"]),
        ("engine:", "verify: {logprob_tolerance: 1e-3}\nengine:", ["'1e-3'", "write 1.0e-3"]),
        ("engine:", "verify: {logprob_tolerance: 0.0}\nengine:", ["got 0.0", "more than 0"]),
    ],
)
def test_keys_and_values_of_a_profile(
    before: str, after: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A profile is as strict as a workload."""
    Path("bad.yaml").write_text(PROFILE.replace(before, after))
    error = refused(capsys, *run_args(profile="./bad.yaml"))
    for part in ["bad.yaml:", *parts]:
        assert part in error


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["-r", 0], ["'--rounds'", "'0' is neither"]),
        (["-r", "x"], ["'--rounds'", "'x'"]),
        (["--seed", -1], ["'--seed'", "-1 is not"]),
        (["--seed", 2**63], ["seed", str(2**63)]),
        (["--limit", 0], ["'--limit'", "0 is not"]),
        (["--limit", 3], ["--limit", "good replays no trace"]),
        (["--speed", 2], ["--speed", "good replays no trace"]),
        (["--trace-file", "good.csv"], ["--trace-file", "good replays no trace"]),
        (["--scale-lengths", 0], ["scale_lengths", "got 0.0", "more than 0"]),
        (["--scale-lengths", -1], ["scale_lengths", "got -1.0", "more than 0"]),
        (["--scale-lengths", "nan"], ["scale_lengths", "got NaN", "a finite number"]),
        (["--scale-lengths", "inf"], ["scale_lengths", "a finite number"]),
        (["--scale-lengths", "x"], ["--scale-lengths", "'x'"]),
        (["-s", "num_blocks=1"], ["setting num_blocks", "got 1", "at least 2"]),
        (["-s", "num_blocks=99999999999"], ["setting num_blocks", "less than 2147483648"]),
        (["-s", "block_size=0"], ["setting block_size", "got 0", "at least 1"]),
        (["-s", "block_size=-16"], ["setting block_size", "got -16", "at least 1"]),
        (["-s", "block_size=1e3"], ["setting block_size", "'1e3'", "a whole number"]),
        (["-s", "block_size=off"], ["setting block_size", "'off'", "a whole number"]),
        (["-s", "block_size=017"], ["setting block_size", "'017'", "a whole number"]),
        (["-s", "block_size"], ["setting 'block_size'", "NAME=VALUE"]),
        (["-s", "block_size=8,16"], ["setting block_size", "got 8,16", "compare"]),
        (["-s", "device=cpu"], ["setting device", "--device"]),
        (["-s", "seed=3"], ["setting seed", "--seed"]),
        (["--release", "early,step"], ["setting release", "got early,step", "compare"]),
        (["--release", ""], ["setting release", "empty value"]),
        (["--release", "step", "-s", "release=polled"], ["setting release", "given twice"]),
        (["-s", "max_num_batched_tokens=16"], ["max_num_batched_tokens", "max_num_seqs (64)"]),
        (["-s", "block_size=2000000000"], ["out of memory for 257 blocks of 2000000000"]),
        (["-o", "good.csv"], ["good.csv", "not a folder"]),
        (["-o", "good.csv/out"], ["good.csv/out", "Not a directory"]),
        (["-o", "/proc/none"], ["/proc/none", "No such file or directory"]),
    ],
    ids=lambda value: " ".join(map(str, value)) if str(value[0]).startswith("-") else None,
)
def test_bad_flags(
    more: list[object], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The flag or setting is named as it was typed, with its value."""
    error = refused(capsys, *run_args("good.yaml", *more))
    for part in parts:
        assert part in error


def test_cuda_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """A device that is not there is refused at the start, by flag, axis, profile or `check`."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    for args in (
        run_args("good.yaml", "--device", "cuda"),
        run_args("good.yaml", profile="h200"),
        ["compare", "good.yaml", "--profile", "cpu-tiny", "-a", "device=cpu,cuda"],
        ["check", "power", "--profile", "cpu-tiny", "--device", "cuda"],
    ):
        assert "no CUDA device" in refused(capsys, *args)


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "bad.yaml: empty file"),
        (b"\n  \n", "bad.yaml: empty file"),
        (b"description: d\nx: caf\xe9\n", "bad.yaml:2: not UTF-8 (got byte 0xe9)"),
        (b"- a\n- b\n", "bad.yaml:1: top level is not a mapping (got a list)"),
        (b"description: [\n", "bad.yaml:2: "),
        (b"description: d\n", "bad.yaml:1: no form given; expected one of requests, trace"),
    ],
)
def test_files_that_are_no_workload(
    content: bytes, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Empty, not UTF-8, not a mapping, not YAML: the file and, where there is one, the line."""
    Path("bad.yaml").write_bytes(content)
    assert part in refused(capsys, *run_args("bad.yaml"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_files_without_permission(capsys: pytest.CaptureFixture[str]) -> None:
    """A file that may not be read and a folder that may not be written are named."""
    Path("good.yaml").chmod(0)
    assert "good.yaml: cannot be read (Permission" in refused(capsys, *run_args("./good.yaml"))
    Path("good.yaml").chmod(0o600)
    Path("folder").chmod(0o500)
    assert "folder/out" in refused(capsys, *run_args("good.yaml", "-o", "folder/out"))


def test_a_folder_is_not_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """`validate` and `--trace-file` say that a folder cannot be read."""
    assert "folder: cannot be read (Is a dir" in refused(capsys, "validate", "folder")
    error = refused(capsys, *run_args("azure-code", "--trace-file", "folder"))
    assert "folder: cannot be read (Is a directory)" in error


# -- traces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (TRACE.replace("396", "x"), "bad.csv:3: ContextTokens: not a token count (got 'x')"),
        (TRACE.replace(",109", ",0"), "bad.csv:3: GeneratedTokens: not a token count (got '0')"),
        (TRACE.replace(",55", ""), "bad.csv:4: row: 2 fields"),
        (TRACE.replace("17:04.07", "17:03.07"), "bad.csv:4: TIMESTAMP: out of order"),
        (TRACE.replace("11-16 18:17:04.03", "13-16 18:17:04.03"), "bad.csv:3: TIMESTAMP: not a"),
        (TRACE.replace("GeneratedTokens", "Tokens"), "bad.csv:1: GeneratedTokens: no such column"),
        ("", "bad.csv: empty file"),
        (AZURE_ROWS[0], "bad.csv: no rows below the header"),
        (TRACE.replace("396", "39\xe9"), "bad.csv:3: not UTF-8 (got byte 0xe9)"),
    ],
)
def test_bad_rows_of_a_trace(content: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """File, line, column and value of the first bad row."""
    Path("bad.csv").write_bytes(content.encode("latin-1"))
    assert part in refused(capsys, *run_args("azure-code", "--trace-file", "bad.csv"))


def test_other_trouble_with_traces(capsys: pytest.CaptureFixture[str]) -> None:
    """No trace, no such file, the wrong format, a speed of nothing."""
    assert "--trace-file PATH" in refused(capsys, *run_args("azure-code"))
    error = refused(capsys, *run_args("azure-code", "--trace-file", "nope.csv"))
    assert "nope.csv: cannot be read (No such file" in error
    error = refused(capsys, *run_args("mooncake", "--trace-file", "good.csv"))
    assert "good.csv:1: row: not JSON" in error
    error = refused(capsys, *run_args("azure-code", "--trace-file", "good.csv", "--speed", 0))
    assert "speed: out of range (got 0.0)" in error


def test_line_ends_and_long_fractions_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    """CRLF, no newline at the end and 7-digit fractions are as good as any: the same table."""
    Path("crlf.csv").write_bytes(TRACE.replace("\n", "\r\n").encode())
    Path("lf.csv").write_text(TRACE + "\n")
    for name in ("crlf.csv", "lf.csv"):
        more = ("--trace-file", name, "--scale-lengths", 0.05, "-o", f"out-{name}")
        assert main(run_args("azure-code", *more)) == 0
    assert "WRONG" not in capsys.readouterr().out


# -- results ---------------------------------------------------------------------------------------


@pytest.fixture
def results(here: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The samples of a small run, in `out`."""
    assert main(run_args("good.yaml", "-o", "out")) == 0
    capsys.readouterr()
    return Path("out") / "samples.jsonl"


def test_results_are_never_overwritten(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that has results is refused, and its file stays as it was."""
    before = results.read_bytes()
    error = refused(capsys, *run_args("good.yaml", "-o", "out"))
    assert "out/samples.jsonl: results exist already" in error
    assert results.read_bytes() == before


def test_a_file_cut_off_mid_line_is_read_up_to_there(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a killed run left is a table with a note; the half line is left out."""
    whole = results.read_bytes()
    last_round = whole.rindex(b'{"kind": "round"')
    end = whole.index(b"\n", last_round) + 20
    results.write_bytes(whole[:end])
    assert main(["export", "out"]) == 0
    shown = capsys.readouterr()
    assert "TRUNCATED" in shown.out
    assert "0 WRONG" not in shown.out
    results.write_bytes(whole[: last_round + 40])  # the measured round itself is lost
    assert main(["export", "out"]) == 0
    assert "TRUNCATED" in capsys.readouterr().out


def test_what_is_no_results_folder(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`export` names a folder without samples, a missing one, another file, a broken line."""
    assert "folder: no samples.jsonl in it" in refused(capsys, "export", "folder")
    assert "nope: no such results folder" in refused(capsys, "export", "nope")
    assert "good.csv:1: not a line of JSON" in refused(capsys, "export", "good.csv")
    shutil.copytree("out", "broken")
    lines = results.read_bytes().split(b"\n")
    Path("broken/samples.jsonl").write_bytes(b"\n".join([*lines[:2], b"{", *lines[2:]]))
    assert "samples.jsonl:3: not a line of JSON" in refused(capsys, "export", "broken")


# -- processes -------------------------------------------------------------------------------------


def test_a_closed_stdout_ends_a_run_quietly(here: Path) -> None:
    """If nobody reads the table, the samples are kept and only progress is on stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            cli_command(*run_args("good.yaml", "-o", "out")),
            cwd=here,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert done.returncode == 141
    first, *rounds = done.stderr.splitlines()
    assert first.startswith("good: 1 cell")
    assert [line.split()[:2] for line in rounds] == [["[0/1]", "warm-up"], ["[1/1]", "round"]]
    assert run_cli("export", "out", cwd=here).stdout.startswith("good on cpu-tiny")


def test_ctrl_c_before_anything_is_measured_leaves_nothing(here: Path) -> None:
    """SIGINT while torch is being loaded is one line, exit code 130, and no results folder."""
    fifo = here / "slow.csv"  # a trace nobody writes to: the run waits for it as long as it takes
    os.mkfifo(fifo)
    command = cli_command(*run_args("azure-code", "--trace-file", "slow.csv"))
    process = subprocess.Popen(command, cwd=here, stderr=subprocess.PIPE, text=True)
    try:
        descriptor = os.open(fifo, os.O_WRONLY)  # returns once the run has opened it to read
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        os.close(descriptor)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (130, "error: interrupted\n")
    assert not (here / "results").exists()


def test_a_folder_with_something_in_it_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run begins in a folder of its own; nothing is written beside other files."""
    folder = here / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert "-o mine: the folder is not empty" in refused(
        capsys, *run_args("good.yaml", "-o", "mine")
    )
    assert [file.name for file in folder.iterdir()] == ["notes.txt"]


def test_an_empty_folder_name_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unset variable in a script must not fill the working directory."""
    before = sorted(here.iterdir())
    assert "the name is empty" in refused(capsys, *run_args("good.yaml", "-o", ""))
    assert sorted(here.iterdir()) == before


def test_a_temperature_too_small_to_divide_by_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy is 0; 1e-39 would make infinities of the logits."""
    good = (here / "good.yaml").read_text()
    lines = good.splitlines()
    at = next(i for i, line in enumerate(lines) if "output_tokens" in line)
    indent = len(lines[at].replace("- ", "  ")) - len(lines[at].replace("- ", "  ").lstrip())
    lines.insert(at + 1, " " * indent + "temperature: 1.0e-39")
    (here / "cold.yaml").write_text("\n".join(lines))
    assert "expected 0 (greedy) or at least 0.001" in refused(capsys, *run_args("cold.yaml"))
