"""`diff`: two saved results side by side, with a verdict and an exit code for CI.

Knows the command line; comparing and rendering are `bench.diff` and `bench.report.diff`. Invariant:
runs nothing and writes nothing.
"""

from __future__ import annotations

from pathlib import Path

import click


def _share(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """`3%` or `0.03` as 0.03, from 0 up to 100 %."""
    text = value.strip()
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise click.BadParameter(f"{value!r} is no share; expected 3% or 0.03, at most 100%")
    return share


@click.command("diff")
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option(
    "--fail-on",
    type=click.Choice(("slower",)),
    help="Exit with 1 if a figure is SLOWER, or a cell is wrong, failed or missing.",
)
@click.option(
    "--threshold",
    callback=_share,
    default="3%",
    show_default=True,
    metavar="PERCENT",
    help="Changes up to this are none.",
)
@click.option(
    "--format",
    "format_name",
    type=click.Choice(("text", "md", "json")),
    default="text",
    show_default=True,
    help="md is a summary for a pull request.",
)
@click.pass_context
def command(
    ctx: click.Context,
    base: Path,
    new: Path,
    fail_on: str | None,
    threshold: float,
    format_name: str,
) -> None:
    """Compare the saved result NEW with BASE: folders of runs, or their samples.jsonl.

    Cells are matched by their axes. Each figure gets a verdict: FASTER, SLOWER, SAME, or UNCLEAR
    where the rounds cannot tell. Differences of machine, configuration and commit are named.
    """
    from bench.diff import compare_results
    from bench.report.diff import render_diff
    from bench.samples import read_samples

    difference = compare_results(read_samples(base), read_samples(new), threshold)
    click.echo(render_diff(difference, format_name), nl=False)
    if fail_on == "slower" and difference.is_worse:
        ctx.exit(1)
