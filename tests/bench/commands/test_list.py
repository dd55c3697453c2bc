"""`list` shows what there is to choose from, aligned and without colour."""

import pytest

from bench.catalog import list_profiles, list_workloads
from bench.commands import main
from deepinfer.names import DESCRIPTIONS, UNSAFE_POLICIES


@pytest.mark.parametrize(
    ("what", "listed"), [("workloads", list_workloads), ("profiles", list_profiles)]
)
def test_files_are_listed_with_aligned_descriptions(what, listed, capsys):
    """One line per file: its name, padded, and the first line of its description."""
    assert main(["list", what]) == 0
    lines = capsys.readouterr().out.splitlines()
    width = max(len(name) for name, _ in listed())
    assert lines == [f"{name:<{width}}  {text}" for name, text in listed()]


def test_policies_are_grouped_and_unsafe_ones_marked(capsys):
    """Every choice but the device has a group; only unsafe release policies carry UNSAFE."""
    assert main(["list", "policies"]) == 0
    groups = {}
    for line in capsys.readouterr().out.splitlines():
        if line and not line.startswith(" "):
            groups[line.split()[0]] = group = []
        elif line:
            group.append(line.split(maxsplit=1))
    expected = {kind: list(values) for kind, values in DESCRIPTIONS.items() if kind != "device"}
    assert {kind: [name for name, _ in rows] for kind, rows in groups.items()} == expected
    unsafe = {name for rows in groups.values() for name, text in rows if "UNSAFE" in text}
    assert unsafe == UNSAFE_POLICIES


def test_unknown_kinds_get_the_nearest(capsys):
    """A mistyped kind is answered with the right one."""
    assert main(["list", "polices"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: list: unknown name (got 'polices'); expected 'policies'")
