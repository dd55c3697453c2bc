"""The command line's frame: help without imports, one exit code and one line for every end."""

import os
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from bench import commands
from bench.commands import COMMANDS, cli, main
from deepinfer.errors import OwnershipError, UserError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def failing(monkeypatch):
    """Make the command `list` raise what a test wants, whatever its arguments."""

    def failing(error):
        @click.command("list")
        def command() -> None:
            raise error

        monkeypatch.setattr(cli, "get_command", lambda ctx, name: command)

    return failing


def run_cli(*args, **options):
    command = [sys.executable, "cli.py", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


def test_help_lists_every_command_with_its_line(capsys):
    """Help shows the table's names and lines, and exits 0."""
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, (_, text) in COMMANDS.items():
        assert any(line.split() == [name, *text.split()] for line in out.splitlines())


@pytest.mark.parametrize(
    "args", [["--help"], ["list", "workloads"], ["list", "profiles"], ["list", "policies"]]
)
def test_looking_around_loads_no_heavy_module(args):
    """Help and listings import neither torch nor numpy nor pydantic, nor the other commands."""
    code = (
        "import sys; from bench.commands import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'numpy', 'pydantic', 'rich', 'bench.commands.run'} & sys.modules.keys();"
        "sys.exit(code or str(heavy) if code or heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("args", [["--help"], ["list", "workloads"]])
def test_looking_around_is_quick(args):
    """Help and listings end within 0.3 s; the best of three, since machines are shared."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        assert run_cli(*args).returncode == 0
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3


def test_commands_carry_the_help_that_the_table_promises():
    """Each module that is there has a command of its name, and its modules exist in one package."""
    assert all(module.startswith("bench.commands.") for module, _ in COMMANDS.values())
    for name in ("list", "validate"):
        command = cli.get_command(click.Context(cli), name)
        assert command.name == name
        assert command.help


def test_version(capsys):
    """`--version` prints the program's name and a version."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("deepinfer-bench ")


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["comprae"], "no command 'comprae'; expected 'compare' (the nearest of run, compare"),
        (["xyzzy"], "no command 'xyzzy'; expected one of run, compare"),
        (["--debugg"], "'--debugg'"),
        (["list"], "workloads|profiles|policies"),
        (["list", "profiles", "more"], "more"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(args, part, capsys):
    """What was typed wrong is named with the nearest right word; a hint shows where help is."""
    assert main(args) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert lines[0].startswith("error: ")
    assert part in lines[0]
    assert lines[1].startswith("hint: `deepinfer-bench")
    assert len(lines) == 2


def test_no_arguments_show_the_help(capsys):
    """The bare program explains itself on stderr and counts as a usage error."""
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage: deepinfer-bench" in captured.err


def test_user_errors_are_one_line_and_a_hint(failing, capsys):
    """Bad input ends with exit 2, even if its message came with line breaks."""
    failing(UserError("x.yaml:3: a:\n wrong", hint="try b"))
    assert main(["list"]) == 2
    assert capsys.readouterr().err == "error: x.yaml:3: a: wrong\nhint: try b\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OwnershipError("block 3 is free"), "error: OwnershipError: block 3 is free"),
        (ZeroDivisionError("by zero"), "error: ZeroDivisionError: by zero"),
        (KeyError(), "error: KeyError: no message"),
    ],
)
def test_other_errors_are_one_line_and_exit_1(failing, capsys, error, line):
    """Errors that are not the user's have their type in front, and no traceback."""
    failing(error)
    assert main(["list"]) == 1
    err = capsys.readouterr().err
    assert err.splitlines()[0] == line
    assert "Traceback" not in err


def test_debug_shows_the_traceback(failing, capsys):
    """With --debug the traceback comes before the one line."""
    failing(ZeroDivisionError("by zero"))
    assert main(["--debug", "list"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last)")
    assert "error: ZeroDivisionError: by zero" in err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_ctrl_c_exits_130(failing, capsys, error):
    """An interrupt is said in one line."""
    failing(error)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_exit_codes_of_commands_are_kept(failing):
    """A command that asks for an exit code, as for wrong answers, gets it."""
    failing(click.exceptions.Exit(1))
    assert main(["list"]) == 1


@pytest.mark.parametrize("args", [["list", "policies"], ["--help"]])
def test_a_closed_stdout_is_quiet(args):
    """If the reader has gone, nothing is printed on stderr, not even by the interpreter."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "cli.py", *args], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", [["list", "policies"], ["--help"], ["schema", "workload"]])
def test_a_full_disk_behind_stdout_is_one_line(args, unbuffered):
    """Nothing of the program is at fault, and the interpreter adds nothing at its exit."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "cli.py", *args],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "error: stdout: cannot be written: No space left on device\n"


def test_without_stdout_nothing_is_begun():
    """`>&-` is told in one line."""
    command = f"{sys.executable} cli.py list policies >&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: stdout is closed; there is nowhere to write the answer\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied", "a/b"), "error: a/b: Permission denied\n"),
        (OSError(24, "Too many open files"), "error: Too many open files\n"),
        (OSError("no code"), "error: no code\n"),
    ],
)
def test_the_systems_refusals_are_one_line(failing, capsys, error, said):
    """The file and the reason, and nothing about a fault of the program."""
    failing(error)
    assert main(["list"]) == 1
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate "
                "memory: you tried to allocate 99 bytes. Error code 12 (Cannot allocate memory)"
            ),
            "you tried to allocate 99 bytes",
        ),
        (RuntimeError("[x] . DefaultCPUAllocator: not enough memory: you tried"), "not enough"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "Tried to allocate 2 GiB"),
        (MemoryError(), "no message"),
    ],
)
def test_memory_that_runs_out_is_named(failing, capsys, error, said):
    """torch's and Python's ways to say it are one line and what may help."""
    failing(error)
    assert main(["list"]) == 1
    first, hint = capsys.readouterr().err.splitlines()
    assert first.startswith("error: out of memory: ")
    assert said in first
    assert hint.startswith("hint: a smaller pool")


@pytest.mark.parametrize(
    "command", [["cli.py"], ["-c", "from bench.commands import main; raise SystemExit(main())"]]
)
def test_ctrl_c_while_modules_are_loaded_exits_130(command, tmp_path):
    """An import that is interrupted ends `cli.py` and the console script without a traceback."""
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": os.fspath(tmp_path)}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_colours_only_where_wanted(monkeypatch, capsys):
    """A terminal gets colours unless NO_COLOR is set; anything else never does."""
    monkeypatch.setattr(click.utils, "should_strip_ansi", lambda stream, color: color is False)
    main(["xyzzy"])
    assert "\x1b[" in capsys.readouterr().err
    monkeypatch.setenv("NO_COLOR", "1")
    main(["xyzzy"])
    assert "\x1b[" not in capsys.readouterr().err
    assert "\x1b[" not in run_cli("xyzzy").stderr


def test_cli_py_is_the_console_script():
    """`python cli.py` runs the same main and hands on its exit code."""
    done = run_cli("xyzzy")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no command 'xyzzy'")
    assert commands.main is main
