"""Layouts: where rows go, what is looked back at, which ring rows may be read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.models.hybrid import layout_builder
from deepinfer.models.hybrid.cache import HybridCache
from deepinfer.models.hybrid.geometry import Geometry
from deepinfer.models.hybrid.layer_plan import HybridConfig, v4_config, v41_config
from deepinfer.models.hybrid.layout_builder import Layouts
from tests.deepinfer.hybrid_steps import Steps, chunked
from tests.deepinfer.step_plans import Run, as_planned, step_plan
from tests.golden_models import load_golden
from tests.hybrid_configs import v4_raw, v41_raw

V41 = v41_config(v41_raw([0, 2], sources=[1], selectors=[1], publisher=None))
V4 = v4_config(v4_raw(ratios=(4, 16), window=8))


def layouts(config: HybridConfig, device: SteppedCpuDevice, size: int = 4) -> Layouts:
    cache = HybridCache(config, Geometry.of(config, size), 20, 5, torch.device("cpu"))
    return Layouts(config, cache, device)


def test_rows_go_to_the_block_of_their_last_token(device: SteppedCpuDevice) -> None:
    """Ratio 2 in blocks of 4: two rows a block, by the table; rotation at the group's start."""
    plan = step_plan([Run(range(9), [7, 3, 9], 3, 6, state=2)], 4)  # positions 3 ... 8
    (closing,) = layouts(V41, device).of(as_planned(plan)).closings.values()
    assert closing.rows.tolist() == [7 * 2 + 1, 3 * 2, 3 * 2 + 1]
    assert closing.positions.tolist() == [2, 4, 6]


def test_a_ratio_beyond_the_block_size_fills_every_nth_block(device: SteppedCpuDevice) -> None:
    """Ratio 16 in blocks of 4: row 0 in the fourth block of the table, row 1 in the eighth."""
    table = [11, 12, 13, 14, 15, 16, 17, 18]
    plan = step_plan([Run(range(32), table, 0, 32, state=1)], 4)
    layout = layouts(V4, device).of(as_planned(plan))
    (closing,) = (c for compressor, c in layout.closings.items() if compressor.ratio == 16)
    assert closing.rows.tolist() == [14, 18]
    (tile,) = layout.tiles
    assert tile.rows[16].blocks.tolist() == [[14, 18]]
    assert tile.rows[16].visible[0, [14, 15, 30, 31]].tolist() == [0, 1, 1, 2]


def test_rows_are_found_through_the_block_table(device: SteppedCpuDevice) -> None:
    """Ratio 2 in blocks of 4: rows 2b and 2b + 1 lie in block b of the table; -1 reads row 0."""
    plan = step_plan([Run(range(9), [7, 3, 9], 8, state=2)], 4)
    (tile,) = layouts(V41, device).of(as_planned(plan)).tiles
    seen = tile.rows[2]
    rows = torch.tensor([[[3, 0, -1, 2]]])
    assert seen.num_rows == 4
    assert seen.places_of(rows).tolist() == [[[3 * 2 + 1, 7 * 2, 7 * 2, 3 * 2]]]


def test_what_is_kept_is_a_slice_where_it_can_be(device: SteppedCpuDevice) -> None:
    """All tokens of decodes; of long chunks side by side the last ones, by number."""
    decodes = [Run(range(9), [1, 2, 3], 8, state=1), Run(range(7), [4, 5], 6, state=2)]
    assert layouts(V41, device).of(as_planned(step_plan(decodes, 4))).window.tokens == slice(0, 2)
    long = [Run(range(40), range(1, 11), 0, 39, state=state) for state in (1, 2)]
    window = layouts(V41, device).of(as_planned(step_plan(long, 4))).window
    last = [*range(39 - V41.ring_len, 39), *range(78 - V41.ring_len, 78)]
    assert window.tokens.tolist() == last
    x = torch.randn(78, 2)
    assert torch.equal(window.of(x), x[last])


