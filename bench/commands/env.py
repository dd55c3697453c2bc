"""`env`: what a result would record about this machine, and what a profile's cache takes of it.

Knows the command line; `bench.collect.environment` and `bench.cache_geometry` find the facts.
Invariant: prints exactly what a run would store, or allocate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from bench.commands.completion import complete_profile
from deepinfer.errors import UserError


@click.command("env")
@click.option(
    "--format",
    "format_name",
    type=click.Choice(("text", "json")),
    default="text",
    show_default=True,
    help="How to write it.",
)
@click.option(
    "--geometry",
    "profile_name",
    metavar="PROFILE",
    help="The cache of this profile instead: bytes of a token, block and slot, and every row.",
    shell_complete=complete_profile,
)
@click.option(
    "--sizing",
    "sized_name",
    metavar="PROFILE",
    help="Instead, measure how many blocks there is memory for: runs the profile's largest steps.",
    shell_complete=complete_profile,
)
def command(format_name: str, profile_name: str | None, sized_name: str | None) -> None:
    """Print what a result records about this machine: hardware, versions, commit."""
    if profile_name is not None and sized_name is not None:
        raise UserError("--sizing: also --geometry is given; expected one of the two")
    if profile_name is not None:
        _print_geometry(profile_name, format_name)
        return
    if sized_name is not None:
        _print_sizing(sized_name, format_name)
        return
    from bench.collect.environment import collect_environment

    environment = collect_environment()
    if format_name == "json":
        click.echo(json.dumps(environment, indent=2, allow_nan=False))
        return
    reasons = environment.pop("reasons")
    for name, value in _flatten(environment):
        shown = f"- ({reasons.get(name, 'unknown')})" if value is None else value
        click.echo(f"{name:<24} {shown}")


def _print_geometry(profile_name: str, format_name: str) -> None:
    from bench.cache_geometry import cache_geometry
    from bench.catalog import find_profile
    from bench.commands.geometry import render_geometry
    from bench.spec import load_profile

    cache = cache_geometry(load_profile(find_profile(profile_name)))
    click.echo(render_geometry(cache, format_name), nl=False)


def _print_sizing(profile_name: str, format_name: str) -> None:
    from bench.catalog import find_profile
    from bench.commands.geometry import render_sizing
    from bench.probes.sizing import measure_sizing
    from bench.spec import PoolQuestion, engine_config, load_profile, model_config

    profile = load_profile(find_profile(profile_name))
    engine = engine_config(profile.engine)
    question = PoolQuestion(model_config(profile), engine, profile.device, profile.memory_bytes)
    click.echo(render_sizing(profile, measure_sizing(question), format_name), nl=False)


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and their values."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
