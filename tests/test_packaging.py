"""What is installed: the YAML in the wheel, the console script, a start that loads no torch."""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.bench.tiny import ROOT, run_cli

LIMIT_S = 0.3  # for a command that only looks around
LOOKING_AROUND = (("--help",), ("list", "workloads"), ("list", "profiles"), ("list", "policies"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built with what is installed."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed, and nothing is fetched for a test")
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", os.fspath(folder))
    command = [sys.executable, "-m", "pip", "wheel", os.fspath(ROOT), *options]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("deepinfer_bench-*.whl")
    return path


def test_the_wheel_has_every_workload_and_profile(wheel: Path) -> None:
    """The YAML lies where the catalog looks when there is no checkout, its schema beside it."""
    names = set(zipfile.ZipFile(wheel).namelist())
    for kind in ("workloads", "profiles"):
        files = sorted((ROOT / kind).iterdir())
        assert {file.suffix for file in files} == {".yaml", ".json"}
        for file in files:
            assert f"bench/_packaged/{kind}/{file.name}" in names
    assert not any(name.startswith("tests/") for name in names)


def test_the_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Unpacked elsewhere, it lists the same workloads and knows their files."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import sys; from bench.commands import main; sys.exit(main(['list', 'workloads']))"
    environment = {**os.environ, "PYTHONPATH": os.fspath(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout == run_cli("list", "workloads", cwd=ROOT).stdout != ""


def test_the_console_script_is_the_command_line(wheel: Path) -> None:
    """`deepinfer-bench` is `bench.commands:main`."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
    assert "deepinfer-bench = bench.commands:main" in archive.read(name).decode()


def test_cli_py_works_from_any_folder(tmp_path: Path) -> None:
    """`python PATH/cli.py` finds its packages and its YAML, wherever one stands."""
    for args in LOOKING_AROUND:
        done = run_cli(*args, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == run_cli(*args, cwd=ROOT).stdout


@pytest.mark.parametrize("args", LOOKING_AROUND, ids=" ".join)
def test_looking_around_loads_no_torch_and_is_quick(args: tuple[str, ...], tmp_path: Path) -> None:
    """No torch, and processor time within 0.3 s, the median of five: others may have the cores."""
    code = (
        f"import sys; sys.path.insert(0, {os.fspath(ROOT)!r}); sys.argv[1:] = {list(args)!r};"
        "import time; from bench.commands import main; code = main();"
        "print(time.process_time(), 'torch' in sys.modules, code, file=sys.stderr)"
    )
    times = []
    for _ in range(5):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
        )
        elapsed = time.perf_counter() - start
        processor, loaded, exit_code = done.stderr.split()
        assert (loaded, exit_code) == ("False", "0")
        times.append((float(processor), elapsed))
    assert statistics.median(processor for processor, _ in times) < LIMIT_S
    assert min(elapsed for _, elapsed in times) < 2 * LIMIT_S
