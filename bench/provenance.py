"""Whether two results come from the same machine and code, and what differs if not.

Knows the environment a result records (`bench.collect.environment`); reads no file and asks no
machine. Invariant: what legitimately differs between two runs of one setup is never named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FACTS: dict[str, tuple[str, ...]] = {
    "host": ("host",),
    "os": ("os",),
    "python": ("python",),
    "cpu": ("cpu", "model"),
    "cores": ("cpu", "logical_cores"),
    "memory_bytes": ("cpu", "memory_bytes"),
    "gpu": ("gpu", "name"),
    "gpu memory_bytes": ("gpu", "memory_bytes"),
    "driver": ("gpu", "driver"),
    "power_limit_w": ("gpu", "power_limit_w"),
    "commit": ("git", "commit"),
}


def environment_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What of machine, versions and commit differs: `torch 2.13.0 -> 2.14.0`, one entry a fact.

    Clocks, times and reasons are left out: they differ from run to run. So are facts that only one
    of them records, but for a GPU.
    """
    changes = []
    for label, keys in _FACTS.items():
        before, after = _look_up(old, keys), _look_up(new, keys)
        if before != after and before is not None and after is not None:
            changes.append(f"{label} {_shown(before)} -> {_shown(after)}")
    versions_before, versions_after = old.get("versions") or {}, new.get("versions") or {}
    for name in sorted(versions_before.keys() & versions_after.keys()):
        if versions_before[name] != versions_after[name]:
            changes.append(f"{name} {versions_before[name]} -> {versions_after[name]}")
    if (_look_up(old, ("gpu",)) is None) != (_look_up(new, ("gpu",)) is None):
        changes.append("gpu, which one of them lacks")
    return changes


def _look_up(tree: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    value: Any = tree
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _shown(value: Any) -> str:
    text = str(value)
    is_commit = len(text) == 40 and all(letter in "0123456789abcdef" for letter in text)
    return text[:10] if is_commit else text


def commit_of(environment: Mapping[str, Any]) -> str | None:
    """The commit in ten digits, `+` behind it if files were changed since; None if unknown."""
    commit = _look_up(environment, ("git", "commit"))
    if not isinstance(commit, str):
        return None
    return commit[:10] + "+" * bool(_look_up(environment, ("git", "dirty")))
