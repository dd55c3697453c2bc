"""The command line's frame: one group whose commands are loaded when they are called.

Knows each command's name, module and one line of help; nothing of what they do. Invariant: every
way to end has one exit code and at most two lines on stderr: 0 done, 1 failed or wrong answers, 2
bad input, 130 Ctrl-C, 141 the reader of stdout is gone. A traceback is shown only with `--debug`.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem, shell_complete

from bench.disk import NO_ROOM
from bench.nearest import choices
from deepinfer.errors import DeepInferError, UserError

PROGRAM = "deepinfer-bench"
COMPLETE = "_DEEPINFER_BENCH_COMPLETE"  # set by a shell that asks what may come next

# Name -> module with a click command `command`, and the line that `--help` shows: showing help must
# not import any of them.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("bench.commands.run", "Run a workload once and print its table."),
    "compare": ("bench.commands.compare", "Run a workload with every combination of choices."),
    "export": ("bench.commands.export", "Print the table of a finished run in another format."),
    "diff": ("bench.commands.diff", "Compare two saved results; an exit code for CI."),
    "history": ("bench.commands.history", "List saved results of a workload over time."),
    "replay": ("bench.commands.replay", "Replay a recorded run's blocks with other choices."),
    "profile": ("bench.commands.profile", "Measure single parts of the engine."),
    "lab": ("bench.commands.lab", "Run the book's labs."),
    "check": ("bench.commands.check", "Check that wrong answers are noticed."),
    "list": ("bench.commands.list", "List workloads, profiles or policies."),
    "validate": ("bench.commands.validate", "Check workload and profile files."),
    "env": ("bench.commands.env", "Print what a result records of this machine."),
    "schema": ("bench.commands.schema", "Print the JSON schema of workload or profile files."),
    "completion": ("bench.commands.completion", "Print the script for a shell's completion."),
}

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141
# How torch and numpy word it: their allocators raise RuntimeError and MemoryError.
OUT_OF_MEMORY = (
    "not enough memory",
    "can't allocate memory",
    "out of memory",
    "unable to allocate",
)


class LazyGroup(click.Group):
    """Imports a command's module when the command is called, and not for help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, its module imported now; None if there is no such name."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Help lines from `COMMANDS`."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands from `COMMANDS`, and the group's own options."""
        found = [
            CompletionItem(name, help=text)
            for name, (_, text) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with the nearest name for an unknown one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}; expected {choices(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from importlib import metadata

    try:
        version = metadata.version(PROGRAM)
    except metadata.PackageNotFoundError:
        version = "(a checkout, not installed)"
    click.echo(f"{PROGRAM} {version}")
    ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nStart with:\n  deepinfer-bench list workloads\n  deepinfer-bench run fork-batch",
)
@click.option("--debug", is_flag=True, help="Show a traceback where the program fails.")
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli(debug: bool) -> None:
    """Measure when KV blocks may be handed out again, in which order, and at what price."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; never raises.

    A command ends by returning (0), `ctx.exit(code)` or an exception.
    """
    if sys.stdout is None:  # closed by the caller, as with `>&-`
        _report("stdout is closed; there is nowhere to write the answer")
        return EXIT_FAILED
    if os.environ.get(COMPLETE):
        return answer_shell()
    args = list(sys.argv[1:] if argv is None else argv)
    color = False if os.environ.get("NO_COLOR") else None
    debug = False
    try:
        with cli.make_context(PROGRAM, args, color=color) as ctx:
            debug = bool(ctx.params["debug"])
            cli.invoke(ctx)
        sys.stdout.flush()  # a closed pipe must show here, not while the interpreter shuts down
    except click.exceptions.Exit as exit_request:
        return _flushed(exit_request.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _report("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError as error:
        return _stdout_failed(error)
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, OSError) and _is_of_stdout(error):
            return _stdout_failed(error)
        return _explain(error)
    return 0


def answer_shell() -> int:
    """Print what the shell asks for in `COMPLETE`: its script, or how its line may go on.

    click's protocol. Loads neither torch nor numpy: it happens at each press of Tab.
    """
    return shell_complete(cli, {}, PROGRAM, COMPLETE, os.environ[COMPLETE])


def _explain(error: Exception) -> int:
    """Report an error and return its exit code."""
    if isinstance(error, UserError):
        _report(str(error), error.hint)
        return EXIT_BAD_INPUT
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return EXIT_BAD_INPUT
    if isinstance(error, click.ClickException):
        help_of = (
            error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else ""
        )
        _report(error.format_message(), f"`{help_of} --help` shows the usage" if help_of else None)
        return EXIT_BAD_INPUT
    if isinstance(error, DeepInferError):
        _report(f"{type(error).__name__}: {error}")
        return EXIT_FAILED
    what = str(error) or "no message"
    if any(words in what.lower() for words in OUT_OF_MEMORY) or isinstance(error, MemoryError):
        # Before its message torch says where in its own source the check is.
        _report(
            f"out of memory: {what.rpartition('] . ')[2]}", "a smaller pool or model needs less"
        )
        return EXIT_FAILED
    if isinstance(error, OSError):
        named = f"{error.filename}: " if error.filename is not None else ""
        _report(f"{named}{error.strerror or what}")
        return EXIT_FAILED
    hint = f"this is a fault of the program; `{PROGRAM} --debug ...` shows where"
    _report(f"{type(error).__name__}: {what}", hint)
    return EXIT_FAILED


def _report(message: str, hint: str | None = None) -> None:
    """`error: ...` and perhaps `hint: ...` on stderr, one line each."""
    color = False if os.environ.get("NO_COLOR") else None
    for word, tint, text in (("error", "red", message), ("hint", "cyan", hint)):
        if text is not None:
            line = f"{click.style(f'{word}:', fg=tint, bold=True)} {' '.join(text.split())}"
            click.echo(line, err=True, color=color)


def _is_of_stdout(error: OSError) -> bool:
    """Whether stdout could not be written: files' writers word that themselves, and name the file.

    What stdout refused is still in its buffer, if it has one: flushing it fails again.
    """
    if error.filename is not None:
        return False
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return error.errno in NO_ROOM


def _flushed(exit_code: int) -> int:
    """Write out what is left of stdout; `exit_code`, or another if that cannot be done."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return _stdout_failed(error)
    return exit_code


def _stdout_failed(error: OSError) -> int:
    """Report it, unless the reader just left, and return the exit code."""
    _drop_stdout()
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    _report(f"stdout: cannot be written: {error.strerror or error}")
    return EXIT_FAILED


def _drop_stdout() -> None:
    """Point stdout at nothing, or the interpreter's own flush at exit would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
