"""A stand-in for the C library behind the real nvidia-ml-py, which answers from a file.

`tests/data/nvml_answers.json` says what each call returns and writes through its pointers; the
package's own ctypes code runs as it does against a driver.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

ANSWERS = json.loads(
    (Path(__file__).resolve().parents[2] / "data" / "nvml_answers.json").read_text()
)
SUCCESS, INSUFFICIENT_SIZE = 0, 7


class FakeLibrary:
    """libnvidia-ml.so as ctypes sees it: a function per attribute.

    Attributes:
        errors: call -> name of the error it returns from now on.
        missing: calls this driver does not have.
        on_call: called with the name of each call before it is answered.
        asked: names of the calls, in order.
    """

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}
        self.missing: set[str] = set()
        self.on_call: Callable[[str], None] = lambda name: None
        self.asked: list[str] = []
        self.calls = json.loads(json.dumps(ANSWERS["calls"]))
        # The process of the file that stands for this one.
        self.calls["nvmlDeviceGetComputeRunningProcesses_v3"]["processes"][1]["pid"] = os.getpid()

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("_") or name in self.missing or name not in self.calls:
            raise AttributeError(name)
        return lambda *args: self._answer(name, args)

    def lose(self) -> None:
        """Let every call about a device say that the GPU is lost."""
        self.errors = {name: "gpu_is_lost" for name in self.calls if "DeviceGet" in name}

    def _answer(self, name: str, args: tuple[Any, ...]) -> int:
        self.asked.append(name)
        self.on_call(name)
        if name in self.errors:
            return int(ANSWERS["errors"][self.errors[name]])
        call = self.calls[name]
        if "processes" in call:
            return self._processes(call["processes"], *args)
        out = call.get("out", [])
        if "by_argument" in call:
            out = call["by_argument"][str(args[1].value)]
        for pointer, answer in zip(args[len(args) - len(out) :], out, strict=True):
            if isinstance(answer, dict):
                for field, value in answer.items():
                    setattr(pointer._obj, field, value)
            else:
                pointer._obj.value = answer
        return int(call["return"])

    def _processes(self, processes: list[dict[str, int]], gpu: Any, count: Any, array: Any) -> int:
        if array is None:
            count._obj.value = len(processes)
            return INSUFFICIENT_SIZE if processes else SUCCESS
        assert isinstance(array, ctypes.Array)
        for entry, process in zip(array, processes, strict=False):
            for field, value in process.items():
                setattr(entry, field, value)
        count._obj.value = len(processes)
        return SUCCESS


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """The fake, in the place of the library that nvidia-ml-py would load."""
    fake = FakeLibrary()
    monkeypatch.setattr(pynvml, "nvmlLib", fake)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake
