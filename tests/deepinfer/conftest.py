"""What tests of the engine's parts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepinfer.device.cpu import SteppedCpuDevice


@pytest.fixture
def device() -> Iterator[SteppedCpuDevice]:
    """A stepped device of the test's own."""
    device = SteppedCpuDevice()
    yield device
    device.close()
