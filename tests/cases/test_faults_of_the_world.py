"""What the world does to a run: it is killed, its device fails or hangs, memory or disk run out.

Each time: one line that says what happened, an exit code, and a file that can be read and resumed.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.commands import main
from bench.samples import read_samples
from deepinfer.cache_engine import KVCache
from deepinfer.config import EngineConfig
from deepinfer.engine import LLMEngine
from deepinfer.errors import UserError
from tests.bench.tiny import ROOT, cli_command, run_cli
from tests.deepinfer.step_plans import TINY

WORKLOAD = """\
description: a parent and its children, and two who chat
requests:
  - count: 1
    prompt_tokens: 20
    output_tokens: 5
    fork: {children: 2, output_tokens: 6}
  - {count: 2, prompt_tokens: 12, output_tokens: 6}
"""
pytestmark = pytest.mark.timeout(120)  # nothing may hang


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a small workload."""
    monkeypatch.chdir(tmp_path)
    Path("work.yaml").write_text(WORKLOAD)
    return tmp_path


def compare(*more: object) -> list[str]:
    """`compare` of two cells, two rounds each, into `out`."""
    options = ["work.yaml", "--profile", "cpu-tiny", "--release", "deferred,step", "-r", "2"]
    return ["compare", *options, "-o", "out", *map(str, more)]


def measured() -> list[tuple[int, int]]:
    """(cell, round) of the rounds in the file that count."""
    return sorted((r.cell, r.round) for r in read_samples("out").rounds if not r.warmup)


ALL = [(0, 0), (0, 1), (1, 0), (1, 1)]


# -- killed ----------------------------------------------------------------------------------------


def test_a_run_killed_at_any_moment_is_readable_and_completed_by_resume() -> None:
    """A few of the kills of `benchmarks/kill.py`, which is to be run with many."""
    run = subprocess.run(
        [sys.executable, os.fspath(ROOT / "benchmarks" / "kill.py"), "--times", "3"],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].endswith(": 0 problems")


