"""What every `profile` subcommand shares: its format option, its progress, the way to stdout.

Knows the terminal. Invariant: progress goes to stderr, and only to a terminal; figures to stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from bench.commands.sheet import FORMATS, Sheet, render_sheet

format_option = click.option(
    "--format",
    "format_name",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="How to write the figures.",
)


def show_progress(name: str) -> None:
    """What is being measured, on a line of its own that the next one overwrites."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[Kmeasuring {name}", nl=False, err=True)


def clear_progress() -> None:
    """Take the last progress line away."""
    if sys.stderr.isatty():
        click.echo("\r\033[K", nl=False, err=True)


def print_sheet(make_sheet: Callable[[Any], Sheet], profile: Any, format_name: str) -> None:
    """The figures of a profile on stdout, in one of `FORMATS`."""
    clear_progress()
    click.echo(render_sheet(make_sheet(profile), format_name), nl=False)