def test_open_group_is_looked_back_at(device: SteppedCpuDevice) -> None:
    """An overlapping group of 4 needs the 8 tokens up to its last one: those of earlier steps from
    the slot, those before the start from nowhere. The group before counts by its first series, the
    own one by its second: numbers are token * 2 + series."""
    plan = step_plan([Run(range(9), [1, 2, 3], 2, 6, state=3)], 4)  # positions 2 ... 7
    layout = layouts(V4, device).of(as_planned(plan))
    (closing,) = (c for compressor, c in layout.closings.items() if compressor.ratio == 4)
    members = closing.members
    assert members is not None
    assert members.missing.nonzero().flatten().tolist() == [
        0,
        1,
        2,
        3,
    ]  # of row 0: positions -4 ... -1
    assert members.old.tolist() == [4, 5, 8, 9]  # positions 0 and 1, of both rows
    assert members.old_slots.tolist() == [3] * 4
    assert members.old_rows.tolist() == [1, 3, 0, 2]
    new = [place for place in range(16) if place not in (0, 1, 2, 3, 4, 5, 8, 9)]
    assert members.tokens[new].tolist() == [1, 3, 0, 2, 5, 7, 9, 11]


def test_only_rows_with_the_wanted_tag_are_read(device: SteppedCpuDevice) -> None:
    """A decode at position 20 sees positions 13 ... 20 of its ring, less one with another tag."""
    maker = layouts(V41, device)
    ring_len, cache = V41.ring_len, maker._cache
    positions = torch.arange(20)
    slots = torch.full((20,), 2)
    cache.write_tags(slots[-ring_len:], positions[-ring_len:] % ring_len, positions[-ring_len:])
    cache.write_tags(torch.tensor([2]), torch.tensor([15 % ring_len]), torch.tensor([1]))
    plan = step_plan([Run(range(21), range(1, 7), 20, state=2)], 4)
    layout = maker.of(as_planned(plan))
    (tile,) = layout.tiles
    seen = (~tile.ring.hidden[0, 0, 0]).nonzero()[:, 0].tolist()
    assert seen == sorted(p % ring_len for p in (13, 14, 16, 17, 18, 19, 20))
    (tags,) = layout.tags
    assert sorted(tags.wanted[0][tags.read[0]].tolist()) == list(range(13, 21))


def test_sequences_with_equal_numbers_of_tokens_share_a_tile(device: SteppedCpuDevice) -> None:
    """Decodes form one tile whatever lies between them; a long chunk reads its ring first."""
    runs = [
        Run(range(40), range(1, 11), 9, state=1),
        Run(range(40), range(1, 11), 5, 20, state=2),
        Run(range(40), range(1, 11), 30, state=3),
    ]
    chunk, decodes = layouts(V41, device).of(as_planned(step_plan(runs, 4))).tiles
    assert (decodes.num_seqs, decodes.num_queries) == (2, 1)
    assert decodes.tokens.tolist() == [0, 21]
    assert decodes.slots.tolist() == [1, 3]
    assert chunk.ring.before
    assert not decodes.ring.before
    assert chunk.own is not None
    assert decodes.own is None


@pytest.mark.parametrize("name", ["v41_b", "v4_a"])
def test_small_tiles_change_nothing(
    name: str, device: SteppedCpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks cut into tiles of 5 queries, batches into tiles of few positions: the same logits."""
    monkeypatch.setattr(layout_builder, "MAX_QUERIES", 5)
    monkeypatch.setattr(layout_builder, "MAX_POSITIONS", 100)
    model = load_golden(name)
    steps = Steps(model.config, model.weights, device, num_blocks=90)
    requests = [steps.sequence(model.values["ids.0"], state=state) for state in (1, 2, 3)]
    for count in chunked(60, 26):
        steps.step(*((request, count) for request in requests))
    for request in requests:
        difference = request.all_logits.numpy() - model.values["raw.0.logits"]
        assert np.abs(difference).max() < 5e-5
    assert steps.wrong_rows == 0
