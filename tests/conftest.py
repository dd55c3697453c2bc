"""Skips what this machine cannot run, in one place, each with its reason; and one thread for torch.

`cuda` needs an NVIDIA GPU, `oracle` needs transformers, `traces` needs the request traces beside
the checkout. Nothing is imported or looked up unless a collected test carries the marker.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

# Tensors in tests are tiny: a second thread only waits for the first, 20 times as long on a busy
# machine. OpenMP reads this when torch is loaded, later than here; subprocesses inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"


def _cuda_missing() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


def _oracle_missing() -> str | None:
    found = importlib.util.find_spec("transformers") is not None
    return None if found else "transformers is not installed (the `oracle` extra)"


def _traces_missing() -> str | None:
    return None if TRACES.is_dir() else f"no request traces in {TRACES}"


MISSING = {"cuda": _cuda_missing, "oracle": _oracle_missing, "traces": _traces_missing}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as skipped every test whose marker names something that is missing."""
    for marker, missing in MISSING.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = missing() if marked else None
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
