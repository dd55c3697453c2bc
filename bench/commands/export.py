"""`export`: a finished (or interrupted) run's table again, in any format.

Knows the command line; reading and rendering are `bench.samples` and `bench.report`. Invariant:
runs nothing and changes nothing but the file `-o` names.
"""

from __future__ import annotations

from pathlib import Path

import click

FORMAT_NAMES = ("text", "md", "csv", "json", "jsonl")


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_name",
    type=click.Choice(FORMAT_NAMES),
    default="text",
    show_default=True,
    help="How to write the table.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="File to write instead of stdout; replaced if it exists.",
)
def command(run: Path, format_name: str, output: Path | None) -> None:
    """Write the table of RUN, a folder such as results/fork-batch or its samples.jsonl.

    Nothing is run again: the table is computed from the file.
    """
    from bench.report import build_table, write_report
    from bench.samples import read_samples

    write_report(build_table(read_samples(run)), format_name, output)
