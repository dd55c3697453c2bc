"""Bytes of blocks, slots and tokens, and where each part lies."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from deepinfer.errors import UserError
from deepinfer.models.hybrid.draft_plan import DraftPlan
from deepinfer.models.hybrid.geometry import (
    ALIGNMENT,
    COMPRESSED,
    IDS,
    INDEX,
    OPEN,
    OPEN_INDEX,
    POSITIONS,
    WINDOW,
    Geometry,
    row_bytes,
)
from deepinfer.models.hybrid.layer_plan import HybridConfig
from deepinfer.models.hybrid.released import v4_flash, v41_flash

CONFIGS = [v41_flash(), v4_flash(), v41_flash(cache="fp32"), v4_flash(cache="bf16")]


def test_v41_flash_is_that_of_the_served_system():
    """Every figure the book and the model's report give."""
    geometry = Geometry.of(v41_flash(), 128)
    assert geometry.ring_len == 134
    assert row_bytes("packed", WINDOW, 512) == 528
    assert geometry.ring_bytes == 70_752
    assert geometry.stored_bytes == 1_415_040 == 20 * 70_752
    assert {rows.bytes_per_row for rows in geometry.paged if rows.kind == COMPRESSED} == {288}
    assert {rows.bytes_per_row for rows in geometry.paged if rows.kind == INDEX} == {68}
    assert geometry.bytes_per_token == 890
    assert geometry.bytes_per_block == 113_920 == 128 * 890
    assert [(rows.layer, rows.rows_per_block) for rows in geometry.paged[::2]] == [
        *((2, 64), (8, 64), (14, 64)),
        (20, 128),
    ]


def test_v41_flash_slot():
    """40 rings, three open groups of 4096 B a token, ids of the n-grams, one position per row."""
    geometry = Geometry.of(v41_flash(), 128)
    kinds = [region.kind for region in geometry.slot]
    assert kinds == [WINDOW] * 40 + [OPEN] * 3 + [IDS, POSITIONS]
    assert [region.bytes_per_row for region in geometry.slot if region.kind == OPEN] == [4096] * 3
    opened = (2 + 5) * 4096
    ids = 96  # (3 + 1 + 5) * 8 = 72
    positions = 1088  # 134 * 8 = 1072, and 16 to the next multiple of 32
    assert geometry.bytes_per_slot == 40 * 70_752 + 3 * opened + ids + positions == 2_917_280


def test_the_released_draft_layers():
    """Three rings more of a V4.1 slot: 43 times 70,752; V4's MTP keeps a ring and 7 positions of
    four streams."""
    block = DraftPlan(3, 128, 3, 5, 128799, (37, 38, 39), 256)
    v41, v4 = v41_flash(draft=block), v4_flash(draft=DraftPlan(1, 256, 6))
    v41.check()
    rings = [part for part in Geometry.of(v41, 128).slot if part.kind == WINDOW]
    assert sum(part.num_bytes for part in rings) == 3_042_336
    assert [part.layer for part in rings if part.draft] == [40, 41, 42]
    assert Geometry.of(v41, 128).stored_bytes == 1_415_040
    more = Geometry.of(v4, 128).bytes_per_slot - Geometry.of(v4_flash(), 128).bytes_per_slot
    assert more == 70_752 + 7 * 4 * 4096 * 2


def test_v4_flash_numbers():
    """21 layers of ratio 4 with keys, 20 of ratio 128 without, rings in all 43."""
    geometry = Geometry.of(v4_flash(), 128)
    assert geometry.bytes_per_token == 21 * Fraction(288 + 68, 4) + 20 * Fraction(288, 128) == 1914
    assert geometry.bytes_per_block == 128 * 1914 == 244_992
    rings = 43 * 70_752
    overlapping = 21 * (8 + 5) * (4 * 4 * 512 + 4 * 4 * 128)  # two series of kv and gate, and keys
    dense = 20 * (128 + 5) * 4096
    assert geometry.bytes_per_slot == rings + overlapping + dense + 1088 == 16_734_304
    assert geometry.stored_bytes == 0
    assert {rows.rows_per_block for rows in geometry.paged} == {32, 1}
    assert geometry.rows(INDEX, 3) is None
    assert geometry.region(OPEN_INDEX, 2) is not None
    assert geometry.region(OPEN_INDEX, 3) is None


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.family} {config.cache}")
def test_regions_are_aligned_and_do_not_overlap(config: HybridConfig):
    """Each starts where the one before has ended, on a multiple of 32; stored ones lead."""
    geometry = Geometry.of(config, 128)
    end = 0
    for region in geometry.slot:
        assert region.offset % ALIGNMENT == 0
        assert 0 <= region.offset - end < ALIGNMENT
        end = region.offset + region.num_bytes
    assert 0 <= geometry.bytes_per_slot - end < ALIGNMENT
    stored = [region for region in geometry.slot if region.stored]
    assert list(geometry.slot[: len(stored)]) == stored
    assert [region.layer for region in stored] == list(range(config.num_stored_layers))
    assert geometry.stored_bytes == len(stored) * geometry.ring_bytes
    assert len({(region.kind, region.layer) for region in geometry.slot}) == len(geometry.slot)


