"""`completion`: the script that makes a shell complete this program, and what it completes.

Knows the names there are; `bench.commands.frame` answers the shell. Invariant: answering a shell
loads neither torch nor numpy, for it happens at each press of Tab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem, get_completion_class

SHELLS = ("bash", "zsh", "fish")

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the script that makes SHELL complete commands, options and names.

    \b
      bash:  eval "$(deepinfer-bench completion bash)"          in ~/.bashrc
      zsh:   eval "$(deepinfer-bench completion zsh)"           in ~/.zshrc
      fish:  deepinfer-bench completion fish | source           in config.fish
    """
    from bench.commands.frame import COMPLETE, PROGRAM

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, PROGRAM, COMPLETE).source(), nl=False)


def complete_workload(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Names of workloads with their descriptions, then files."""
    from bench.catalog import list_workloads

    return _matching(list_workloads(), incomplete) or complete_file(ctx, param, incomplete)


def complete_profile(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Names of profiles with their descriptions, then files."""
    from bench.catalog import list_profiles

    return _matching(list_profiles(), incomplete) or complete_file(ctx, param, incomplete)


def complete_file(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Files, found by the shell."""
    return [CompletionItem(incomplete, type="file")]


def complete_names(kind: str, *, several: bool = False) -> Completer:
    """A completer for the names of a choice (`release`); `several` for lists with commas."""

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from deepinfer.names import names_of

        given, comma, last = incomplete.rpartition(",") if several else ("", "", incomplete)
        taken = given.split(",")
        return [
            CompletionItem(f"{given}{comma}{name}", help=text)
            for name, text in names_of(kind).items()
            if name.startswith(last) and name not in taken
        ]

    return complete


def complete_setting(several: bool) -> Completer:
    """A completer for `NAME=VALUE`, of an axis if `several` values are allowed."""

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from deepinfer.names import DESCRIPTIONS, TITLES

        name, equals, value = incomplete.partition("=")
        if not equals:
            return [
                CompletionItem(f"{kind}=", help=TITLES[kind])
                for kind in DESCRIPTIONS
                if kind.startswith(name) and (several or kind != "device")
            ]
        if name not in DESCRIPTIONS:
            return []
        found = complete_names(name, several=several)(ctx, param, value)
        return [CompletionItem(f"{name}={item.value}", help=item.help) for item in found]

    return complete


def _matching(rows: Iterable[tuple[str, str]], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name, help=text) for name, text in rows if name.startswith(incomplete)]
