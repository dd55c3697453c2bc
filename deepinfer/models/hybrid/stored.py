"""The front of a state slot as a store would keep it: the rings of the stored layers.

While a long prompt is computed the rings may be longer than decoding needs, to keep older rows. A
row lies at its position modulo the length of its ring, so a long ring is first put in the order of
the short one; a slot that has short rings already is cut where its stored part ends.

    long, 6 rows, positions 0..7     6 7 2 3 4 5
    short, 4 rows                    4 5 6 7         position p in row p % 4

Bytes only: knows no row formats, no devices, no store. Invariant: what comes back is what the front
of a slot with short rings would hold after the same positions, byte for byte; rows of no position
are zero.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import UserError, check_int
from deepinfer.models.hybrid.geometry import WINDOW, Geometry

Bytes = NDArray[np.uint8]


def stored_slice(slot: Bytes, geometry: Geometry, decoding: Geometry, num_tokens: int) -> Bytes:
    """The first `decoding.stored_bytes` bytes of a slot in the layout that decoding has.

    Args:
        slot: uint8 [geometry.bytes_per_slot].
        geometry: the layout of `slot`.
        decoding: the layout with rings of the length decoding needs.
        num_tokens: positions written to the rings, all of them committed.

    Returns:
        A view of `slot` if its rings have that length already; otherwise a new array.

    Raises:
        UserError: the slot is not of this geometry, or its rings are too short.
    """
    check_int("num_tokens", num_tokens, 0)
    if slot.shape != (geometry.bytes_per_slot,):
        raise UserError(f"slot: {slot.shape}; a slot of this model: ({geometry.bytes_per_slot},)")
    if geometry == decoding:
        return slot[: decoding.stored_bytes]
    out = np.zeros(decoding.stored_bytes, np.uint8)
    for region in decoding.slot:
        if not region.stored:
            continue
        source = geometry.region(WINDOW, region.layer)
        assert source is not None, "geometries of different models"
        ring = slot[source.offset : source.offset + source.num_bytes]
        rows = reordered(ring.reshape(source.num_rows, -1), region.num_rows, num_tokens)
        out[region.offset : region.offset + region.num_bytes] = rows.reshape(-1)
    return out


def reordered(ring: Bytes, ring_len: int, num_tokens: int) -> Bytes:
    """The newest rows of a ring in the order of a ring of `ring_len` rows.

    Args:
        ring: uint8 [rows, bytes per row], at least `ring_len` rows.
        ring_len: rows of the result, at least 1.
        num_tokens: positions written, from 0; the last `ring_len` of them are kept.

    Raises:
        UserError: `ring` is shorter than the result: rows that are wanted are overwritten in it.
    """
    if len(ring) < ring_len:
        raise UserError(f"ring: {len(ring)} rows; at least {ring_len}, the rows to be kept")
    positions = np.arange(max(num_tokens - ring_len, 0), num_tokens)
    out = np.zeros((ring_len, ring.shape[1]), np.uint8)
    out[positions % ring_len] = ring[positions % len(ring)]
    return out
