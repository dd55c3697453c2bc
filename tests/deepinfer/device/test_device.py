"""Opening a device by name."""

import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer.device import DEVICES, open_device
from deepinfer.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", ["cpu", "cpu-stepped"])
def test_a_device_opens_by_the_name_it_carries(name):
    """A device opened by name reports that name, and puts tensors on the CPU here."""
    device = open_device(name)
    try:
        assert device.name == name
        assert device.torch_device.type == "cpu"
    finally:
        device.close()


def test_an_unknown_device_is_a_user_error_with_the_nearest_name():
    """A misspelt device names the valid ones and hints at the nearest."""
    with pytest.raises(UserError, match="'cpu-steped'; valid: cpu, cpu-stepped, cuda") as caught:
        open_device("cpu-steped")
    assert caught.value.hint == "did you mean 'cpu-stepped'?"


@pytest.mark.parametrize(
    ("name", "valid", "hint"),
    [("cpu", "none", None), ("cuda", "blocking_wait", "did you mean 'blocking_wait'?")],
)
def test_an_option_the_device_does_not_take_is_a_user_error(name, valid, hint):
    """An option of another device is refused before the device is opened."""
    with pytest.raises(
        UserError, match=f"unknown option 'blocking_wayt'; valid: {valid}"
    ) as caught:
        open_device(name, blocking_wayt=True)
    assert caught.value.hint == hint


def test_cuda_without_a_gpu_is_a_user_error(monkeypatch):
    """Asking for cuda where torch finds none says so and hints at what to do."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="finds no CUDA device") as caught:
        open_device("cuda")
    assert "cpu" in caught.value.hint


@pytest.mark.parametrize("module", ["deepinfer.device", "deepinfer.device.cpu"])
def test_importing_loads_no_torch(module):
    """The package and the CPU devices import without torch, so that labs start at once."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("name", [*DEVICES[:-1], pytest.param("cuda", marks=pytest.mark.cuda)])
def test_every_name_in_the_listing_opens(name):
    """No name in DEVICES is without an implementation."""
    assert DEVICES[-1] == "cuda"
    open_device(name).close()
