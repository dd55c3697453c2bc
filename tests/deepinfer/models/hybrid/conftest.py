"""What tests of hybrid models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepinfer.device.cpu import SteppedCpuDevice


@pytest.fixture(scope="module")
def device() -> Iterator[SteppedCpuDevice]:
    """One stepped device for all tests of a module, whose networks are made once."""
    device = SteppedCpuDevice()
    yield device
    device.close()
