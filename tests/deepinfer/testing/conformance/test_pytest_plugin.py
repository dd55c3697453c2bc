"""The kit in another project's tests: a class with an adapter, or an option; and at no price."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
MINE = """\
from deepinfer.testing.conformance.managers.reference import Reference
from deepinfer.testing.conformance.pytest_plugin import BlockManagerConformance


class Mine:
    def __init__(self, num_blocks):
        self.free = list(range(1, num_blocks))

    def allocate(self, count):
        return [self.free.pop() for _ in range(count)] if count <= len(self.free) else None

    def release(self, table):
        self.free += table


class TestMine(BlockManagerConformance):
    adapter = Mine
    examples = 40
"""


def run_pytest(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """pytest in a folder that is not of this project, with the plug-in as installed."""
    path = os.pathsep.join([str(ROOT), str(folder)])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project with a manager that frees twice, and a test class for it."""
    (tmp_path / "test_mine.py").write_text(MINE)
    return tmp_path


def test_a_class_with_an_adapter_is_a_test_suite(folder: Path) -> None:
    """A test per invariant: failures show the program, what is not offered is skipped."""
    out = run_pytest(folder).stdout
    assert "2 failed, 6 passed, 13 skipped" in out
    assert "not offered: no pin, withhold, lift" in out
    assert "releasing what nobody owns changes nothing, refused or not: fails" in out
    assert "    a = allocate(1)\n    release(a)\n    release(a)\n" in out


def test_the_option_needs_no_test_file(folder: Path) -> None:
    """`--block-manager module:Class` tests a class in place."""
    suite = ("--pyargs", "deepinfer.testing.conformance.suite", "-k", "second-release or one-owner")
    assert (
        "1 failed, 1 passed"
        in run_pytest(folder, "--block-manager", "test_mine:Mine", *suite).stdout
    )
    assert "2 passed" in run_pytest(folder, "--block-manager", "reference", *suite).stdout
    assert "which manager?" in run_pytest(folder, *suite).stdout


def test_a_manager_that_is_not_installed_is_skipped(folder: Path) -> None:
    """With the reason."""
    if "vllm" in sys.modules or _has("vllm"):
        pytest.skip("vllm is installed here")
    suite = ("--pyargs", "deepinfer.testing.conformance.suite", "-k", "one-owner")
    assert "No module named 'vllm'" in run_pytest(folder, "--block-manager", "vllm", *suite).stdout


def test_other_sessions_pay_nothing(tmp_path: Path) -> None:
    """The plug-in is loaded in each session; torch, numpy and hypothesis are not."""
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_other(pytestconfig):\n"
        "    assert 'deepinfer.testing.conformance.pytest_plugin' in sys.modules\n"
        "    assert not {'torch', 'numpy'} & sys.modules.keys()\n"
        "    assert 'deepinfer.testing.conformance.checking' not in sys.modules\n"
    )
    done = run_pytest(tmp_path, "-p", "no:hypothesispytest")
    assert "1 passed" in done.stdout, done.stdout


def _has(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None
