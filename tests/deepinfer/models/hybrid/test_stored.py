"""The stored front of a slot, cut directly or put in order first."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.errors import UserError
from deepinfer.models.hybrid.geometry import IDS, OPEN, POSITIONS, WINDOW, Geometry
from deepinfer.models.hybrid.released import v41_flash
from deepinfer.models.hybrid.stored import reordered, stored_slice

# Windows of 3, one draft: rings of 5 rows of 33 bytes, so that there is padding between them.
CONFIG = v41_flash(head_dim=32, sliding_window=3, max_draft_tokens=1, num_stored_layers=3)
SHORT, LONG = Geometry.of(CONFIG, 4), Geometry.of(CONFIG, 4, ring_len=9)


def row(layer: int, position: int) -> np.ndarray:
    """A row no other layer or position has."""
    rng = np.random.default_rng([layer, position])
    return rng.integers(1, 256, 33, dtype=np.uint8)


def slot_of(geometry: Geometry, num_tokens: int) -> np.ndarray:
    """A slot whose rings were written with positions 0 to `num_tokens`, one after the other."""
    slot = np.zeros(geometry.bytes_per_slot, np.uint8)
    for region in geometry.slot:
        if region.kind in (OPEN, IDS, POSITIONS):
            slot[region.offset : region.offset + region.num_bytes] = 255
        for position in range(num_tokens) if region.kind == WINDOW else ():
            at = region.offset + position % region.num_rows * 33
            slot[at : at + 33] = row(region.layer or 0, position)
    return slot


@pytest.mark.parametrize("num_tokens", range(2 * 9 + 3))
def test_a_long_ring_is_put_in_the_order_of_the_short_one(num_tokens):
    """At every length around both rings' wraps: the bytes a short ring would have had."""
    front = slot_of(SHORT, num_tokens)[: SHORT.stored_bytes]
    assert np.array_equal(stored_slice(slot_of(LONG, num_tokens), LONG, SHORT, num_tokens), front)
    assert np.array_equal(stored_slice(slot_of(SHORT, num_tokens), SHORT, SHORT, num_tokens), front)


def test_a_long_ring_cut_without_reordering_would_be_wrong():
    """The reordering matters as soon as the long ring holds more than the short one."""
    for num_tokens in (6, 9, 12):
        slot = slot_of(LONG, num_tokens)
        ordered = stored_slice(slot, LONG, SHORT, num_tokens)
        assert not np.array_equal(slot[: SHORT.stored_bytes], ordered)


def test_a_direct_cut_copies_nothing():
    """Short rings: the result is the front of the slot itself, and nothing dropped is in it."""
    slot = slot_of(SHORT, 7)
    front = stored_slice(slot, SHORT, SHORT, 7)
    assert np.shares_memory(front, slot)
    assert len(front) == SHORT.stored_bytes == 3 * 192  # 165 bytes each, to the next 32
    assert not (front == 255).all()


def test_released_sizes():
    """1,415,040 bytes whichever ring the slot has."""
    short = Geometry.of(v41_flash(), 128)
    long = Geometry.of(v41_flash(), 128, ring_len=512)
    slot = np.zeros(long.bytes_per_slot, np.uint8)
    assert stored_slice(slot, long, short, 1000).shape == (1_415_040,)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5])
def test_rows_of_no_position_are_zero(num_tokens):
    """A prompt shorter than the ring leaves the rest of it empty, whatever bytes were there."""
    ring = np.full((6, 2), 9, np.uint8)
    out = reordered(ring, 4, num_tokens)
    assert (out != 0).all(1).tolist() == [position < num_tokens for position in range(4)]


def test_what_cannot_be_right_is_refused():
    """A slot of another size, and a ring in which wanted rows are overwritten."""
    with pytest.raises(UserError, match="slot: "):
        stored_slice(np.zeros(5, np.uint8), LONG, SHORT, 3)
    with pytest.raises(UserError, match="ring: 3 rows; at least 4"):
        reordered(np.zeros((3, 2), np.uint8), 4, 10)
    with pytest.raises(UserError, match="num_tokens: -1"):
        stored_slice(slot_of(SHORT, 0), SHORT, SHORT, -1)
