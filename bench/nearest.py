"""How an error names what would have been valid.

Knows nothing of what the names mean. Invariant: every valid name appears in the text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def choices(name: object, valid: Iterable[str]) -> str:
    """`'polled' (the nearest of early, blocking, polled)`, or `one of ...` if none is close."""
    names = list(valid)
    close = difflib.get_close_matches(str(name), names, n=1)
    listed = ", ".join(names)
    return f"{close[0]!r} (the nearest of {listed})" if close else f"one of {listed}"
