"""What a shell is told when Tab is pressed, by click's own protocol."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.catalog import list_workloads
from bench.commands import COMMANDS, main
from bench.commands.frame import COMPLETE
from deepinfer.names import FREE_ORDERS, KEYED_FREE_ORDERS, RELEASE_POLICIES
from tests.bench.tiny import ROOT

WORKLOADS = [name for name, _ in list_workloads()]


def ask(*words: str, shell: str = "bash", monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask as the shell does, the last word being unfinished; the answer is on stdout."""
    monkeypatch.setenv(COMPLETE, f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(["deepinfer-bench", *words]))
    monkeypatch.setenv("COMP_CWORD", words[-1] if shell == "fish" else str(len(words)))
    assert main([]) == 0


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The endings bash is offered for a line."""

    def complete(*words: str) -> list[str]:
        ask(*words, monkeypatch=monkeypatch)
        return [line.partition(",")[2] for line in capsys.readouterr().out.splitlines() if line]

    return complete


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, and by the variable as click documents it: the same text."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"{COMPLETE}={shell}_complete" in script
    assert "deepinfer-bench" in script
    monkeypatch.setenv(COMPLETE, f"{shell}_source")
    assert main([]) == 0
    assert capsys.readouterr().out == script


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_the_shell_can_read(shell: str) -> None:
    """Its own syntax check accepts it."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    command = [sys.executable, os.fspath(ROOT / "cli.py"), "completion", shell]
    script = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_commands_come_from_the_table(complete) -> None:
    """All of them, or those that begin so."""
    assert complete("") == list(COMMANDS)
    assert complete("comp") == ["compare", "completion"]
    assert "--debug" in complete("--")


@pytest.mark.parametrize("command", ["run", "compare", "history"])
def test_workloads_complete(complete, command: str) -> None:
    """By name; where no name fits, the shell looks for files."""
    assert complete(command, "") == WORKLOADS
    assert complete(command, "fork-") == ["fork-batch", "fork-prompt"]
    assert complete(command, "./mi") == ["./mi"]


def test_choices_complete(complete) -> None:
    """Release policies, free orders, profiles, devices, formats, and lists of them."""
    assert complete("run", "x", "--release", "") == list(RELEASE_POLICIES)
    every_order = [*FREE_ORDERS, *KEYED_FREE_ORDERS]
    assert complete("run", "x", "--free-order", "") == every_order
    assert complete("compare", "x", "--release", "step,po") == ["step,polled"]
    assert "step,step" not in complete("compare", "x", "--release", "step,")
    assert complete("run", "x", "--profile", "cpu-s") == ["cpu-small"]
    assert complete("env", "--geometry", "h200-") == ["h200-v41"]
    assert "cuda" in complete("run", "x", "--device", "")
    assert complete("diff", "a", "b", "--format", "m") == ["md"]


def test_axes_and_settings_complete(complete) -> None:
    """`NAME=`, then the values; `device` is an axis and no setting."""
    assert complete("compare", "x", "-a", "fr") == ["free_order="]
    assert complete("compare", "x", "-a", "free_order=forward,rev") == [
        "free_order=forward,reverse",
        "free_order=forward,reverse_unhashed_first",
        "free_order=forward,reverse_unhashed_head",
    ]
    assert "device=" in complete("compare", "x", "-a", "")
    assert "device=" not in complete("run", "x", "-s", "")
    assert complete("run", "x", "-s", "block_size=") == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_descriptions_reach_the_shells_that_show_them(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a policy stands what it does."""
    ask("run", "x", "--release", "earl", shell=shell, monkeypatch=monkeypatch)
    assert "at once, nothing waited for" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["comp", "compare fork-b", "compare x --release po"])
def test_an_answer_loads_nothing_heavy(words: str, tmp_path: Path) -> None:
    """It happens at each press of Tab: no torch, no numpy, no pydantic."""
    code = (
        "import sys; from bench.commands import main; code = main([]);"
        "heavy = {'torch', 'numpy', 'pydantic'} & sys.modules.keys();"
        "sys.exit(str(heavy) if heavy else code)"
    )
    environment = {
        **os.environ,
        COMPLETE: "bash_complete",
        "COMP_WORDS": f"deepinfer-bench {words}",
        "COMP_CWORD": str(len(words.split())),
        "PYTHONPATH": os.fspath(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
