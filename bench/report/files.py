"""Writing a file of a report.

Knows the disk; knows nothing of what is written. Invariant: a file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from bench.disk import cannot_write
from deepinfer.errors import UserError


def write_file(path: Path, content: bytes) -> None:
    """Write or replace `path`, whole or not at all. Raises UserError if it cannot be written."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder", hint="name a file in it")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise cannot_write(
            path,
            error,
            room="make room, or name a file on another disk",
            place="name a file in a folder that exists",
        ) from error
