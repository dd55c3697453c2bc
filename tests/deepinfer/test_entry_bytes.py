"""Items of a pool as bytes: what comes back is what was taken, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.entry_bytes import EntryBytes

SHAPES = [
    ((3, 4), torch.float32),
    ((5,), torch.int64),
    ((2, 3), torch.uint8),
    ((7,), torch.bfloat16),
]


@pytest.fixture
def parts():
    """Six items in four parts of other shapes and types, all numbers different."""
    made = []
    for shape, dtype in SHAPES:
        count = 6 * int(np.prod(shape))
        made.append((torch.arange(count) % 251).to(dtype).view(6, *shape).contiguous())
    return made


def test_bytes_of_an_item_are_those_of_its_parts(parts):
    """One behind the other, in the order of the parts."""
    pool = EntryBytes(parts, SteppedCpuDevice())
    assert pool.bytes_per_item == 48 + 40 + 6 + 14
    buffer = np.zeros(2 * pool.bytes_per_item, np.uint8)
    pool.save(np.array([4, 1], np.int32), buffer)
    expected = [
        part[item].contiguous().view(torch.uint8).numpy().tobytes()
        for item in (4, 1)
        for part in parts
    ]
    assert buffer.tobytes() == b"".join(expected)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_images_from_one_on_go_to_the_items_named(parts, first):
    """Into other items than they came from; the rest stays as it is."""
    device = SteppedCpuDevice()
    before = [part.clone() for part in parts]
    buffer = np.zeros(3 * EntryBytes(parts, device).bytes_per_item, np.uint8)
    EntryBytes(parts, device).save(np.array([0, 1, 2], np.int32), buffer)
    ids = np.array([5, 3, 4][: 3 - first], np.int32)
    EntryBytes(parts, device).load(ids, buffer, first)
    for part, old in zip(parts, before, strict=True):
        expected = old.clone()
        expected[torch.from_numpy(ids).long()] = old[first:3]
        assert torch.equal(part, expected)
