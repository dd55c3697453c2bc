"""What the documents say can be typed: commands and examples run, links lead somewhere."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import pytest

from bench.catalog import find_profile, find_workload
from bench.commands import cli, main
from bench.commands.frame import PROGRAM
from bench.commands.host_only import DEFAULTS, parse_setups
from bench.commands.validate import _kind_of
from bench.history import INDEX_FILE, History
from bench.spec import load_profile, load_workload, parse_axes
from bench.yaml_source import parse
from deepinfer.errors import UserError
from tests.bench.tiny import AZURE_ROWS, MOONCAKE_ROWS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = (PROGRAM, "make", "python")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(page: Path, language: str) -> Iterator[str]:
    """The fenced blocks of a language."""
    for found in FENCE.finditer(page.read_text(encoding="utf-8")):
        if found[1] == language:
            yield found[2]


def commands_of(text: str) -> Iterator[list[str]]:
    """Words of every command line, fenced or indented, of one of `PROGRAMS`.

    A prompt, a comment, a pipe, a redirection and an `eval "$(...)"` around it are left out.
    """
    fenced = [line for found in FENCE.finditer(text) for line in found[2].split("\n")]
    plain = FENCE.sub("", text).split("\n")
    for line in [*fenced, *(line[4:] for line in plain if line.startswith("    "))]:
        bare = line.strip().removeprefix("$ ")
        if inner := re.match(r'eval "\$\((.*)\)"', bare):
            bare = inner[1]
        if bare.split(" ")[0] not in PROGRAMS:
            continue
        yield shlex.split(re.split(r"\s[|>]\s", bare)[0], comments=True)


COMMANDS = [
    pytest.param(words, id=f"{page.name}: {' '.join(words)}")
    for page in PAGES
    for words in commands_of(page.read_text(encoding="utf-8"))
]
PYTHON = [page for page in PAGES if any(blocks(page, "python"))]
YAML = [
    pytest.param(text, id=f"{page.name}-{number}")
    for page in PAGES
    for number, text in enumerate(blocks(page, "yaml"))
    if "description:" in text
]


def parsed(words: list[str]) -> click.Context:
    """The context of the command that would be called; raises what click raises."""
    command: click.Command | None = cli
    name, args, ctx = PROGRAM, words, None
    while command is not None:
        ctx = command.make_context(name, args, parent=ctx)
        if not isinstance(command, click.Group):
            return ctx
        found, command, args = command.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
        name = found or ""
    raise AssertionError(f"no command in {words}")


def check_names(params: dict[str, Any]) -> None:
    """Workload, profile, axes and settings of a command line exist."""
    if "workload" in params:
        find_workload(params["workload"])
    if params.get("profile"):
        find_profile(params["profile"])
    if params.get("host_only"):
        parse_setups(**{key: params[key] for key in ("free_order", *DEFAULTS)})
        return
    shorthands = [f"{key}={params[key]}" for key in ("release", "free_order") if params.get(key)]
    parse_axes([*params.get("axes", ()), *params.get("settings", ()), *shorthands])


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_line_can_be_typed(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands, options, values and names exist, as they stand; nothing is run."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(MINE)
    program, *args = words
    if program == PROGRAM:
        with contextlib.suppress(click.exceptions.Exit):  # --help, --version
            check_names(parsed(args).params)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        assert set(args) <= set(targets)
    else:
        script = (ROOT / args[0]).read_text(encoding="utf-8")
        if args[0] == "cli.py":
            check_names(parsed(args[1:]).params)
        else:
            assert all(f'"{arg}"' in script for arg in args if arg.startswith("--"))


NOT_RUN = {
    "make": "sets up an environment, or runs what the other tests run",
    "python": "needs vllm and minutes",
}
TINY = ("--profile", "cpu-tiny", "--scale-lengths", "0.05")
CHEAPER = {
    "run": (*TINY, "-r", "1"),
    "compare": (*TINY, "-r", "1"),
    "profile step": (*TINY, "-r", "1"),
    "profile memory": TINY,
    "profile trace": TINY,
    "profile host": ("--quick",),
    "profile events": ("--quick",),
    "check faults": ("--fault", "double-release", "--seeds", "1"),
    "check explore": (
        *("--scenario", "save-at-finish", "--limit", "50", "--seconds", "4", "--jobs", "1"),
    ),
}
INSTEAD = {
    "/data/results": "results",
    "mixed-chat": "mine.yaml",  # its requests arrive in real time
}
MINE = "description: mine\nrequests:\n  - {count: 2, prompt_tokens: 20, output_tokens: 4}\n"
RUNNABLE = [param for param in COMMANDS if param.values[0][0] not in NOT_RUN]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result of four cells and one round."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    axes = ("--release", "deferred,polled", "--free-order", "reverse,forward")
    assert main(["compare", "fork-batch", *axes, *TINY, "-r", "1", "-o", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("words", RUNNABLE)
def test_every_command_runs(
    words: list[str], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exit code 0, in a folder that has what the page speaks of, on a small model."""
    monkeypatch.chdir(tmp_path)
    for name in ("fork-batch", "RUN", "main", "branch"):
        shutil.copytree(saved, tmp_path / "results" / name)
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "AzureLLMInferenceTrace_code.csv").write_text("\n".join(AZURE_ROWS) + "\n")
    for name in ("conversation", "synthetic"):
        (tmp_path / f"{name}_trace.jsonl").write_text("\n".join(MOONCAKE_ROWS) + "\n")
    args = [INSTEAD.get(word, word) for word in words[1:]]
    if "plots.png" in args:
        pytest.importorskip("matplotlib")
    for name, options in CHEAPER.items():
        if " ".join(args).startswith(name) and "--host-only" not in args:
            args += options
    if "--max-time" in args:  # belongs to `-r auto`, which would take seven rounds
        del args[args.index("--max-time") : args.index("--max-time") + 2]
    if "--operations" in args:  # on engines of its own
        del args[args.index("--scenario") : args.index("--scenario") + 2]
    if "replay" in args:
        assert main(["run", "mine.yaml", "--profile", "cpu-tiny", "--record", "ops.jsonl"]) == 0
    if "--resume" in args:
        assert main([word for word in args if word != "--resume"]) == 0
    assert main(args) == 0


@pytest.mark.parametrize(
    "line",
    [
        "deepinfer-bench compar fork-batch",
        "deepinfer-bench compare fork-batch --relase step",
        "deepinfer-bench compare fork-batch --release stepp",
        "deepinfer-bench compare fork-bach",
        "deepinfer-bench profile hosts",
        "deepinfer-bench export",
    ],
)
def test_a_wrong_line_would_be_noticed(line: str) -> None:
    """Commands, options, values, names and missing arguments are all looked at."""
    with pytest.raises((click.ClickException, UserError)):
        check_names(parsed(shlex.split(line)[1:]).params)


def test_lines_are_found_in_every_form() -> None:
    """Indented, fenced, with a prompt, a comment, a pipe, a redirection, within `eval`."""
    text = """\
Text about deepinfer-bench run x.

    deepinfer-bench run a      # comment
    eval "$(deepinfer-bench completion bash)"   # in ~/.bashrc

```console
$ deepinfer-bench run b > file
deepinfer-bench run c | less
something else
```
"""
    found = sorted(" ".join(words) for words in commands_of(text))
    runs = [f"deepinfer-bench run {name}" for name in "abc"]
    assert found == ["deepinfer-bench completion bash", *runs]


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.name)
def test_every_python_example_runs(page: Path, tmp_path: Path) -> None:
    """A page's blocks, one after another in a fresh interpreter, print what its text blocks say."""
    code = "\n".join(blocks(page, "python"))
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    shown = "".join(blocks(page, "text"))
    assert not shown or done.stdout == shown


@pytest.mark.parametrize("text", YAML)
def test_every_yaml_example_is_valid(text: str, tmp_path: Path) -> None:
    """A workload or a profile that `validate` accepts."""
    path = tmp_path / "example.yaml"
    path.write_text(text, encoding="utf-8")
    if _kind_of(path, parse(path).data) == "workload":
        load_workload(path)
    else:
        load_profile(path)


def test_the_index_can_be_asked_as_documented(tmp_path: Path) -> None:
    """The SQL of docs/history.md fits the tables of the index."""
    with History(tmp_path):
        pass
    queries = list(blocks(ROOT / "docs" / "history.md", "sql"))
    assert queries
    with closing(sqlite3.connect(tmp_path / INDEX_FILE)) as db:
        for query in queries:
            assert db.execute(query).fetchall() == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Relative ones, to a file of the checkout."""
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    missing = [
        target for target in targets if "://" not in target and not (page.parent / target).exists()
    ]
    assert missing == []
