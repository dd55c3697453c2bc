"""`export`: a finished (or interrupted) run's table again, in any format, and its plots.

Knows the command line; reading, choosing and rendering are `bench.samples` and `bench.report`.
Invariant: runs nothing and changes nothing but the files `-o` and `--plot` name.
"""

from __future__ import annotations

from pathlib import Path

import click

FORMAT_NAMES = ("text", "md", "csv", "json", "jsonl", "latex", "html", "sql")


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
@click.option("--columns", default="", metavar="KEY,...", help="Columns to show, in this order.")
@click.option("--sort", default="", metavar="KEY,...", help="Sort rows; `-KEY` is descending.")
@click.option("--group-by", default="", metavar="AXIS", help="A table for each value of the axis.")
@click.option(
    "--precision",
    type=click.IntRange(1, 17),
    metavar="N",
    help="Significant figures; default: about 3, in an interval what its width justifies.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="File to write instead of stdout; replaced if it exists.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE.png|svg",
    help="Draw the plots of the HTML report into a file too; needs the extra `plots`.",
)
def command(
    run: Path,
    format_name: str,
    columns: str,
    sort: str,
    group_by: str,
    precision: int | None,
    output: Path | None,
    plot: Path | None,
) -> None:
    """Write the table of RUN, a folder such as results/fork-batch or its samples.jsonl.

    Nothing is run again: the table is computed from the file. Columns are named by their keys, as
    csv and json have them; all of them are in docs/metrics.md.
    """
    from bench.report import View, apply_view, build_table, split_keys, write_report
    from bench.samples import read_samples

    if plot is not None:
        from bench.report.figure import check_figure

        check_figure(plot)  # before anything is read or written
    view = View(split_keys(columns), split_keys(sort), group_by, precision)
    table = apply_view(build_table(read_samples(run)), view)
    write_report(table, format_name, output)
    if plot is not None:
        from bench.report.figure import write_figure

        write_figure(table, plot)
