"""Killed while saving to a directory: `benchmarks/kill_store.py`, which does 200 by itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_what_a_killed_process_saved_is_read_and_the_rest_ignored():
    """Twelve kills of it: nothing lost that was saved, nothing wrong, nothing left behind."""
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "kill_store.py", "--times", "12", "--seed", "5"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    last = re.search(r"^12 kills, (\d+) entries saved: 0 problems$", run.stdout, re.MULTILINE)
    assert last is not None
    assert int(last[1]) > 12
