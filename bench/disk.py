"""What is said of a file that cannot be written.

Knows the words of an OSError; nothing of what was to be written. Invariant: a disk without room is
told from a place that cannot be written to, since other things help against it.
"""

from __future__ import annotations

import errno
from pathlib import Path

from deepinfer.errors import UserError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cannot_write(path: Path, error: OSError, *, room: str, place: str) -> UserError:
    """The error to raise: `path` and the reason, with the hint `room` if the disk is full, or the
    file too large for it, else `place`."""
    hint = room if error.errno in NO_ROOM else place
    return UserError(f"{path}: cannot write: {error.strerror or error}", hint=hint)
