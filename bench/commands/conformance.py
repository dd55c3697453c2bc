"""`check conformance`: block managers, ours or anybody's, put through the invariants.

Knows how outcomes are printed; what they are is `deepinfer.testing.conformance`. Invariant: a
manager that is not installed here is named with the reason, and fails nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from bench.commands.sheet import FORMATS, Sheet, render_sheet
from deepinfer.errors import UserError

if TYPE_CHECKING:
    from deepinfer.testing.conformance.checking import Outcome

NUM_EXAMPLES = 300
ACCEPTED = ("holds", "not offered")


@click.command("conformance")
@click.option(
    "--manager",
    "names",
    multiple=True,
    metavar="NAME",
    help="Registered name or module:Class; repeat for several. Default: all that are registered.",
)
@click.option("--examples", type=click.IntRange(min=1), default=NUM_EXAMPLES, show_default=True)
@click.option("--format", "format_name", type=click.Choice(FORMATS), default="text")
@click.pass_context
def conformance(
    ctx: click.Context, names: tuple[str, ...], examples: int, format_name: str
) -> None:
    """Put block managers through the invariants: holds, fails, or not offered.

    Each invariant gets EXAMPLES random runs; a failure is shrunk to the shortest program. Exit code
    1 if a manager fails one.
    """
    from deepinfer.testing.conformance.adapters import Unavailable, find, registered

    if any(":" in name for name in names):
        sys.path.insert(0, os.getcwd())  # a module beside which one stands, as with `python -m`
    families, skipped = {}, {}
    if not (chosen := names or tuple(registered())):
        hint = "install this package, or give --manager module:Class"
        raise UserError("no block manager is registered", hint=hint)
    for name in chosen:
        try:
            families[name] = find(name)
        except Unavailable as reason:
            skipped[name] = str(reason)
    check_all = load_kit()
    results = {}
    for name, family in families.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        results[name] = check_all(family, examples=examples)
    click.echo(render_sheet(outcome_sheet(results, skipped, examples), format_name), nl=False)
    verdicts = {outcome.verdict for outcomes in results.values() for outcome in outcomes}
    ctx.exit(0 if verdicts <= set(ACCEPTED) else 1)


def load_kit() -> Callable[..., list[Outcome]]:
    """`check_all`, or a UserError that says what to install."""
    try:
        from deepinfer.testing.conformance.checking import check_all
    except ImportError as error:
        hint = "pip install 'deepinfer-bench[testing]'"
        raise UserError(f"check conformance needs hypothesis: {error}", hint=hint) from None
    return check_all


def outcome_sheet(
    results: Mapping[str, Sequence[Outcome]], skipped: Mapping[str, str], examples: int
) -> Sheet:
    """Invariants down, managers across; failing programs, what is missing and skipped below."""
    rows = list(zip(*results.values(), strict=True))
    cells = [
        (row[0].invariant.name, row[0].invariant.number or "-", *(o.verdict for o in row))
        for row in rows
    ]
    remarks: list[str] = []
    for name, outcomes in results.items():
        for outcome in outcomes:
            if outcome.verdict not in ACCEPTED:
                remarks.append(f"{name}, {outcome.invariant.name}: {outcome.detail}")
                remarks += [f"    {outcome.program}"] if outcome.calls else []
    for name, outcomes in results.items():
        missing = dict.fromkeys(o.detail for o in outcomes if o.verdict == "not offered")
        if missing:
            remarks.append(f"{name} does not offer some: {'; '.join(missing)}")
    remarks += [f"{name}: skipped: {reason}" for name, reason in skipped.items()]
    remarks.append(f"{examples} runs for each invariant; `holds` means that none of them broke it.")
    keys = ("manager", "invariant", "number", "says", "reports", "verdict", "detail", "program")
    records = [
        {
            "manager": name,
            "invariant": outcome.invariant.name,
            "number": outcome.invariant.number or None,
            "says": outcome.invariant.says,
            "reports": " ".join(outcome.invariant.reports),
            "verdict": outcome.verdict,
            "detail": outcome.detail or None,
            "program": outcome.program or None,
        }
        for name, outcomes in results.items()
        for outcome in outcomes
    ]
    headers = ("invariant", "", *results)
    align = ("left",) * len(headers)
    facts = {"examples": examples, "skipped": dict(skipped)}
    return Sheet(headers, cells, align, remarks, keys, records, facts)
