"""The option `--check`: which checkers watch an engine while it runs.

Knows the command line's words for `EngineConfig.checks`. Invariant: the value of the option is one
that `checks` may have.
"""

from __future__ import annotations

from typing import Any

import click

from bench.commands.completion import complete_names
from bench.commands.inputs import Decorator
from bench.nearest import choices
from deepinfer.names import CHECKS

ALL, OFF = "all", "off"


class ChecksType(click.ParamType[Any]):
    """`tags,order` as `tags+order`; `all` as every checker; `off`."""

    name = "NAMES"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The value of `EngineConfig.checks`; fails for a name that is none."""
        if value == OFF:
            return OFF
        names = CHECKS if value == ALL else dict.fromkeys(map(str.strip, value.split(",")))
        for name in names:
            if name not in CHECKS:
                if name in (ALL, OFF):
                    self.fail(f"{name!r} stands alone (got {value!r})", param, ctx)
                expected = choices(name, (*CHECKS, ALL, OFF))
                self.fail(f"unknown checker (got {name!r}); expected {expected}", param, ctx)
        return "+".join(names)


def check_option(text: str) -> Decorator[Any]:
    """`--check`, with this help."""
    return click.option(
        "--check",
        "checks",
        type=ChecksType(),
        metavar="NAME,NAME",
        help=text,
        shell_complete=complete_names("checks", several=True),
    )
