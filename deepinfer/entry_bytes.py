"""Rows of blocks, or whole state slots, as runs of bytes: what moves between a pool and a store.

An image of an item is the bytes of its row in every part of the pool, one part behind the other;
tags, where rows have them, are parts like any other, so they travel with what they vouch for.

    parts            [num_blocks, a bytes] [num_blocks, b bytes]      one per layer, kind, tags
    image of block   a bytes | b bytes
    entry            image | image | image                            of the blocks of a segment

Knows nothing of requests, keys or who owns what. Called inside submitted work. Invariant: `save`
writes the buffer and `load` the items it is given, and nothing else; what `load` brings back is
what `save` took, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.device.base import Device
from deepinfer.plan import Int32

Bytes = NDArray[np.uint8]


class EntryBytes:
    """The items of one pool as bytes.

    Args:
        parts: each [num_items, ...], contiguous; an item is its row in all of them.

    Attributes:
        bytes_per_item: of an image.
    """

    def __init__(self, parts: Sequence[Tensor], device: Device) -> None:
        self._parts = [part.view(len(part), -1).view(torch.uint8) for part in parts]
        self._widths = [part.shape[1] for part in self._parts]
        self._device = device
        self.bytes_per_item = sum(self._widths)

    def save(self, ids: Int32, into: Bytes) -> None:
        """Write the images of items `ids`, int32 [n], to `into`, uint8 [n * bytes_per_item].

        On CUDA the bytes are there when the stream has come so far.
        """
        index = self._device.upload(ids).long()
        images = torch.cat([part.index_select(0, index) for part in self._parts], 1)
        torch.from_numpy(into).view(images.shape).copy_(images, non_blocking=True)

    def load(self, ids: Int32, source: Bytes, first: int = 0) -> None:
        """Read items `ids`, int32 [n], from the images `first` and following of `source`."""
        index = self._device.upload(ids).long()
        start, num_bytes = first * self.bytes_per_item, len(ids) * self.bytes_per_item
        images = torch.from_numpy(source[start : start + num_bytes]).view(len(ids), -1)
        images = images.to(index.device, non_blocking=True)
        for part, image in zip(self._parts, torch.split(images, self._widths, 1), strict=True):
            part.index_copy_(0, index, image)
