"""Findings: all are counted, the first are kept."""

from __future__ import annotations

from deepinfer.checks.findings import MAX_KEPT, Finding, Findings


def test_every_finding_is_counted_and_the_first_of_each_checker_are_kept():
    """One noisy checker does not push out what another one found."""
    findings = Findings()
    for step in range(MAX_KEPT + 5):
        findings.add("tags", step, "wrong row", count=2)
    findings.add("order", 9, "hazard")
    assert findings.counts == {"tags": 2 * (MAX_KEPT + 5), "order": 1}
    assert len(findings) == 2 * (MAX_KEPT + 5) + 1
    assert len(findings.first) == MAX_KEPT + 1
    assert findings.first[-1] == Finding("order", 9, "hazard")


def test_a_finding_is_one_line():
    """Who found it, when, and what."""
    assert str(Finding("order", 3, "two writes")) == "order, step 3: two writes"
