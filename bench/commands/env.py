"""`env`: what a result would record about this machine.

Knows the command line; `bench.collect.environment` finds the facts. Invariant: prints exactly what
a run would store.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click


@click.command("env")
@click.option(
    "--format",
    "format_name",
    type=click.Choice(("text", "json")),
    default="text",
    show_default=True,
    help="How to write it.",
)
def command(format_name: str) -> None:
    """Print what a result records about this machine: hardware, versions, commit."""
    from bench.collect.environment import collect_environment

    environment = collect_environment()
    if format_name == "json":
        click.echo(json.dumps(environment, indent=2, allow_nan=False))
        return
    reasons = environment.pop("reasons")
    for name, value in _flatten(environment):
        shown = f"- ({reasons.get(name, 'unknown')})" if value is None else value
        click.echo(f"{name:<24} {shown}")


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and their values."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
