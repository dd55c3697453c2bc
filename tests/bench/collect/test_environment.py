"""Where a result comes from."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType

import pytest

from bench.collect.environment import collect_environment


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    """The same on machines with and without a GPU."""
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.fixture
def checkout(tmp_path):
    """A git work tree with one commit."""

    def git(*args):
        settings = ("user.name=t", "user.email=t@example.org", "commit.gpgsign=false")
        options = [word for setting in settings for word in ("-c", setting)]
        subprocess.run(["git", "-C", tmp_path, *options, *args], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "code.py").write_text("1\n", encoding="utf-8")
    git("add", "code.py")
    git("commit", "-q", "-m", "one")
    return tmp_path


def test_every_fact_is_there_or_explained():
    """Each None has its dotted name in `reasons`; the whole is strict JSON."""
    environment = collect_environment()
    json.dumps(environment, allow_nan=False)
    assert environment["versions"]["numpy"]
    assert environment["cpu"]["memory_bytes"] > 0
    assert environment["reasons"]["gpu"] == "package nvidia-ml-py is not installed"

    def missing(tree, prefix=""):
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from missing(value, f"{prefix}{key}.")
            elif value is None:
                yield f"{prefix}{key}"

    reasons = environment.pop("reasons")
    assert set(missing(environment)) == set(reasons)


def test_commit_and_changes_of_the_checkout(checkout):
    """A clean tree is not dirty, an edited one is."""
    clean = collect_environment(checkout)["git"]
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (checkout / "code.py").write_text("2\n", encoding="utf-8")
    assert collect_environment(checkout)["git"] == {"commit": clean["commit"], "dirty": True}


def test_a_folder_inside_another_checkout_has_no_commit(checkout):
    """Installed below somebody's work tree, that tree's commit says nothing of this code."""
    inner = checkout / "site-packages"
    inner.mkdir()
    environment = collect_environment(inner)
    assert environment["git"] == {"commit": None, "dirty": None}
    assert environment["reasons"]["git.commit"] == "not run from a checkout"


def test_no_git_and_no_checkout_are_reasons(tmp_path, monkeypatch):
    """Neither a folder outside git nor a machine without git stops a run."""
    assert "not a git repository" in collect_environment(tmp_path)["reasons"]["git.commit"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git" in collect_environment(tmp_path)["reasons"]["git.commit"]


class FakeNvml(ModuleType):
    """One GPU that does not tell its power limit."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    class NVMLError(Exception):
        """What pynvml raises."""

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)
        answers = {
            "nvmlDeviceGetName": b"GPU of 2024",
            "nvmlSystemGetCudaDriverVersion_v2": 12040,
            "nvmlSystemGetDriverVersion": "550.1",
            "nvmlDeviceGetMemoryInfo": self,
        }

        def call(*args):
            if name == "nvmlDeviceGetEnforcedPowerLimit":
                raise self.NVMLError("Not Supported")
            return answers.get(name, 1000)

        return call

    total = 80


def test_facts_of_the_gpu_one_by_one(monkeypatch):
    """What the driver does not tell is None with its reason, the rest is there."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("pynvml"))
    environment = collect_environment()
    gpu = environment["gpu"]
    assert (gpu["name"], gpu["driver"], gpu["cuda"]) == ("GPU of 2024", "550.1", "12.4")
    assert (gpu["memory_bytes"], gpu["sm_clock_mhz"]) == (80, 1000)
    assert gpu["power_limit_w"] is None
    assert environment["reasons"]["gpu.power_limit_w"] == "Not Supported"