@pytest.mark.parametrize("left", [0, 1, 10, 500])
def test_a_run_killed_in_its_first_line_is_begun_again(
    left: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was measured, which `export` says; `--resume` begins in the same file."""
    assert main(compare()) == 0
    path = Path("out/samples.jsonl")
    path.write_bytes(path.read_bytes()[:left])
    capsys.readouterr()
    assert main(["export", "out"]) == 2
    assert "nothing was measured: the run was stopped before it began" in capsys.readouterr().err
    assert main(compare("--resume")) == 0
    assert measured() == ALL


def test_another_file_without_an_end_of_line_is_not_taken_for_a_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--resume` overwrites only what is left of a run record."""
    Path("notes.jsonl").write_text("my notes")
    assert main(compare("--resume", "-o", "notes.jsonl")) == 2
    assert "notes.jsonl:1: not a line of JSON" in capsys.readouterr().err
    assert Path("notes.jsonl").read_text() == "my notes"


# -- the device fails or hangs ---------------------------------------------------------------------


class Once:
    """`KVCache.copy_blocks`, but for one call once a round has been measured."""

    def __init__(self, instead: Callable[[], object]) -> None:
        self._plain, self._instead, self._done = KVCache.copy_blocks, instead, False

    def __call__(self, cache: KVCache, pairs: torch.Tensor) -> None:
        """As the plain one, after or instead of the fault."""
        if not self._done and b'"warmup": false' in Path("out/samples.jsonl").read_bytes():
            self._done = True
            self._instead()
        self._plain(cache, pairs)


def fail() -> None:
    """What an operation does that has an error in it."""
    raise ValueError("a planted fault")


def test_an_operation_that_raises_ends_its_cell_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other cell gets a new device and is measured; `--resume` runs what is missing."""
    once = Once(fail)
    monkeypatch.setattr(KVCache, "copy_blocks", lambda *args: once(*args))
    assert main(compare()) == 1
    err = capsys.readouterr().err
    assert "FAILED: DeviceError: operation 'copy_blocks step" in err
    assert (
        "on stream 'copy' failed: ValueError: a planted fault; the engine has stopped with" in err
    )
    (failure,) = read_samples("out").failures
    other = 1 - failure.cell
    assert [pair for pair in measured() if pair[0] == other] == [(other, 0), (other, 1)]
    assert main(compare("--resume")) == 0
    assert measured() == ALL


def test_a_step_that_hangs_ends_the_run_in_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names fence, blocks and requests; what was measured stays, `--resume` completes."""
    gate = threading.Event()
    once = Once(lambda: gate.wait(60))
    monkeypatch.setattr(KVCache, "copy_blocks", lambda *args: once(*args))
    try:
        assert main(compare("-s", "timeout_s=0.5")) == 1
    finally:
        gate.set()
    err = capsys.readouterr().err
    assert "FAILED: DeviceTimeoutError: " in err
    assert "after 0.5 s" in err
    assert "operation 'copy_blocks step" in err
    assert "stopped; what was measured is in out, --resume carries it on" in err
    samples = read_samples("out")
    (failure,) = samples.failures
    assert failure.reason.startswith("DeviceTimeoutError: ")
    assert samples.end is not None
    assert samples.end.status == "stopped"
    before = measured()
    assert 0 < len(before) < len(ALL)
    assert main(compare("-s", "timeout_s=0.5", "--resume")) == 0
    assert measured() == ALL


# -- no memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["num_blocks=2000000000", "block_size=2000000000"])
def test_a_pool_that_does_not_fit_is_one_line(
    setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """How many bytes it needs, how many there are, what would fit; no results folder is made."""
    assert main(compare("-s", setting)) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: out of memory for ")
    assert " bytes (" in error
    assert error.endswith("free on device 'cpu'")
    assert hint.startswith("hint: num_blocks can be ")
    assert not Path("out").exists()


def test_an_engine_refuses_a_pool_that_does_not_fit() -> None:
    """Without the command line too; no thread of its device is left behind."""
    before = threading.active_count()
    with pytest.raises(UserError, match=r"2147483647 blocks of 4096 tokens: \d+ bytes .* needed"):
        LLMEngine(TINY, EngineConfig(num_blocks=2**31 - 1, block_size=4096))
    assert threading.active_count() == before


def test_what_the_allocator_refuses_is_said_the_same_way() -> None:
    """The device had the memory when it was asked, and no more when it was needed."""
    with pytest.raises(UserError, match="out of memory for 1073741824 blocks of 4096 tokens"):
        KVCache(TINY, 2**30, 4096, torch.device("cpu"))


@pytest.mark.cuda
def test_a_pool_that_does_not_fit_on_the_gpu_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The GPU's free memory is named."""
    assert main(compare("--device", "cuda", "-s", "num_blocks=2000000000")) == 2
    assert "free on device 'cuda'" in capsys.readouterr().err


# -- no disk ---------------------------------------------------------------------------------------


def limit_files(num_bytes: int) -> None:
    """No file of this process may become longer, as on a disk with as much room left."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


@pytest.mark.parametrize("num_bytes", [0, 1000, 3000, 12000])
def test_a_full_disk_ends_the_run_and_keeps_what_was_measured(num_bytes: int, here: Path) -> None:
    """File and reason in one line; the file has whole lines only, and `--resume` completes it."""
    full = run_cli(*compare(), cwd=here, preexec_fn=lambda: limit_files(num_bytes))
    assert full.returncode == 2
    assert full.stdout == ""
    assert full.stderr.splitlines()[-2:] == [
        "error: out/samples.jsonl: cannot write: File too large",
        "hint: make room, then carry the run on with the same command and --resume",
    ]
    content = Path("out/samples.jsonl").read_bytes()
    assert len(content) <= num_bytes
    assert content.endswith(b"\n") or not content
    assert main(["export", "out"]) == (0 if content else 2)
    assert main(compare("--resume")) == 0
    assert measured() == ALL
    assert Path("out/samples.jsonl").read_bytes()[:100] == content[:100] or not content


def test_a_full_disk_leaves_the_old_export(here: Path) -> None:
    """The report is written whole or not at all, and no part of it stays."""
    assert main(compare()) == 0
    Path("table.html").write_text("old")
    export = ["export", "out", "--format", "html", "-o", "table.html"]
    full = run_cli(*export, cwd=here, preexec_fn=lambda: limit_files(1000))
    assert full.returncode == 2
    assert full.stderr.splitlines() == [
        "error: table.html: cannot write: File too large",
        "hint: make room, or name a file on another disk",
    ]
    assert Path("table.html").read_text() == "old"
    assert sorted(path.name for path in here.iterdir()) == ["out", "table.html", "work.yaml"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("command", [["export", "out"], compare("--resume")])
def test_a_full_disk_behind_stdout_is_one_line(command: list[str], here: Path) -> None:
    """The table cannot be printed; the results are not touched by that."""
    assert main(compare()) == 0
    before = Path("out/samples.jsonl").read_bytes()
    with open("/dev/full", "w") as full:
        run = subprocess.run(cli_command(*command), cwd=here, stdout=full, stderr=subprocess.PIPE)
    assert run.returncode == 1
    assert b"error: stdout: cannot be written: No space left on device" in run.stderr
    assert Path("out/samples.jsonl").read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_real_full_disk(here: Path) -> None:
    """As with a limit: on a file system of 16 KiB, then with room."""
    Path("disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", "disk"]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        full = run_cli(*compare("-o", "disk/out"), cwd=here)
        assert full.returncode == 2
        assert "disk/out/samples.jsonl: cannot write: No space left on device" in full.stderr
        assert read_samples("disk/out").cells
        subprocess.run(["mount", "-o", "remount,size=1m", "disk"], check=True)
        assert main(compare("-o", "disk/out", "--resume")) == 0
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["umount", "disk"], check=True)
