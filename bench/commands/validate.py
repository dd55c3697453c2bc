"""`validate`: every problem of workload and profile files, one line each.

Knows how to tell the two kinds apart by their keys; the schema knows the rest. Invariant: exit code
0 means that each file is valid by itself; it says nothing of a trace or model folder it names.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench.yaml_source import Problem, SourceError, parse
from deepinfer.errors import UserError

if TYPE_CHECKING:
    from bench.schema import Profile

WORKLOAD_KEYS = frozenset({"requests", "trace", "scale_lengths"})
PROFILE_KEYS = frozenset({"model", "verify", "device"})


@click.command("validate")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--kind",
    type=click.Choice(["workload", "profile"]),
    help="What the files are; by default told from their keys.",
)
@click.pass_context
def command(ctx: click.Context, files: tuple[str, ...], kind: str | None) -> None:
    """Check workload and profile files and print every problem, one line each.

    Problems go to stderr; the exit code is 2 if there is any.
    """
    num_bad = 0
    for name in files:
        try:
            click.echo(_check(Path(name), kind))
        except UserError as error:
            num_bad += 1
            for line in _lines_of(error):
                click.echo(line, err=True)
    if num_bad:
        ctx.exit(2)


def _check(path: Path, kind: str | None) -> str:
    """What to say of a valid file; raises UserError otherwise."""
    from bench.spec import load_profile, load_workload  # pydantic: not for `--help`

    if (kind or _kind_of(path, parse(path).data)) == "profile":
        profile = load_profile(path)
        _check_blocks(path, profile)
        return f"{path}: valid profile for device {profile.device}"
    workload = load_workload(path)
    if workload.trace:
        return f"{path}: valid workload, replays a trace in {workload.trace.format} format"
    groups = workload.requests or ()
    num_requests = sum(group.count for group in groups)
    num_children = sum(group.count * group.fork.children for group in groups if group.fork)
    forked = f", {num_children} forked from them" if num_children else ""
    num_turns = sum(group.count * (group.turns.count - 1) for group in groups if group.turns)
    come_back = f", {num_turns} later turns" if num_turns else ""
    plural = "" if num_requests == 1 else "s"
    return f"{path}: valid workload, {num_requests} request{plural}{forked}{come_back}"


def _check_blocks(path: Path, profile: Profile) -> None:
    """Raise UserError if the rows of the model do not fit into blocks of this size."""
    from bench.model_schema import HybridSettings
    from deepinfer.models.hybrid.geometry import Geometry

    if isinstance(profile.model, HybridSettings):
        try:
            Geometry.of(profile.model.config(), profile.engine.block_size)
        except UserError as error:
            raise UserError(f"{path}: engine.{error}", hint=error.hint) from None


def _kind_of(path: Path, data: dict[str, Any]) -> str:
    is_workload, is_profile = data.keys() & WORKLOAD_KEYS, data.keys() & PROFILE_KEYS
    if bool(is_workload) == bool(is_profile):
        got = ", ".join(data) or "no keys"
        raise UserError(
            f"{path}: neither clearly a workload nor a profile (got {got}); "
            "expected requests or trace (workload), or model (profile)",
            hint="say which with --kind workload or --kind profile",
        )
    return "workload" if is_workload else "profile"


def _lines_of(error: UserError) -> list[str]:
    problems = error.problems if isinstance(error, SourceError) else [error]
    lines = []
    for problem in problems:
        text = problem.text if isinstance(problem, Problem) else str(problem)
        lines.append(f"error: {text}" + (f" (hint: {problem.hint})" if problem.hint else ""))
    return lines
