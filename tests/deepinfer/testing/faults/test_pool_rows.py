"""Rows that a client moves: written with a load's tags, found again, or found to be another's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from deepinfer.cache_engine import KVCache
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.engine import LLMEngine
from deepinfer.models.hybrid.cache import HybridCache
from deepinfer.models.hybrid.layer_plan import HybridConfig, v41_config
from deepinfer.sequence import SamplingParams
from deepinfer.testing.faults.pool_rows import PoolRows
from deepinfer.testing.faults.scenario import MODEL
from tests.hybrid_configs import v41_raw

CONFIG = EngineConfig(
    block_size=4, num_blocks=17, max_num_seqs=2, max_num_batched_tokens=32, checks="tags"
)
# Blocks of 4 with four rows of ratio 1 and two of ratio 2.
HYBRID = v41_config(v41_raw([0, 2, 2, 1], sources=[1, 3], selectors=[1, 3], publisher=None))
# Of the first 6 positions: their rows, one tag for each kind of rows.
ROWS_OF_SIX = {"qwen3": 6, "v41": 6 + 3}
BLOCKS = np.array([5, 2], np.int32)


@pytest.fixture(params=["qwen3", "v41"])
def engine(request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    model: ModelConfig | HybridConfig = HYBRID if request.param == "v41" else MODEL
    with LLMEngine(model, CONFIG, device="cpu-stepped") as engine:
        yield engine


def num_rows(engine: LLMEngine) -> int:
    return ROWS_OF_SIX["v41" if isinstance(engine.cache, HybridCache) else "qwen3"]


def test_a_load_is_found_where_it_was_written(engine: LLMEngine) -> None:
    """All rows of its positions, in its own blocks; those of another load are all wrong."""
    rows = PoolRows(engine)
    rows.write(BLOCKS, 6, "one")
    assert rows.read(BLOCKS, 6, "one") == 0
    assert rows.read(BLOCKS, 6, "two") == num_rows(engine)
    assert rows.read(BLOCKS[::-1].copy(), 6, "one") > 0


def test_rows_behind_a_load_are_left_alone(engine: LLMEngine) -> None:
    """A load of two more rows overwrites the first one; a shorter one leaves its end."""
    rows = PoolRows(engine)
    rows.write(BLOCKS, 8, "long")
    rows.write(BLOCKS, 6, "short")
    assert rows.read(BLOCKS, 6, "short") == 0
    long_left = rows.read(BLOCKS, 8, "long")
    assert long_left == num_rows(engine)  # not the two positions behind it


def test_a_write_touches_no_other_block(engine: LLMEngine) -> None:
    """Neither rows nor tags of blocks that the load does not name; rows change with their tags."""
    PoolRows(engine).write(BLOCKS, 8, "one")
    cache = engine.cache
    if isinstance(cache, KVCache):
        stored = [cache.keys(0), cache.values(0)]
        tags = [cache.tags.block(block) for block in range(CONFIG.num_blocks)]
        written = [bool(tag.all()) for tag in tags]
    else:
        stored = [cache.paged(part.kind, part.layer) for part in cache.geometry.paged]
        written = [
            all(bool(cache.tags.block(ratio, block).all()) for ratio in (1, 2))
            for block in range(CONFIG.num_blocks)
        ]
    assert np.flatnonzero(written).tolist() == [2, 5]
    for rows in stored:
        filled = [bool(rows[block].any()) for block in range(CONFIG.num_blocks)]
        assert np.flatnonzero(filled).tolist() == [2, 5]


def test_a_save_finds_the_rows_a_request_has_computed(engine: LLMEngine) -> None:
    """With the tags of its tokens; after a load into one of its blocks no longer."""
    engine.add_request("a", np.arange(7), SamplingParams(max_tokens=4))
    engine.step()
    rows = PoolRows(engine)
    table = engine.scheduler.seqs.table(engine.scheduler.find("a").row)
    committed = rows.committed("a", 6)
    assert rows.read(table, 6, committed) == 0
    rows.write(table[:1], 4, "other")
    assert rows.read(table, 6, committed) == num_rows(engine) * 4 // 6