def test_padding_between_regions():
    """A ring that is no multiple of 32 bytes is followed by padding, inside the stored part too."""
    config = v41_flash(cache="fp32", qat=False, num_stored_layers=2, sliding_window=8)
    geometry = Geometry.of(replace(config, head_dim=33), 128)
    assert geometry.ring_bytes == 14 * 33 * 4 == 1848
    assert geometry.slot[1].offset == 1856
    assert geometry.stored_bytes == 2 * 1856
    assert geometry.slot[2].offset == geometry.stored_bytes


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 64, 128])
@pytest.mark.parametrize("config", CONFIGS[:2], ids=["v41", "v4"])
def test_every_row_has_a_place_of_its_own(config: HybridConfig, block_size: int):
    """The place of row j, as the module's docstring has it, is in range and used once."""
    for rows in Geometry.of(config, block_size).paged:
        places = set()
        num_rows = 2 * max(block_size, rows.ratio) // rows.ratio
        for j in range(num_rows):
            last = (j + 1) * rows.ratio - 1
            row = (last % block_size) // rows.ratio
            assert row < rows.rows_per_block
            places.add((last // block_size, row))
        assert len(places) == num_rows


def test_a_long_prefill_ring_only_makes_rings_longer():
    """Everything but rings and their positions has its size."""
    config = v41_flash()
    short, long = Geometry.of(config, 128), Geometry.of(config, 128, ring_len=300)
    assert long.ring_len == 300
    assert long.ring_bytes == 300 * 528
    assert long.paged == short.paged
    for before, after in zip(short.slot, long.slot, strict=True):
        is_ring = before.kind in (WINDOW, POSITIONS)
        assert after.num_rows == (300 if is_ring else before.num_rows)


@pytest.mark.parametrize(
    ("block_size", "part", "hint"),
    [
        (0, "block_size: 0; at least 1", None),
        (127, "block_size: 127 and the ratio 2 of layer 2 do not divide one another", "126 or 128"),
        (3, "block_size: 3 and the ratio 2 of layer 2", "2 or 4"),
    ],
)
def test_a_block_that_would_hold_part_of_a_row_is_refused(block_size, part, hint):
    """Both numbers, the layer, and what would do."""
    with pytest.raises(UserError, match=part) as caught:
        Geometry.of(v41_flash(), block_size)
    if hint is not None:
        assert hint in str(caught.value.hint)


def test_the_block_size_of_the_hint_fits_every_layer():
    """Not only the one that is refused: 126 and 129 are multiples of 3, and 4 divides neither."""
    config = v41_flash()
    source = config.layers[2]
    layers = [
        replace(source, index=index, ratio=ratio, source=index, selector=index)
        for index, ratio in enumerate((3, 4))
    ]
    config = replace(config, layers=tuple(layers), engram=None, num_stored_layers=0)
    with pytest.raises(UserError, match="block_size: 128 and the ratio 3 of layer 0") as caught:
        Geometry.of(config, 128)
    assert "120 or 132 fits every layer" in str(caught.value.hint)
    for size in (120, 132):
        Geometry.of(config, size)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Geometry.of(v41_flash(), 128, ring_len=133), "ring_len: 133; at least 134"),
        (lambda: Geometry.of(v41_flash(num_stored_layers=41), 128), "num_stored_layers: 41; 0 to"),
        (lambda: Geometry.of(v41_flash(index_head_dim=48), 128), "packed' index rows .* width 48"),
        (
            lambda: Geometry.of(v41_flash(cache="fp32", qat=True, head_dim=528), 128),
            "qat: rounded window rows .* width 528",
        ),
    ],
)
def test_other_geometries_that_cannot_be(make, part):
    """Refused in one line before anything is allocated."""
    with pytest.raises(UserError, match=part):
        make()
