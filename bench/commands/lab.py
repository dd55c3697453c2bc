"""`lab`: the book's labs of chapter 4, and the experiments it asks for.

Knows the command line; the experiments are `bench.labs`. Invariant: without options each lab
prints the book's output, byte for byte.
"""

from __future__ import annotations

import click

# As in `bench.labs`, which is not imported for `--help`; a test holds the two together.
MAX_DRAFTS = 17
MAX_PROCESSED = 12
POLICIES = ("early", "deferred")

release_order_option = click.option(
    "--release-order",
    type=click.Choice(("forward", "reverse")),
    default="reverse",
    show_default=True,
    help="Which block of a finished table joins the free list first: its first or its last.",
)


@click.group("lab")
def command() -> None:
    """Run the book's labs (chapter 4), on the engine's own block manager and release queue."""


@command.command("blocks", short_help="Hand out memory in blocks.")
@click.option(
    "--drafts",
    "num_drafts",
    type=click.IntRange(0, MAX_DRAFTS),
    default=2,
    show_default=True,
    help="Positions reserved for drafts when A has 11 tokens.",
)
@release_order_option
def blocks(num_drafts: int, release_order: str) -> None:
    """Hand out memory in blocks: grow, reserve for drafts, shrink, admit.

    Eight blocks of four positions; block 0 is never handed out. `free=` lists the blocks in the
    order in which they will be.
    """
    from bench.labs import blocks_lab

    for line in blocks_lab(num_drafts, release_order):
        click.echo(line)


@command.command("share", short_help="Fork a prefix; release its tail early or late.")
@click.option(
    "--processed",
    "num_processed",
    type=click.IntRange(1, MAX_PROCESSED),
    default=10,
    show_default=True,
    help="Tokens that the parent has computed when it is forked.",
)
@release_order_option
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    help="When the fork's pin on the copied block is released; both, one after the other, if not "
    "given.",
)
def share(num_processed: int, release_order: str, policy: str | None) -> None:
    """Fork a prefix and give its tail back before, or after, the queued copy has read it.

    Token ids stand in for KV rows: a wrong block shows up as a wrong number. With
    `--release-order forward` the child ends too, which shows the order of its blocks.
    """
    from bench.labs import share_lab

    policies = POLICIES if policy is None else (policy,)
    runs = ["\n".join(share_lab(name, num_processed, release_order)) for name in policies]
    click.echo("\n\n".join(runs))
