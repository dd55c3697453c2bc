"""What to run and on what: the options that `run`, `compare` and the profiles of a workload share.

Knows the command line's words for them, and their way into `Resolved`. Invariant: an option that is
not given leaves files and defaults alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bench.commands.completion import (
    complete_file,
    complete_names,
    complete_profile,
    complete_setting,
)
from bench.commands.pools import with_pool

if TYPE_CHECKING:
    from bench.schema import Profile, Workload
    from bench.spec import Flags, Resolved

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Decorator = Callable[[Decorated], Decorated]

INPUT_OPTIONS = (
    click.option(
        "--profile",
        default="cpu-small",
        show_default=True,
        help="Name or file.",
        shell_complete=complete_profile,
    ),
    click.option(
        "--device",
        help="cpu, cpu-stepped or cuda; default: the profile's.",
        shell_complete=complete_names("device"),
    ),
    click.option(
        "--delay",
        metavar="STREAM=TIME",
        help="Planted before every operation of a stream, as copy=2ms or copy=2ms+load=500us.",
    ),
    click.option("--seed", type=click.IntRange(min=0), help="Of requests and weights' order."),
    click.option(
        "-s",
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="An engine setting, as block_size=16; repeatable.",
        shell_complete=complete_setting(several=False),
    ),
    click.option(
        "--trace-file",
        help="Your copy of the trace the workload replays.",
        shell_complete=complete_file,
    ),
    click.option("--limit", type=click.IntRange(min=1), help="Requests to read of the trace."),
    click.option("--scale-lengths", type=float, help="Factor on every token count."),
    click.option("--speed", type=float, help="Divides the trace's arrival times."),
)


def with_options(options: Sequence[Decorator[Any]]) -> Decorator[Any]:
    """A decorator that gives a command `options`, shown in this order."""

    def decorate(command: Decorated) -> Decorated:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def load_input(
    workload_name: str,
    *,
    profile: str,
    device: str | None,
    delay: str | None,
    seed: int | None,
    settings: Sequence[str],
    trace_file: str | None,
    limit: int | None,
    scale_lengths: float | None,
    speed: float | None,
) -> tuple[Profile, Workload, Flags]:
    """The two files and the flags, by the values of `INPUT_OPTIONS`."""
    from bench.catalog import find_profile, find_workload
    from bench.spec import Flags, load_profile, load_workload

    engine = _settings(settings)
    flags = Flags(
        acceptance=engine.pop("acceptance", None),
        engine=engine,
        seed=seed,
        device=device,
        delay=delay,
        trace_path=trace_file,
        limit=limit,
        scale_lengths=scale_lengths,
        speed=speed,
    )
    workload = load_workload(find_workload(workload_name))
    return load_profile(find_profile(profile)), workload, flags


def resolve_input(workload_name: str, **options: Any) -> Resolved:
    """The one configuration that the values of `INPUT_OPTIONS` ask for, its pool measured."""
    from bench.spec import resolve

    return with_pool(resolve(*load_input(workload_name, **options)))


def _settings(settings: Sequence[str]) -> dict[str, Any]:
    """`["block_size=16"]` as typed settings."""
    from bench.spec import parse_axes
    from deepinfer.errors import UserError

    flags = {}
    for name, values in parse_axes(settings, what="setting").items():
        if name in ("device", "delay"):
            raise UserError(f"setting {name}: not of the engine; expected --{name}")
        if len(values) != 1:
            got = ",".join(map(str, values))
            raise UserError(
                f"setting {name}: several values (got {got}); expected one",
                hint="`compare` takes several",
            )
        flags[name] = values[0]
    return flags
