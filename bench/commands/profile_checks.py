"""`profile step --check`: what watching the engine costs a step, checker by checker.

Knows what a reader must be told of the figures; `bench.probes.check_cost` measures them. Invariant:
text and JSON have the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.commands.profile_common import print_sheet, show_progress
from bench.commands.sheet import UNDEFINED, Sheet, figure

if TYPE_CHECKING:
    from bench.probes.check_cost import CheckCost, CheckProfile
    from bench.spec import Resolved

KEYS = (
    *("checks", "step_us", "ratio", "ratio_low", "ratio_high", "confidence"),
    *("num_findings", "num_wrong"),
)


def profile_check_costs(resolved: Resolved, checks: str, rounds: int, format_name: str) -> int:
    """Measure and print; the exit code, 1 if an answer was wrong or a checker found something.

    `checks` is a value of `EngineConfig.checks`. Raises UserError if it names no checker.
    """
    from bench.probes.check_cost import profile_checks
    from deepinfer.checks.suite import parse_checks
    from deepinfer.errors import UserError

    names = parse_checks(checks)
    if not names:
        raise UserError("--check off: nothing to measure; expected checkers, as --check all")
    profile = profile_checks(resolved, names, num_rounds=rounds, on_probe=show_progress)
    print_sheet(_sheet, profile, format_name)
    return int(any(row.num_wrong or row.num_findings for row in profile.rows))


def _sheet(profile: CheckProfile) -> Sheet:
    return Sheet(
        headers=("checks", "step us", "ratio", "interval", "findings"),
        cells=[_cells(row) for row in profile.rows],
        align=("left", "right", "right", "right", "right"),
        remarks=_remarks(profile),
        keys=KEYS,
        records=[_record(row) for row in profile.rows],
        facts={"device": profile.device, "num_rounds": profile.num_rounds},
    )


def _cells(row: CheckCost) -> list[str]:
    interval = row.ratio.interval if row.ratio else None
    return [
        row.checks,
        figure(row.step_us, 1),
        figure(row.ratio.center if row.ratio else None, 3),
        UNDEFINED if interval is None else f"{interval.low:.3f} to {interval.high:.3f}",
        str(row.num_findings),
    ]


def _record(row: CheckCost) -> dict[str, Any]:
    ratio = row.ratio
    interval = ratio.interval if ratio else None
    return {
        "checks": row.checks,
        "step_us": row.step_us,
        "ratio": ratio.center if ratio else None,
        "ratio_low": interval.low if interval else None,
        "ratio_high": interval.high if interval else None,
        "confidence": ratio.confidence if ratio and interval else None,
        "num_findings": row.num_findings,
        "num_wrong": row.num_wrong,
    }


def _remarks(profile: CheckProfile) -> list[str]:
    wrong = [f"{row.checks}: {row.num_wrong} WRONG requests" for row in profile.rows]
    ratios = [row.ratio for row in profile.rows if row.ratio is not None and row.ratio.interval]
    confidence = f", {min(r.confidence for r in ratios):.0%} confidence" if ratios else ""
    return [
        *(text for text, row in zip(wrong, profile.rows, strict=True) if row.num_wrong),
        "step: median time from one step's end to the next, of the rounds the median; device "
        f"{profile.device}, {profile.num_rounds} rounds of each, interleaved",
        f"ratio: to the step without checkers in the same round, with its interval{confidence}",
        *profile.notes,
    ]
