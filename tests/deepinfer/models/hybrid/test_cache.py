"""The two pools: rows come back as their format says, copies and writes stay where they belong."""

from __future__ import annotations

import pytest
import torch

from deepinfer.models.hybrid.cache import HybridCache
from deepinfer.models.hybrid.formats import quantise
from deepinfer.models.hybrid.geometry import COMPRESSED, INDEX, OPEN, WINDOW, Geometry
from deepinfer.models.hybrid.layer_plan import v41_config
from tests.hybrid_configs import v41_raw

RAW = v41_raw([0, 2, 1], sources=[1, 2], selectors=[1, 2], publisher=None, engram=[1])
CPU = torch.device("cpu")


def new_cache(**overrides: object) -> HybridCache:
    config = v41_config(RAW, **overrides)
    return HybridCache(config, Geometry.of(config, 4), 9, 5, CPU)


def rows(num: int, dim: int = 32) -> torch.Tensor:
    return torch.randn(num, dim, generator=torch.Generator().manual_seed(num))


@pytest.mark.parametrize("kind", [WINDOW, COMPRESSED, INDEX])
@pytest.mark.parametrize("settings", [{"cache": "packed"}, {"qat": True}], ids=["packed", "qat"])
def test_rows_come_back_quantised(kind: str, settings: dict[str, object]) -> None:
    """Packed rows, and plain rows of a model with quantisers, hold the same numbers."""
    cache, x = new_cache(**settings), rows(3)
    assert torch.equal(cache.round_trip(kind, x), quantise(kind, x))
    if kind == WINDOW:
        slots, places = torch.tensor([2, 2, 4]), torch.tensor([0, 13, 5])
        cache.write_window(0, slots, places, x)
        found = cache.read_window(0, torch.tensor([4, 2]))
        found = found[torch.tensor([1, 1, 0]), places]
    else:
        places = torch.tensor([17, 2, 5])
        cache.write_rows(kind, 1, places, x)
        found = cache.read_rows(kind, 1, places)
    assert torch.equal(found, quantise(kind, x))


def test_blocks_are_read_in_the_order_asked() -> None:
    """All rows of each block, first to last."""
    cache, x = new_cache(), rows(18)
    cache.write_rows(COMPRESSED, 1, torch.arange(18), x)  # two rows a block
    found = cache.read_blocks(COMPRESSED, 1, torch.tensor([[3, 1], [0, 8]]))
    assert torch.equal(found, torch.stack([x[[6, 7, 2, 3]], x[[0, 1, 16, 17]]]))


def test_copies_read_all_sources_first() -> None:
    """A chain of copies moves what was there before, whole blocks and whole slots, no others."""
    cache = new_cache()
    for kind, layer in ((COMPRESSED, 1), (INDEX, 2)):
        stored = cache.paged(kind, layer)
        stored.copy_(torch.arange(9.0)[:, None, None].expand_as(stored))
    for region in cache.geometry.slot:
        values = cache.region(region.kind, region.layer)
        values.copy_(torch.arange(5)[:, None, None].expand_as(values))
    pairs = torch.tensor([[1, 2], [2, 3]], dtype=torch.int32)
    cache.copy_blocks(pairs)
    cache.copy_states(pairs)
    for kind, layer in ((COMPRESSED, 1), (INDEX, 2)):
        assert cache.paged(kind, layer)[:, 0, 0].tolist() == [0, 1, 1, 2, 4, 5, 6, 7, 8]
    for region in cache.geometry.slot:
        values = cache.region(region.kind, region.layer)
        expected = torch.tensor([0, 1, 1, 2, 4])[:, None, None].expand_as(values)
        assert torch.equal(values, expected.to(values.dtype)), region.name


def test_regions_do_not_share_bytes() -> None:
    """Filling one region of one slot changes no other region and no other slot."""
    cache = new_cache()
    for number, region in enumerate(cache.geometry.slot, start=1):
        cache.region(region.kind, region.layer)[2] = number
    for number, region in enumerate(cache.geometry.slot, start=1):
        values = cache.region(region.kind, region.layer)
        assert (values[2] == number).all(), region.name
        assert not values[[0, 1, 3, 4]].any(), region.name
    assert cache.region(OPEN, 1).dtype == torch.float32


def test_tags_say_which_position_a_row_holds() -> None:
    """Position + 1, of the rows written only."""
    cache = new_cache()
    cache.write_tags(torch.tensor([3, 3]), torch.tensor([0, 13]), torch.tensor([14, 13]))
    tags = cache.read_tags(torch.tensor([1, 3]))
    assert tags[1].tolist() == [15, *[0] * 12, 14]
    assert not tags[0].any()


def test_consecutive_rings_are_read_in_place() -> None:
    """A slice gives the rows of the same slots in a list, and a view where nothing is decoded."""
    for settings in ({}, {"cache": "packed"}):
        cache = new_cache(**settings)
        slots, places = torch.tensor([1, 2, 3]), torch.tensor([0, 13, 5])
        cache.write_window(1, slots, places, rows(3))
        listed, sliced = cache.read_window(1, slots), cache.read_window(1, slice(1, 4))
        assert torch.equal(listed, sliced)
        in_place = (
            sliced.untyped_storage().data_ptr()
            == cache.region(WINDOW, 1).untyped_storage().data_ptr()
        )
        assert in_place == (not settings)


def test_erase_zeroes_what_one_token_left() -> None:
    """Position 5 at block size 4: row 5 of the rings, and the row of ratio 2 and 1 that it closed.

    Position 4 closes no row of ratio 2.
    """
    cache = new_cache()
    for layer in (1, 2):
        cache.paged(COMPRESSED, layer).fill_(1)
        cache.region(WINDOW, layer).fill_(1)
    cache.erase(5, 7, 3)
    assert cache.paged(COMPRESSED, 1)[7, :, 0].tolist() == [0, 1]
    assert cache.paged(COMPRESSED, 2)[7, :, 0].tolist() == [1, 0, 1, 1]
    for layer in (1, 2):
        erased = (cache.region(WINDOW, layer)[..., 0] == 0).nonzero().tolist()
        assert erased == [[3, 5]]
    cache.erase(4, 6, 3)
    assert cache.paged(COMPRESSED, 1)[6].all()
