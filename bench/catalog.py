"""A name or a path to a workload or profile file.

Looks where the user points, then in the checkout's folder, then in the copy inside the package.
Knows file names and first lines of descriptions, nothing else of what the files mean. Invariant: a
name that finds nothing raises UserError with the nearest name; it never picks another file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from bench.nearest import choices
from bench.yaml_source import parse
from deepinfer.errors import UserError

Kind = Literal["workload", "profile"]

_HERE = Path(__file__).resolve().parent
_SUFFIXES = (".yaml", ".yml")


def folders(kind: Kind) -> tuple[Path, ...]:
    """Where files of a kind lie, first match wins: the checkout, the packaged copy."""
    name = f"{kind}s"
    return _HERE.parent / name, _HERE / "_packaged" / name


def find_workload(name_or_path: str) -> Path:
    """The workload file of a name (`fork-batch`) or path (`./mine.yaml`). UserError if none."""
    return _find("workload", name_or_path)


def find_profile(name_or_path: str) -> Path:
    """The profile file of a name (`cpu-small`) or path (`./mine.yaml`). UserError if none."""
    return _find("profile", name_or_path)


def list_workloads() -> list[tuple[str, str]]:
    """Name and first line of the description of every workload that has a name, sorted."""
    return _list("workload")


def list_profiles() -> list[tuple[str, str]]:
    """Name and first line of the description of every profile that has a name, sorted."""
    return _list("profile")


def _files(kind: Kind) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for folder in folders(kind):
        for path in sorted(folder.glob("*.yaml")):
            files.setdefault(path.stem, path)
    return dict(sorted(files.items()))


def _find(kind: Kind, name_or_path: str) -> Path:
    path = Path(name_or_path).expanduser()
    is_path = path.suffix in _SUFFIXES or os.sep in name_or_path
    if is_path and path.is_file():
        return path
    files = _files(kind)
    if name_or_path in files:
        return files[name_or_path]
    if path.is_file():
        return path
    if is_path:
        raise UserError(
            f"{kind} {name_or_path}: no such file; expected a YAML file or a known name"
        )
    raise UserError(
        f"{kind} {name_or_path!r}: unknown name; expected {choices(name_or_path, files)}",
        hint=f"`deepinfer-bench list {kind}s` shows them; a file of your own is given by its path",
    )


def _list(kind: Kind) -> list[tuple[str, str]]:
    return [(name, _first_line(path)) for name, path in _files(kind).items()]


def _first_line(path: Path) -> str:
    """First line of `description`; a broken file is listed with what is wrong, not left out."""
    try:
        description = str(parse(path).data.get("description", "")).strip()
    except UserError as error:
        return f"(broken: {error})"
    return description.splitlines()[0] if description else "(no description)"
