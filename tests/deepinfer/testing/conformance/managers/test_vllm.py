"""vLLM's block pool under the kit, where vLLM is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deepinfer.testing.conformance.checking import FAILS, NOT_OFFERED, check_all
from deepinfer.testing.conformance.managers.vllm import POOLS


def test_it_is_imported_only_when_a_pool_is_made():
    """Loading the adapter does not load vllm."""
    code = (
        "import sys, deepinfer.testing.conformance.managers.vllm; sys.exit('vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_it_holds_and_what_not():
    """It trusts its callers with double frees, and takes a pinned free block out of its queue."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    outcomes = check_all(POOLS)
    assert {o.invariant.name for o in outcomes if o.verdict == FAILS} == {
        *("second release", "named twice", "pin of a free block"),
    }
    assert {o.invariant.name for o in outcomes if o.verdict == NOT_OFFERED} == {
        *("fence", "two fences", "order behind a fence", "capacity", "one formula"),
    }
