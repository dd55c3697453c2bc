"""`schema`: the JSON schema of workload and profile files, for editors.

Knows the command line; `bench.json_schema` makes the schema. Invariant: prints what lies beside the
shipped files.
"""

from __future__ import annotations

import click


@click.command("schema")
@click.argument("kind", type=click.Choice(("workload", "profile")))
def command(kind: str) -> None:
    """Print the JSON schema of workload or profile files, by which editors complete and check them.

    The shipped files name theirs in their first line. For a file of your own:

    \b
      deepinfer-bench schema workload > workload.schema.json
      # yaml-language-server: $schema=workload.schema.json
    """
    from bench.json_schema import schema_text

    click.echo(schema_text("workload" if kind == "workload" else "profile"), nl=False)
