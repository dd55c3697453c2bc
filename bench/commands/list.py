"""`list`: what there is to choose from, as aligned plain text.

Knows names and descriptions only. Invariant: loads neither torch nor numpy nor pydantic.
"""

from __future__ import annotations

from collections.abc import Iterable

import click

from bench.catalog import list_profiles, list_workloads
from bench.nearest import choices
from deepinfer.errors import UserError
from deepinfer.names import DESCRIPTIONS, TITLES, UNSAFE_POLICIES

_KINDS = ("workloads", "profiles", "policies")


@click.command("list")
@click.argument("what", metavar="workloads|profiles|policies")
def command(what: str) -> None:
    """List workloads, profiles or policies.

    Workloads and profiles come from the checkout or the installed package; a file of your own is
    given to `run` and `compare` by its path.
    """
    if what not in _KINDS:
        raise UserError(f"list: unknown name (got {what!r}); expected {choices(what, _KINDS)}")
    if what == "policies":
        _print_policies()
    else:
        _print_aligned(list_workloads() if what == "workloads" else list_profiles())


def _print_policies() -> None:
    for kind, names in DESCRIPTIONS.items():
        if kind == "device":
            continue
        click.echo(f"{kind} ({TITLES[kind].partition(': ')[2]})")
        marks = UNSAFE_POLICIES if kind == "release" else frozenset()
        _print_aligned(
            (f"  {name}", f"UNSAFE: {text}" if name in marks else text)
            for name, text in names.items()
        )
        click.echo()


def _print_aligned(rows: Iterable[tuple[str, str]]) -> None:
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        click.echo(f"{name:<{width}}  {text}")
